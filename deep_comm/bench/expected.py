"""Inputs of one rank, and the results that the reference gives for them, on the rank's device.

Every rank can make the rows of all ranks, which are random. deep_comm.reference says which of them
arrive in which order; the order of additions is the one it states, written here for many rows at
once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deep_comm import reference
from deep_comm.bench.payload import integers, row_bytes, same_bits
from deep_comm.bench.workload import DTYPES, Plan, Routing, Workload, plan_of
from deep_comm.reference import low_latency as reference_low_latency

Payload = Tensor | tuple[Tensor, Tensor]

ALIGNMENT = 128  # of groups of expanded rows, as grouped matrix products need it


@dataclass(frozen=True)
class Rows:
    """The rows of an output that belong to a token, and what dispatch returns beside them."""

    origin: Tensor  # int64 [n], row among those of all ranks
    token: Tensor  # int32 [n], of the source rank
    expert: Tensor | None  # int64 [n], global, if there is a row per selection
    places: Tensor  # int64 [n], in the output as one matrix
    topk_idx: Tensor  # as dispatch returns them
    topk_weights: Tensor
    counts: list[int]  # by local expert, rounded up to the alignment


def cast(rows: Tensor, dtype: str) -> Payload:
    """What kernels make of bf16 rows."""
    if dtype == "nvfp4":
        return reference_low_latency.quantise_nvfp4(rows)
    return reference_low_latency.quantise(rows) if dtype == "fp8" else rows


def _made(rows: Tensor, who: Tensor | int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """What a rank, or each row's expert, makes of bf16 rows; in every bit of the dtype."""
    factors = 1 + torch.as_tensor(who, device=rows.device).reshape(-1, 1) / 32
    made = rows.float() * factors
    return made * (1 / 3) if dtype == torch.float32 else made.to(dtype)


def _dtype_of(kind: str) -> torch.dtype:
    return torch.float32 if kind == "float32" else torch.bfloat16


class Expected:
    """What calls of one rank are given, by input, and what they must return.

    In low-latency mode every input has a routing of its own, and kernels cast bf16 rows to the
    workload's dtype. In normal mode the inputs share a routing, and rows are given in that dtype.
    """

    def __init__(
        self, workload: Workload, rank: int, device: torch.device, num_inputs: int, *,
        low_latency: bool = False,
    ) -> None:  # fmt: skip
        self.workload, self.rank, self.device = workload, rank, device
        self.num_inputs, self.low_latency = num_inputs, low_latency
        self.experts = workload.experts_of(rank)
        # Results are compared several times.
        self.all_rows = functools.cache(self._all_rows)
        self.rows = functools.cache(self._rows)
        self.expert_rows = functools.cache(self._expert_rows)
        self.combined = functools.cache(self._combined)
        self.biases = functools.cache(self._biases)
        routings = [self.plan(idx).routings[rank] for idx in range(num_inputs)]
        self.routings = [
            Routing(it.topk_idx.to(device), it.topk_weights.to(device)) for it in routings
        ]
        # Looked up by index in calls, whose host time is measured.
        self.x: list[Any] = [
            self.all_rows(idx)[workload.tokens_of(rank)] if low_latency else self.sent(rank, idx)
            for idx in range(num_inputs)
        ]

    def plan(self, input_idx: int) -> Plan:
        return plan_of(self.workload, input_idx if self.low_latency else 0)

    # ---- rows ----------------------------------------------------------------------------------

    def _all_rows(self, input_idx: int) -> Tensor:
        """bf16 [tokens of all ranks, H]: of both signs, up to 2, every mantissa."""
        sizes, limit = (self.workload.total_tokens, self.workload.hidden), 1 << 15
        numbers = integers(-limit, limit, sizes, 1000 + input_idx, self.device)
        return numbers.to(torch.bfloat16) / (limit // 2)

    def _payload(self, input_idx: int) -> Payload:
        """Rows of all ranks as they travel."""
        shape, num_rows, device = self.workload, self.workload.total_tokens, self.device
        if self.low_latency or shape.dtype == "bf16":
            return cast(self.all_rows(input_idx), shape.dtype)
        bits = integers(0, 256, (num_rows, shape.hidden), 2000 + input_idx, device, torch.uint8)
        scales = integers(1, 1 << 16, (num_rows, shape.num_scales), 3000 + input_idx, device)
        return bits.view(DTYPES[shape.dtype]), scales.float() / (1 << 16)

    def sent(self, rank: int, input_idx: int) -> Payload:
        """What a rank sends."""
        rows, tokens = self._payload(input_idx), self.workload.tokens_of(rank)
        return (rows[0][tokens], rows[1][tokens]) if isinstance(rows, tuple) else rows[tokens]

    def rows_are_right(self, got: Any, rows: Rows, input_idx: int, dtype: str = "bf16") -> bool:
        """The places of ``got`` hold these rows, bit for bit. ``dtype``: that kernels cast to."""
        sent = self._payload(input_idx)
        want = cast(sent, dtype) if isinstance(sent, Tensor) else sent
        gots, wants = (part if isinstance(part, tuple) else (part,) for part in (got, want))
        return len(gots) == len(wants) and all(
            part.dtype == all_rows.dtype
            and same_bits(row_bytes(part)[rows.places], row_bytes(all_rows)[rows.origin])
            for part, all_rows in zip(gots, wants, strict=True)
        )

    def _rows(self, input_idx: int) -> Rows:
        """One row per received token, by (source rank, source token)."""
        received = self.plan(input_idx).dispatched[self.rank]
        return self._rows_of(received.recv_x, torch.arange(len(received.recv_x)), received,
                             received.num_recv_tokens_per_expert)  # fmt: skip

    def _expert_rows(self, input_idx: int, alignment: int = ALIGNMENT) -> Rows:
        """One row per selection, grouped by local expert."""
        received = self.plan(input_idx).dispatched[self.rank]
        expanded = reference.expand(received, len(self.experts), alignment)
        (places,) = (expanded.recv_topk_idx >= 0).nonzero(as_tuple=True)
        return self._rows_of(expanded.recv_x, places, expanded,
                             expanded.expert_offsets.diff().tolist())  # fmt: skip

    def _rows_of(self, origins: Tensor, places: Tensor, returned: Any, counts: list[int]) -> Rows:
        (origin, token), device = origins[places].unbind(dim=1), self.device
        topk_idx, topk_weights = returned.recv_topk_idx.to(device), returned.recv_topk_weights
        expert = topk_idx[places.to(device)] + self.experts.start if topk_idx.dim() == 1 else None
        return Rows(
            origin.long().to(device), token.to(device), expert, places.to(device), topk_idx,
            topk_weights.to(device), counts,
        )  # fmt: skip

    def outputs(
        self, rows: Rows, input_idx: int, num_rows: int, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        """[num_rows, H]: what this rank gives to combine. Other ranks, or other experts, make
        other rows of the same token; rows of no token are zeros."""
        out = torch.zeros(num_rows, self.workload.hidden, dtype=dtype, device=self.device)
        who = self.rank if rows.expert is None else rows.expert
        out[rows.places] = _made(self.all_rows(input_idx)[rows.origin], who, dtype)
        return out

    def _biases(self, input_idx: int) -> Tensor:
        """bf16 [T, H], for this rank's tokens."""
        sizes = (self.workload.num_tokens_of(self.rank), self.workload.hidden)
        numbers = integers(-(1 << 15), 1 << 15, sizes, 4000 + input_idx, self.device)
        return numbers.to(torch.bfloat16) / (1 << 14)

    # ---- sums ----------------------------------------------------------------------------------

    def partials(self, input_idx: int, kind: str) -> Iterator[Tensor]:
        """float32 [T, H] by rank, not rounded: what that rank returns for this rank's tokens.

        Args:
            kind: "echo": the row that it received; "experts": weight times row of each of its
                experts, top-k entries ascending; "rank", "weights", "biased", "float32": one row
                that the rank made, of float32 or bf16.
        """
        shape, routing = self.workload, self.routings[input_idx]
        x = self.all_rows(input_idx)[shape.tokens_of(self.rank)]
        products = [
            _made(x, routing.topk_idx[:, k]).float() * routing.topk_weights[:, k, None]
            for k in range(shape.num_topk if kind == "experts" else 0)
        ]
        for peer in range(shape.num_ranks):
            experts = shape.experts_of(peer)
            is_here = (routing.topk_idx >= experts.start) & (routing.topk_idx < experts.stop)
            partial = torch.zeros(x.shape, device=self.device)
            for k, product in enumerate(products):
                partial += torch.where(is_here[:, k, None], product, 0.0)
            if kind != "experts":
                row = x if kind == "echo" else _made(x, peer, _dtype_of(kind))
                partial = torch.where(is_here.any(dim=1)[:, None], row.float(), 0.0)
            yield partial

    def _combined(self, input_idx: int, kind: str, ranks_per_node: int | None = None) -> Tensor:
        """What combine must return: the ranks' partial sums rounded, then added in float32 to the
        biases, ranks ascending, and rounded. With nodes: once per node, and once over the nodes.
        """
        dtype = _dtype_of(kind)
        per_node = ranks_per_node or 1
        total, of_node = (torch.zeros((), device=self.device) for _ in range(2))
        if kind == "biased":
            total = self.biases(input_idx).float()
        for peer, partial in enumerate(self.partials(input_idx, kind)):
            of_node = of_node + partial.to(dtype).float()
            if (peer + 1) % per_node == 0:
                total = total + of_node.to(dtype).float()
                of_node = torch.zeros_like(of_node)
        return total.to(dtype)

    def logfmt_bounds(self, input_idx: int, kind: str) -> tuple[Tensor, Tensor]:
        """The sums, and their largest error if partial sums travel in LogFMT-10."""
        partials = list(self.partials(input_idx, kind))
        total = sum(partials, start=torch.zeros((), device=self.device))
        bounds = map(reference_low_latency.logfmt_bound, partials)
        bound = sum(bounds, start=torch.zeros((), device=self.device))
        # Float32 arithmetic on the way, and the rounding to bf16 at its end.
        return total, bound * 1.001 + total.abs() * 2.0**-8 + 1e-30
