"""What is measured: tokens, the experts that they choose, and the bytes that this moves."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deep_comm import reference
from deep_comm.ranks.topology import first_expert, num_local_experts

DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "nvfp4": torch.uint8}


@dataclass(frozen=True)
class Workload:
    """Tokens of every rank, and the experts that they choose. Equal on all ranks.

    Attributes:
        dtype: what a dispatched row travels as: "bf16"; "fp8" with a float32 scale per 128
            elements; "nvfp4", two elements in a byte, with a byte of scale per 16 elements.
        combine_format: what a row of combine travels as: "bf16", or "logfmt" in low-latency mode.
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
    def num_scales(self) -> int:
        """Words of scales in a dispatched row."""
        columns_per_word = {"fp8": 128, "nvfp4": 64}.get(self.dtype)
        return 0 if columns_per_word is None else -(-self.hidden // columns_per_word)

    @property
    def row_bytes(self) -> int:
        """Of a dispatched row with its scales."""
        num_columns = self.hidden // 2 if self.dtype == "nvfp4" else self.hidden
        return num_columns * DTYPES[self.dtype].itemsize + 4 * self.num_scales

    @property
    def combine_row_bytes(self) -> int:
        """LogFMT-10 has 10 bits per element, and 4 bytes per 16 of them."""
        return 2 * self.hidden if self.combine_format == "bf16" else 3 * self.hidden // 2

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens_of(rank) for rank in range(self.num_ranks))

    def num_tokens_of(self, rank: int) -> int:
        is_idle = self.routing == "idle-rank" and rank == self.num_ranks - 1
        return 0 if is_idle and self.num_ranks > 1 else self.num_tokens

    def tokens_of(self, rank: int) -> slice:
        """A rank's tokens among those of all ranks."""
        first = rank * self.num_tokens  # only the last rank may have fewer
        return slice(first, first + self.num_tokens_of(rank))

    def experts_of(self, rank: int) -> range:
        """Global indices of a rank's experts."""
        first = first_expert(rank, self.num_experts, self.num_ranks)
        return range(first, first + num_local_experts(rank, self.num_experts, self.num_ranks))

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


def routing_of(workload: Workload, rank: int, input_idx: int = 0) -> Routing:
    """A function of its arguments alone, so that every rank knows the routing of every other."""
    generator = torch.Generator().manual_seed(1000 + rank + 64 * input_idx)
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
    num_experts = workload.num_experts
    popularity = torch.ones(num_experts)
    if workload.routing == "zipf":
        order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(7))
        popularity[order] = 1 / torch.arange(1, num_experts + 1, dtype=torch.float32)
    elif workload.routing == "all-to-one":
        popularity.zero_()
        popularity[: len(workload.experts_of(0))] = 1
    return popularity


@dataclass(frozen=True)
class Plan:
    """Routings of all ranks for one input, and what the reference says arrives, by rank.

    The payload of the dispatches is int32 [n, 2]: a row's number among those of all ranks, and its
    token on the source rank.
    """

    routings: tuple[Routing, ...]
    dispatched: tuple[reference.Dispatched, ...]

    def rows_between(self) -> list[list[int]]:
        """[i][j]: rows that rank i sends to rank j."""
        return [plan.is_token_in_rank.sum(dim=0).tolist() for plan in self.dispatched]


def plan_of(workload: Workload, input_idx: int = 0) -> Plan:
    # Does not depend on the payload, so that workloads that differ in dtype share it.
    return _plan(replace(workload, hidden=1, dtype="bf16", combine_format="bf16"), input_idx)


@functools.lru_cache(maxsize=4)
def _plan(workload: Workload, input_idx: int) -> Plan:
    ranks = range(workload.num_ranks)
    routings = tuple(routing_of(workload, rank, input_idx) for rank in ranks)
    number = torch.arange(workload.total_tokens, dtype=torch.int32)
    origins = []
    for tokens in map(workload.tokens_of, ranks):
        origins.append(torch.stack([number[tokens], number[tokens] - tokens.start], dim=1))
    dispatched = reference.dispatch(
        origins, [routing.topk_idx for routing in routings], workload.num_experts,
        [routing.topk_weights for routing in routings],
    )  # fmt: skip
    return Plan(routings, tuple(dispatched))


@dataclass(frozen=True)
class Volume:
    """Bytes of one operation at the rank where they are most.

    Attributes:
        logical_bytes: rows delivered to a rank with their scales, its own tokens' rows included,
            as MoE libraries usually quote.
        wire_bytes: what crosses a rank's link in its busier direction: rows of other ranks, with
            the metadata that travels beside each.
    """

    logical_bytes: int
    wire_bytes: int

    def __add__(self, other: Volume) -> Volume:
        return Volume(self.logical_bytes + other.logical_bytes, self.wire_bytes + other.wire_bytes)


def volume(rows: Sequence[Sequence[int]], row_bytes: int, beside_bytes: int = 0) -> Volume:
    """``rows[i][j]`` rows from rank i to j, of ``row_bytes`` and ``beside_bytes`` of metadata.

    The way back (combine) has the same volume: the busier direction of a link is the same.
    """
    received = [sum(column) for column in zip(*rows, strict=True)]
    foreign = [max(sum(sent), received[rank]) - sent[rank] for rank, sent in enumerate(rows)]
    return Volume(max(received) * row_bytes, max(foreign) * (row_bytes + beside_bytes))


def mean_volume(
    workload: Workload, row_bytes: int, beside_bytes: int = 0, *, num_routings: int = 1
) -> Volume:
    """The mean over the routings of the first ``num_routings`` inputs."""
    plans = [plan_of(workload, idx) for idx in range(num_routings)]
    volumes = [volume(plan.rows_between(), row_bytes, beside_bytes) for plan in plans]
    total = functools.reduce(Volume.__add__, volumes)
    return Volume(total.logical_bytes // num_routings, total.wire_bytes // num_routings)
