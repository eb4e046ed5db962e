"""What a Mixture-of-Experts layer looks like, and the memory that its calls take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from deep_comm import _core
from deep_comm.config import host_default
from deep_comm.context.low_latency_region import region_bytes
from deep_comm.errors import ArgumentError
from deep_comm.ranks.topology import num_local_experts
from deep_comm.settings import checks, env, integers

Mode = Literal["auto", "prefill", "decode"]
MODES: tuple[Mode, ...] = ("auto", "prefill", "decode")

DEFAULT_DECODE_TOKENS = 128
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_SLOT_ALIGNMENT = 4  # masked grouped kernels want rows of scales to start at 16 bytes
_DEVICE_RING_BYTES = 64 << 20
_HOST_RAIL_SLOTS = 32
_SLOT_METADATA_BYTES = 2048
# Receive region: rows of balanced routing, with so much on top for imbalance, for dispatch and
# again for what combine and a second call in flight need.
IMBALANCE = 1.25
_USES = 2


@dataclass(frozen=True)
class MoEShape:
    """Of a Mixture-of-Experts layer; equal on all ranks.

    Attributes:
        hidden: H.
        num_experts: E.
        num_topk: K.
        max_tokens: the most tokens that a rank may have in a call.
        decode_tokens: M; calls in which no rank has more may go by low-latency mode. At most
            max_tokens.
        dtype: of tokens and results.
        fp8: tokens travel as float8_e4m3 with a float32 scale for 128 columns.
    """

    hidden: int
    num_experts: int
    num_topk: int
    max_tokens: int
    decode_tokens: int
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden", "max_tokens"):
            integers.require(name, getattr(self, name), 1, integers.LARGEST)
        checks.max_experts("num_experts", self.num_experts)
        integers.require("num_topk", self.num_topk, 1, _core.max_topk)
        integers.require("decode_tokens", self.decode_tokens, 1, self.max_tokens)
        if self.dtype not in DTYPES:
            raise ArgumentError(
                "dtype", self.dtype, f"must be one of {', '.join(map(str, DTYPES))}"
            )
        if self.row_bytes % 16 != 0:
            raise ArgumentError("hidden", self.hidden, "must make rows of a multiple of 16 bytes")
        if self.fp8 and (self.dtype != torch.bfloat16 or self.hidden % checks.SCALE_BLOCK != 0):
            raise ArgumentError(
                "fp8",
                True,
                f"needs bfloat16 tokens and a hidden of a multiple of {checks.SCALE_BLOCK}",
            )

    @property
    def row_bytes(self) -> int:
        """Of a token as the experts get it and as it returns."""
        return self.hidden * self.dtype.itemsize

    @property
    def can_decode(self) -> bool:
        """Low-latency mode moves bfloat16 rows."""
        return self.dtype == torch.bfloat16 and self.num_slots <= _core.max_low_latency_tokens

    @property
    def may_exceed(self) -> bool:
        """A rank may have more tokens than low-latency mode takes."""
        return self.max_tokens > self.decode_tokens

    @property
    def num_slots(self) -> int:
        """Tokens of a rank that low-latency calls have room for.

        Where a rank may have more than decode_tokens, one more: so many say "too many for this".
        """
        if not self.may_exceed:
            return self.decode_tokens
        return integers.round_up(self.decode_tokens + 1, _SLOT_ALIGNMENT)

    def num_balanced_rows(self, num_ranks: int) -> int:
        """Rows that a rank receives when all ranks have max_tokens and routing is uniform."""
        spread = 1 - (1 - 1 / num_ranks) ** self.num_topk  # of the ranks that a token goes to
        return math.ceil(self.max_tokens * num_ranks * spread)

    def num_sent_rows(self, num_nodes: int) -> int:
        """Rows that a rank sends to one of the nodes in that case."""
        return math.ceil(self.max_tokens * (1 - (1 - 1 / num_nodes) ** self.num_topk))

    @property
    def sent_bytes(self) -> int:
        """Of a token as it travels, with its scales."""
        return self.hidden + self.hidden // checks.SCALE_BLOCK * 4 if self.fp8 else self.row_bytes

    @property
    def num_balanced_selections(self) -> int:
        """Rows that the experts of a rank get in that case: as many as the rank's tokens select."""
        return self.max_tokens * self.num_topk


def preset_decode_tokens(max_tokens: Any) -> Any:
    """Where none are named. What cannot be a number of tokens is refused by MoEShape."""
    if not isinstance(max_tokens, int):
        return max_tokens
    preset = env.DECODE_TOKENS.get()
    if preset == 0:
        raise ArgumentError(
            env.DECODE_TOKENS.name, 0, "must be at least 1, except in vLLM's adapter"
        )
    return min(DEFAULT_DECODE_TOKENS if preset is None else preset, max_tokens)


def check_mode(mode: Any) -> None:
    if mode not in MODES:
        raise ArgumentError("mode", mode, f"must be one of {', '.join(MODES)}")


def require_mode(mode: Any, shape: MoEShape) -> None:
    check_mode(mode)
    if mode == "decode" and not shape.can_decode:
        most = _core.max_low_latency_tokens
        raise ArgumentError("mode", mode, f"needs bfloat16 rows and at most {most} decode_tokens")


def _lines(num_bytes: float) -> int:
    return integers.round_up(math.ceil(num_bytes))


def ring_bytes(shape: MoEShape, num_ranks: int, device_type: str) -> int:
    """For the rings that carry what finds no room in the receive region."""
    if device_type != "cpu":
        return _DEVICE_RING_BYTES  # calls shrink their rings to what there is
    return host_default().ring_bytes(shape.row_bytes, num_ranks)


def rail_bytes(
    shape: MoEShape, num_ranks: int, num_nodes: int, device_type: str, prefills: bool
) -> int:
    """For what crosses between nodes. The same memory holds rings, which calls shrink to what there
    is, or a slot for every row that crosses, at its source and at its destination.
    """
    if device_type != "cpu":
        rings = num_nodes * _DEVICE_RING_BYTES
    else:
        rings = 2 * num_nodes * _HOST_RAIL_SLOTS * (shape.row_bytes + _SLOT_METADATA_BYTES)
    if not prefills:
        return _lines(rings)
    num_rows = min(shape.max_tokens, math.ceil(IMBALANCE * shape.num_sent_rows(num_nodes)))
    # Before a row: experts, weights, its source and places.
    before = 8 * shape.num_topk + 4 + 4 * (num_ranks // num_nodes)
    slot = _lines(shape.sent_bytes) + _lines(before) + integers.LINE
    return _lines(max(rings, 2 * (num_nodes - 1) * num_rows * slot))


def direct_bytes(shape: MoEShape, num_ranks: int) -> int:
    """For the receive region."""
    balanced = shape.num_balanced_selections
    num_rows = min(balanced * num_ranks, math.ceil(balanced * IMBALANCE))
    # Beside each row its expert, weight and source, and the rows of its token.
    beside = 8 + 4 + 4 + 4 * shape.num_topk
    return _lines(_USES * (num_rows * (shape.sent_bytes + beside) + 8 * integers.LINE))


def tier_region_bytes(shape: MoEShape, num_ranks: int, num_nodes: int) -> int:
    """For the receive region of a group of several nodes: received rows, which are grouped
    elsewhere, and the sums of combine on their way.
    """
    per_node = num_ranks // num_nodes
    received = shape.num_balanced_rows(num_ranks)
    num_rows = min(num_ranks * shape.max_tokens, math.ceil(received * IMBALANCE))
    beside = 12 * shape.num_topk + 4 + 8  # experts and weights, source, its node and neighbours
    outputs = num_rows * (shape.sent_bytes + beside)
    # What a neighbour returns of the rows that this rank forwards, their sums, and those that come.
    num_sums = num_nodes * shape.num_sent_rows(num_nodes) + received * (per_node - 1) / per_node
    num_sums = num_sums * IMBALANCE + shape.max_tokens * min(shape.num_topk, num_nodes - 1)
    sums = math.ceil(num_sums) * _lines(shape.row_bytes + 4 * shape.num_topk)
    return _lines(max(_USES * outputs, outputs + sums) + 8 * _USES * integers.LINE)


def control_bytes(shape: MoEShape, num_ranks: int, num_nodes: int, decodes: bool) -> int:
    """For words that ranks wait for, and tables of what a call has learned."""
    per_node, num_experts = num_ranks // num_nodes, shape.num_experts
    words = _core.Engine.workspace_bytes(num_ranks=per_node, num_max_experts=num_experts)
    if num_nodes > 1:
        words += _core.Engine.rail_workspace_bytes(
            num_nodes=num_nodes, ranks_per_node=per_node, num_max_experts=num_experts
        )
    if num_nodes > 1 and decodes:
        words += _core.Engine.low_latency_rail_workspace_bytes(
            num_ranks=num_ranks, num_max_experts=num_experts
        )
    return words


def low_latency_bytes(shape: MoEShape, num_ranks: int, num_nodes: int = 1) -> int:
    return _lines(region_bytes(num_ranks, shape.num_slots, shape.hidden, num_nodes > 1))


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank; print it for the words.

    Attributes:
        rings, receive_region, low_latency_region, control_words: held by the Buffer for its life.
        prefill_call, decode_call: in tensors that a call makes, besides what experts compute with;
            with max_tokens per rank and uniform routing, and with decode_tokens. 0: mode not used.
    """

    shape: MoEShape
    num_ranks: int
    rings: int
    receive_region: int
    low_latency_region: int
    control_words: int
    prefill_call: int
    decode_call: int
    rail: int = 0  # rings between nodes, or slots; 0: all ranks are on one

    @property
    def buffer(self) -> int:
        parts = (self.rings, self.receive_region, self.low_latency_region, self.control_words)
        return sum(parts) + self.rail

    @property
    def num_nvl_bytes(self) -> int:
        """Of the Buffer to build."""
        return self.rings + self.receive_region

    @property
    def total(self) -> int:
        return self.buffer + max(self.prefill_call, self.decode_call)

    def __str__(self) -> str:
        shape, size = self.shape, _human
        lines = [
            f"{self.num_ranks} ranks, {shape.num_experts} experts of hidden size {shape.hidden}, "
            f"top-{shape.num_topk}, {str(shape.dtype).removeprefix('torch.')}"
            f"{' sent as FP8' if shape.fp8 else ''}, up to {shape.max_tokens} tokens per rank.",
            f"The Buffer holds {size(self.buffer)} on every rank for as long as it lives:",
            f"  {size(self.receive_region)} where peers write prefill rows in place,",
            f"  {size(self.rings)} of rings for what does not fit there,",
            f"  {size(self.low_latency_region)} for decode calls of up to "
            f"{shape.decode_tokens} tokens per rank,",
            f"  {size(self.control_words)} of control words.",
        ]
        if self.rail:
            lines.append(f"  {size(self.rail)} of slots or rings between nodes.")
        if self.prefill_call:
            rows = "rows for experts, " if self.rail else ""
            lines.append(
                f"A prefill call of {shape.max_tokens} tokens per rank with uniform routing makes "
                f"tensors of {size(self.prefill_call)}: {rows}what experts return, sums, results."
            )
        if self.decode_call:
            lines.append(
                f"A decode call makes tensors of {size(self.decode_call)}, however many tokens "
                f"there are: {shape.num_slots * self.num_ranks} places for each expert of a rank."
            )
        lines.append(f"Together at most {size(self.total)}, if one call runs at a time.")
        return "\n".join(lines)


def _human(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def estimate_memory(
    shape: MoEShape,
    num_ranks: int,
    mode: Mode = "auto",
    device_type: str = "cuda",
    num_nodes: int = 1,
) -> MemoryEstimate:
    """What calls of this shape take on the rank that has most experts.

    "auto" has room for prefill calls even if every step could be a decode step: those with
    gradients are prefill, and a program with a Buffer chooses for itself.
    """
    integers.require("num_ranks", num_ranks, 1)
    num_local = num_local_experts(0, shape.num_experts, num_ranks)
    decodes = shape.can_decode and mode != "prefill"
    prefills = mode != "decode"
    num_rows = shape.num_balanced_rows(num_ranks)
    # From the experts, their sums, what comes home. Rows for the experts lie in the receive region.
    prefill = shape.row_bytes * (shape.num_balanced_selections + num_rows + shape.max_tokens)
    region = direct_bytes(shape, num_ranks)
    if num_nodes > 1:  # rows for the experts are tensors
        prefill += shape.sent_bytes * shape.num_balanced_selections
        region = tier_region_bytes(shape, num_ranks, num_nodes)
    num_places = num_local * num_ranks * shape.num_slots
    decode = (
        num_places * (shape.sent_bytes + shape.row_bytes + 4) + shape.num_slots * shape.row_bytes
    )
    low_latency = low_latency_bytes(shape, num_ranks, num_nodes) if decodes else 0
    rail = 0
    if num_nodes > 1:
        rail = rail_bytes(shape, num_ranks, num_nodes, device_type, prefills)
    if decodes and num_nodes > 1:
        low_latency = rail = max(low_latency, rail)  # one argument of Buffer gives both their size
    return MemoryEstimate(
        shape=shape,
        num_ranks=num_ranks,
        rings=_lines(ring_bytes(shape, num_ranks, device_type)),
        receive_region=region if prefills else 0,
        low_latency_region=low_latency,
        control_words=control_bytes(shape, num_ranks, num_nodes, decodes),
        prefill_call=prefill if prefills else 0,
        decode_call=decode if decodes else 0,
        rail=rail,
    )
