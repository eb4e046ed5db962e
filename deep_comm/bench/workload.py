"""What is measured: one shape of tokens, where they go, and the bytes that this moves."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deep_comm import reference
from deep_comm.topology import first_expert, num_local_experts

FP8_BLOCK = 128  # elements that share a scale
NVFP4_WORD = 64  # elements of four scales

ROUTINGS = {
    "uniform": "every expert is as likely as any other",
    "zipf": "the n-th most popular expert is chosen 1/n as often as the first; which expert is how "
    "popular is random, so that no rank holds all popular ones",
    "all-to-one": "every token chooses experts of rank 0 alone",
    "idle-rank": "uniform, but the last rank has no tokens of its own",
}
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
LOW_LATENCY_DTYPES = {**DTYPES, "nvfp4": torch.uint8}
COMBINE_FORMATS = ("bf16", "logfmt")


@dataclass(frozen=True)
class Workload:
    """Tokens of every rank, and the experts that they choose. Equal on all ranks.

    dtype "bf16", or "fp8": the payload is already quantised and carries a float32 scale per block
    of 128 elements; "nvfp4" likewise, two elements in a byte and a byte of scale for 16, counted in
    words of four. Experts' outputs, which combine takes, are bf16 either way; combine_format says
    what low-latency rows travel home as.
    """

    num_ranks: int
    num_tokens: int  # per rank
    hidden: int
    num_experts: int
    num_topk: int
    dtype: str = "bf16"
    routing: str = "uniform"
    combine_format: str = "bf16"

    @property
    def torch_dtype(self) -> torch.dtype:
        return LOW_LATENCY_DTYPES[self.dtype]

    @property
    def num_scales(self) -> int:
        block = {"fp8": FP8_BLOCK, "nvfp4": NVFP4_WORD}.get(self.dtype)
        return 0 if block is None else -(-self.hidden // block)

    @property
    def num_columns(self) -> int:
        """Of a dispatched row, in elements of torch_dtype."""
        return self.hidden // 2 if self.dtype == "nvfp4" else self.hidden

    @property
    def row_bytes(self) -> int:
        """A dispatched row with its scales."""
        return self.num_columns * self.torch_dtype.itemsize + 4 * self.num_scales

    @property
    def combine_row_bytes(self) -> int:
        """LogFMT-10: ten bits an element and 4 bytes for 16 of them."""
        return 2 * self.hidden if self.combine_format == "bf16" else 3 * self.hidden // 2

    def num_tokens_of(self, rank: int) -> int:
        is_idle = self.routing == "idle-rank" and rank == self.num_ranks - 1
        return 0 if is_idle and self.num_ranks > 1 else self.num_tokens

    def describe(self) -> str:
        return (
            f"{self.num_ranks} ranks x {self.num_tokens} tokens, "
            f"hidden {self.hidden} {self.dtype}, {self.num_experts} experts, "
            f"top-{self.num_topk}, {self.routing} routing"
        )


@dataclass(frozen=True)
class Routing:
    """The experts that one rank's tokens choose."""

    topk_idx: Tensor  # int64 [T, K], -1: none
    topk_weights: Tensor  # float32 [T, K], a token's sum to 1


def routing_of(workload: Workload, rank: int, slot: int = 0) -> Routing:
    """A function of workload, rank and slot, so that every rank knows every other's."""
    generator = torch.Generator().manual_seed(1000 + rank + 64 * slot)
    num_tokens, num_topk = workload.num_tokens_of(rank), workload.num_topk
    popularity = _popularity(workload)
    num_choices = min(num_topk, int((popularity > 0).sum()))
    # The largest of p / Exp(1) are a sample without replacement with probabilities p.
    waiting = torch.empty(num_tokens, workload.num_experts)
    waiting.exponential_(generator=generator)
    chosen = (popularity / waiting.clamp_min_(1e-30)).topk(num_choices, dim=1).indices
    topk_idx = torch.full((num_tokens, num_topk), -1, dtype=torch.int64)
    topk_idx[:, :num_choices] = chosen
    weights = torch.rand(num_tokens, num_topk, generator=generator) + 0.01
    return Routing(topk_idx, weights / weights.sum(dim=1, keepdim=True))


def _popularity(workload: Workload) -> Tensor:
    num_experts, num_ranks = workload.num_experts, workload.num_ranks
    popularity = torch.ones(num_experts)
    if workload.routing == "zipf":
        order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(7))
        popularity[order] = 1 / torch.arange(1, num_experts + 1, dtype=torch.float32)
    elif workload.routing == "all-to-one":
        first = first_expert(0, num_experts, num_ranks)
        popularity.zero_()
        popularity[first : first + num_local_experts(0, num_experts, num_ranks)] = 1
    return popularity


@functools.lru_cache(maxsize=4)
def _plans(
    num_ranks: int, num_tokens: int, num_experts: int, num_topk: int, routing: str
) -> tuple[tuple[Routing, ...], tuple[reference.Dispatched, ...]]:
    """Routings of all ranks and what the reference makes of them; independent of the payload."""
    shape = Workload(num_ranks, num_tokens, 1, num_experts, num_topk, routing=routing)
    routings = tuple(routing_of(shape, rank) for rank in range(num_ranks))
    # The payload is the token's index: what arrives says where it came from.
    tokens = [
        torch.arange(shape.num_tokens_of(rank), dtype=torch.int32)[:, None]
        for rank in range(num_ranks)
    ]
    dispatched = reference.dispatch(
        tokens,
        [routing.topk_idx for routing in routings],
        num_experts,
        [routing.topk_weights for routing in routings],
    )
    return routings, tuple(dispatched)


def plan_of(workload: Workload) -> tuple[Sequence[Routing], Sequence[reference.Dispatched]]:
    """By rank: the routing, and what the reference says arrives, the payload being token
    indices."""
    return _plans(
        workload.num_ranks,
        workload.num_tokens,
        workload.num_experts,
        workload.num_topk,
        workload.routing,
    )


def rows_between(workload: Workload) -> list[list[int]]:
    """[i][j]: rows that rank i sends to rank j."""
    _, dispatched = plan_of(workload)
    per_rank = [plan.is_token_in_rank.sum(dim=0).tolist() for plan in dispatched]
    return [[int(count) for count in counts] for counts in per_rank]


@dataclass(frozen=True)
class Volume:
    """Bytes of one operation at the rank where they are most.

    logical: rows delivered to a rank with their scales, its own tokens' rows included, as MoE
        libraries usually quote.
    wire: what crosses a rank's link in its busier direction: rows of other ranks, with the
        metadata that travels beside each.
    """

    logical_bytes: int
    wire_bytes: int

    def __add__(self, other: Volume) -> Volume:
        return Volume(self.logical_bytes + other.logical_bytes, self.wire_bytes + other.wire_bytes)


def volume(rows: Sequence[Sequence[int]], row_bytes: int, beside_bytes: int = 0) -> Volume:
    """``rows[i][j]`` rows from rank i to j, of ``row_bytes`` and ``beside_bytes`` of metadata.

    The way back (combine) has the same volume: the busier direction of a link is the same.
    """
    ranks = range(len(rows))
    received = [sum(rows[source][rank] for source in ranks) for rank in ranks]
    foreign = [max(sum(rows[rank]), received[rank]) - rows[rank][rank] for rank in ranks]
    return Volume(max(received) * row_bytes, max(foreign) * (row_bytes + beside_bytes))


def dispatch_volume(workload: Workload, *, is_cached: bool) -> Volume:
    """Uncached rows are accompanied by source index, expert indices (int64) and weights."""
    beside = 4 if is_cached else 4 + workload.num_topk * (8 + 4)
    return volume(rows_between(workload), workload.row_bytes, beside)


def combine_volume(workload: Workload) -> Volume:
    """Combine without top-k weights: rows alone travel."""
    return volume(rows_between(workload), workload.combine_row_bytes)
