"""What is measured: one shape of tokens, its inputs, and the bytes that it moves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deep_comm import reference


@dataclass(frozen=True)
class Workload:
    """Every rank sends its tokens to ``num_topk`` of ``num_experts`` experts, at random."""

    num_ranks: int
    num_tokens: int  # per rank
    hidden: int
    num_experts: int
    num_topk: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.dtype.itemsize

    def describe(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.num_ranks} ranks x {self.num_tokens} tokens, hidden {self.hidden} {dtype}, "
            f"{self.num_experts} experts, top-{self.num_topk}"
        )


@dataclass(frozen=True)
class RankInputs:
    x: Tensor  # [num_tokens, hidden]
    topk_idx: Tensor  # int64 [num_tokens, num_topk]
    topk_weights: Tensor  # float32 [num_tokens, num_topk]


def make_inputs(workload: Workload, rank: int) -> RankInputs:
    """Inputs of one rank, on the host; a function of the rank, so that all ranks can make them."""
    generator = torch.Generator().manual_seed(rank)
    shape = (workload.num_tokens, workload.num_experts)
    x = torch.randn(workload.num_tokens, workload.hidden, generator=generator)
    scores = torch.rand(shape, generator=generator)
    topk = scores.topk(workload.num_topk, dim=1)
    return RankInputs(
        x.to(workload.dtype), topk.indices, topk.values / topk.values.sum(1, keepdim=True)
    )


@dataclass(frozen=True)
class Volume:
    """Bytes of one dispatch into one rank; a combine moves the same rows the other way.

    logical: payload rows delivered to the rank, its own tokens included, as in the rates that MoE
        libraries usually quote.
    wire: what crosses between ranks: rows of other ranks, with the metadata that travels beside
    each
        (source index, and an index and a weight per top-k selection).
    """

    logical_bytes: int
    wire_bytes: int


def volume(workload: Workload, num_rows: int, num_own_rows: int) -> Volume:
    metadata_bytes = 4 + workload.num_topk * 8
    return Volume(
        logical_bytes=num_rows * workload.row_bytes,
        wire_bytes=(num_rows - num_own_rows) * (workload.row_bytes + metadata_bytes),
    )


def combine_volume(workload: Workload, num_rows: int, num_own_rows: int) -> Volume:
    """Combine without top-k weights: rows alone travel."""
    return Volume(
        logical_bytes=num_rows * workload.row_bytes,
        wire_bytes=(num_rows - num_own_rows) * workload.row_bytes,
    )


def expected_results(workload: Workload, rank: int) -> tuple[Tensor, Tensor]:
    """What ``rank`` must receive, and the sum when every rank hands its rows back."""
    inputs = [make_inputs(workload, peer) for peer in range(workload.num_ranks)]
    dispatched = reference.dispatch(
        [i.x for i in inputs],
        [i.topk_idx for i in inputs],
        workload.num_experts,
        [i.topk_weights for i in inputs],
    )
    # Every rank's copy of a row is the same, so the sum is known without the other ranks' rows.
    num_copies = dispatched[rank].is_token_in_rank.sum(dim=1, keepdim=True)
    x = inputs[rank].x.float()
    total = torch.zeros_like(x)
    for copy in range(workload.num_ranks):
        total += torch.where(num_copies > copy, x, torch.zeros_like(x))
    return dispatched[rank].recv_x, total.to(workload.dtype)
