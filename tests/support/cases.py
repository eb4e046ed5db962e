"""One end-to-end case, of one tier or two: shapes, routing and options of a dispatch and a combine,
and its inputs.

Inputs are a function of (case, rank, call), so that the process that checks can make them again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import payload
import torch
from torch import Tensor

from deep_comm import Config
from deep_comm.ranks.topology import first_expert, num_local_experts

ROUTINGS = ("random", "skewed", "holes", "one_expert", "none", "duplicates")  # see make_topk_idx


@dataclass(frozen=True)
class Scales:
    num: int  # scale columns of one row
    dtype: torch.dtype = torch.float32
    layout: str = "row"  # "row": contiguous; "column": column-major; "padded": rows further apart


@dataclass(frozen=True)
class Case:
    """A dispatch and a combine of ``len(tokens)`` ranks."""

    tokens: tuple[int, ...]  # per rank
    hidden: int = 128
    experts: int = 8
    topk: int = 2
    dtype: torch.dtype = torch.bfloat16
    combine_dtype: torch.dtype = torch.bfloat16
    routing: str = "random"  # see make_topk_idx
    idx_dtype: torch.dtype = torch.int64
    scales: Scales | None = None
    num_sms: int | None = (
        None  # None: the default config; else the three ring parameters below count
    )
    send_chunk: int = 4
    slots: int = 16  # of a ring
    alignment: int = 1
    worst: int = 0  # num_worst_tokens: 0, or rows beyond the sum of all tokens + 1
    zero_tail: bool = False
    biases: int = 0
    by_selections: bool = False  # combine(topk_idx=): sums in the order of the selections
    has_weights: bool = True
    fused_layout: bool = False  # dispatch(topk_idx=, num_experts=) instead of get_dispatch_layout
    calls: int = 1
    nvl_bytes: int = 16 << 20
    direct_bytes: int | None = None  # of nvl_bytes; None: the Buffer's own rule
    smem_bytes: int | None = None  # shared memory of a block; None: a whole SM's
    # Ranks whose experts nobody selects, for what checks calls that went on without them. Calls get
    # the same case without it.
    absent: tuple[int, ...] = ()
    seed: int = field(default=0, compare=True)

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    @property
    def num_worst_tokens(self) -> int:
        return sum(self.tokens) + self.worst if self.worst else 0

    @property
    def is_large(self) -> bool:
        """Too much for one thread of the host to make, to copy and to check in no time."""
        return sum(self.tokens) * self.topk * self.hidden > 1 << 23

    def __str__(self) -> str:
        parts = [f"r{self.num_ranks}", f"t{max(self.tokens)}", f"h{self.hidden}"]
        parts += [f"e{self.experts}", f"k{self.topk}", str(self.dtype).removeprefix("torch.")]
        if self.routing != "random":
            parts.append(self.routing)
        if self.scales is not None:
            parts.append(f"scales-{self.scales.layout}")
        if self.num_sms is not None:
            parts.append(f"c{self.num_sms}x{self.slots}by{self.send_chunk}")
        if self.worst:
            parts.append("worst")
        if self.biases:
            parts.append(f"bias{self.biases}")
        if self.by_selections:
            parts.append("by-selections")
        if self.fused_layout:
            parts.append("fused")
        if not self.has_weights:
            parts.append("unweighted")
        return "-".join(parts)

    def config(self) -> Config | None:
        if self.num_sms is None:
            return None
        return Config(self.num_sms, self.send_chunk, 2 * self.slots)

    def buffer_arguments(self) -> dict[str, Any]:
        return {"num_nvl_bytes": self.nvl_bytes, "num_direct_bytes": self.direct_bytes}


# (nodes, ranks per node); one node takes the single-tier path and has tests of its own.
SHAPES = [(2, 2), (2, 4), (4, 2), (3, 3), (8, 1), (2, 1), (3, 2), (2, 3)]


@dataclass(frozen=True)
class InternodeCase(Case):
    """A case of ``len(tokens)`` ranks, ``ranks_per_node`` to a logical node."""

    ranks_per_node: int = 2
    rail_chunk: int = 2
    rail_slots: int = 4
    rdma_bytes: int = 16 << 20
    num_qps: int = 4
    is_direct: bool = False  # every row must have had a place of its own, no ring been used

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.ranks_per_node

    def __str__(self) -> str:
        shape = f"{self.num_nodes}x{self.ranks_per_node}-"
        rail = f"-rail{self.rail_slots}by{self.rail_chunk}q{self.num_qps}"
        direct = "-direct" if self.is_direct else ""
        return shape + super().__str__() + (rail if self.num_sms is not None else "") + direct

    def config(self) -> Config | None:
        if self.num_sms is None:
            return None
        rings = self.send_chunk, self.slots, self.rail_chunk, self.rail_slots
        return Config(self.num_sms, *rings)

    def buffer_arguments(self) -> dict[str, Any]:
        return super().buffer_arguments() | {
            "num_rdma_bytes": self.rdma_bytes, "num_qps_per_rank": self.num_qps,
            "ranks_per_node": self.ranks_per_node, "num_max_experts": max(self.experts, 64),
        }  # fmt: skip


def direct(case: InternodeCase) -> InternodeCase:
    """The same with a place for every row."""
    return dataclasses.replace(case, direct_bytes=case.nvl_bytes // 2, is_direct=True)


@dataclass(frozen=True)
class Inputs:
    """What one rank puts into one call."""

    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor | None
    bias: Tensor | tuple[Tensor, Tensor] | None


def _generator(case: Case, rank: int, call: int, purpose: int) -> torch.Generator:
    return torch.Generator().manual_seed(((case.seed * 64 + rank) * 1024 + call) * 8 + purpose)


def make_topk_idx(case: Case, rank: int, call: int = 0) -> Tensor:
    """Expert choices [tokens, topk] of one rank, after the case's routing."""
    num_tokens = case.tokens[rank]
    generator = _generator(case, rank, call, 0)
    scores = torch.rand(num_tokens, case.experts, generator=generator)
    if case.routing == "skewed":  # most tokens want the first experts
        scores /= torch.arange(1, case.experts + 1) ** 1.5
    if case.routing == "one_expert":
        idx = torch.full((num_tokens, case.topk), -1)
        idx[:, 0] = case.experts - 1
    elif case.routing == "none":
        idx = torch.full((num_tokens, case.topk), -1)
    elif case.routing == "duplicates":  # the same expert several times in a row
        idx = torch.randint(0, case.experts, (num_tokens, 1), generator=generator)
        idx = idx.expand(num_tokens, case.topk).clone()
    elif case.topk > case.experts:
        idx = torch.randint(0, case.experts, (num_tokens, case.topk), generator=generator)
    else:
        idx = scores.topk(case.topk, dim=1).indices if num_tokens else torch.zeros(0, case.topk)
    if case.routing == "holes":  # about a third of the selections, sometimes all of a token's
        holes = torch.rand(idx.shape, generator=generator) < 0.35
        idx = torch.where(holes, torch.full_like(idx, -1), idx)
    return without_absent(case, idx).to(case.idx_dtype).contiguous()


def without_absent(case: Case, idx: Tensor) -> Tensor:
    for rank in case.absent:
        first = first_expert(rank, case.experts, case.num_ranks)
        last = first + num_local_experts(rank, case.experts, case.num_ranks)
        idx = torch.where((idx >= first) & (idx < last), -1, idx)
    return idx


def make_scales(case: Case, rank: int, call: int = 0) -> Tensor | None:
    if case.scales is None:
        return None
    shape = (case.tokens[rank], case.scales.num)
    values = torch.randint(0, 120, shape, generator=_generator(case, rank, call, 1))
    values = values.to(case.scales.dtype)
    if case.scales.layout == "column":
        return values.t().contiguous().t()
    if case.scales.layout == "padded":
        wide = torch.zeros(shape[0], shape[1] * 2 + 3, dtype=case.scales.dtype)
        wide[:, : 2 * shape[1] : 2] = values
        return wide[:, : 2 * shape[1] : 2]
    return values


def here(tensor: Tensor) -> Tensor:
    """On torch's default device, with the same strides. What is random is drawn on the host."""
    device = torch.get_default_device()
    if tensor.device.type == device.type:
        return tensor
    same = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    return same.copy_(tensor)


def make_inputs(case: Case, rank: int, call: int = 0) -> Inputs:
    """On torch's default device."""
    num_tokens = case.tokens[rank]
    with torch.device("cpu"):
        weights = torch.rand(num_tokens, case.topk, generator=_generator(case, rank, call, 2))
        scales = make_scales(case, rank, call)
        topk_idx = make_topk_idx(case, rank, call)
    biases = [
        payload.noise(
            2 * case.seed + number, rank, num_tokens, case.hidden, case.combine_dtype, call
        )
        for number in range(case.biases)
    ]
    return Inputs(
        x=payload.rows(rank, num_tokens, case.hidden, case.dtype, call),
        scales=None if scales is None else here(scales),
        topk_idx=here(topk_idx),
        topk_weights=here(weights) if case.has_weights else None,
        bias=None if not biases else biases[0] if len(biases) == 1 else (biases[0], biases[1]),
    )


def verify_each(
    verify: Callable[[Any, list[Any]], None], cases: Sequence[Any], results: Any
) -> None:
    """``verify(case, what its ranks got)`` for every case. ``results``: by rank, then by case."""
    failures = []
    for number, case in enumerate(cases):
        try:
            verify(case, [ranks[number] for ranks in results])
        except AssertionError as error:
            failures.append(f"{case}: {error}")
    assert not failures, "\n".join(failures)
