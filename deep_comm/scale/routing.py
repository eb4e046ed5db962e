"""Which experts tokens choose, for any number of ranks: uniform, Zipf,
at most some nodes a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deep_comm.errors import ArgumentError
from deep_comm.settings import integers

ROUTINGS = {
    "uniform": "every expert is as likely as any other",
    "zipf": "the n-th most popular expert is chosen 1/n as often as the first, in a random order "
    "of popularity",
    "limited": "uniform scores; a token's experts lie in the nodes with its best experts, at "
    "most 4 (DeepSeek-V3)",
}
MAX_NODES_PER_TOKEN = 4  # of "limited"


@dataclass(frozen=True)
class Job:
    """Tokens and experts of all ranks; every rank has as many tokens."""

    num_ranks: int
    num_tokens: int = 4096  # of a rank
    hidden: int = 7168
    num_experts: int = 256
    num_topk: int = 8
    dtype: str = (
        "fp8"  # of dispatch: "fp8" with a float32 scale a 128 columns, or "bf16"; combine is bf16
    )
    routing: str = "uniform"
    ranks_per_node: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.routing not in ROUTINGS:
            raise ArgumentError("routing", self.routing, f"must be one of {', '.join(ROUTINGS)}")
        if self.dtype not in ("fp8", "bf16"):
            raise ArgumentError("dtype", self.dtype, "must be fp8 or bf16")
        for name in ("num_ranks", "num_tokens", "hidden", "num_experts", "ranks_per_node"):
            integers.require(name, getattr(self, name), 1)
        if self.num_ranks > self.ranks_per_node and self.num_ranks % self.ranks_per_node != 0:
            rule = f"must be a multiple of ranks_per_node ({self.ranks_per_node}) beyond one node"
            raise ArgumentError("num_ranks", self.num_ranks, rule)
        if not 1 <= self.num_topk <= self.num_experts:
            raise ArgumentError("num_topk", self.num_topk, "must lie in 1..num_experts")
        if self.routing == "limited" and self.num_experts % self.num_nodes != 0:
            rule = f"must be a multiple of the {self.num_nodes} nodes for limited routing"
            raise ArgumentError("num_experts", self.num_experts, rule)

    @property
    def num_nodes(self) -> int:
        return max(1, self.num_ranks // self.ranks_per_node)

    @property
    def num_local(self) -> int:
        """Ranks of a node."""
        return min(self.num_ranks, self.ranks_per_node)

    @property
    def row_bytes(self) -> int:
        """Of a dispatched row without its scales."""
        return self.hidden * (1 if self.dtype == "fp8" else 2)

    @property
    def scale_row_bytes(self) -> int:
        return -(-self.hidden // 128) * 4 if self.dtype == "fp8" else 0

    @property
    def combine_row_bytes(self) -> int:
        return 2 * self.hidden

    def routings(self) -> Iterator[Tensor]:
        """int64 [T, K] experts of every rank's tokens, rank by rank; a
        function of the job alone.
        """
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.num_ranks)
        popularity = None
        if self.routing == "zipf":
            order = torch.randperm(self.num_experts, generator=generator)
            popularity = torch.empty(self.num_experts)
            popularity[order] = 1 / torch.arange(1, self.num_experts + 1, dtype=torch.float32)
            popularity = popularity.cumsum(0) / popularity.sum()
        limited = None
        if self.routing == "limited" and self.num_nodes > MAX_NODES_PER_TOKEN:
            limited = _Limited(self, generator)
        for _ in range(self.num_ranks):
            if limited is not None:
                yield limited.draw()
            else:
                yield _distinct(
                    (self.num_tokens, self.num_topk), self.num_experts, generator, popularity
                )


def _distinct(
    shape: tuple[int, int],
    num_values: int,
    generator: torch.Generator,
    cumulative: Tensor | None = None,
) -> Tensor:
    """int64 rows of distinct values drawn one after the other; ``cumulative``:
    of unequal probabilities.
    """

    def draw(count: int) -> Tensor:
        uniform = torch.rand(count, generator=generator)
        if cumulative is None:
            return (uniform * num_values).long()
        return torch.searchsorted(cumulative, uniform, right=True).clamp_(max=num_values - 1)

    values = draw(shape[0] * shape[1]).view(shape)
    earlier = torch.ones(shape[1], shape[1], dtype=torch.bool).tril(-1)
    rows = torch.arange(shape[0])
    while len(rows) > 0:
        part = values[rows]
        # A value that an earlier one of its row has is drawn again: the law of
        # drawing without putting back.
        again = ((part[:, :, None] == part[:, None, :]) & earlier).any(2)
        part[again] = draw(int(again.sum()))
        values[rows] = part
        rows = rows[again.any(1)]
    return values


class _Limited:
    """The experts with the best independent scores within the nodes whose best experts are best.

    Logarithms of uniform scores are drawn as order statistics, from the best down, so that only
    those that can be chosen are drawn.
    """

    _NUM_ORDERS = 1 << 14

    def __init__(self, job: Job, generator: torch.Generator) -> None:
        self._job = job
        self._generator = generator
        self._num_in_node = job.num_experts // job.num_nodes
        self._num_drawn = min(job.num_topk, self._num_in_node)
        # Which experts of a node are its best: random orders, which are far cheaper to
        # draw from than to draw.
        orders = self._uniform(self._NUM_ORDERS, self._num_in_node).argsort(1)
        self._orders = orders[:, : self._num_drawn]

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self._generator).clamp_(min=1e-20)

    def draw(self) -> Tensor:
        """int64 [T, K] of one rank."""
        num_tokens, num_nodes = self._job.num_tokens, self._job.num_nodes
        num_in_node, num_drawn = self._num_in_node, self._num_drawn
        # The best of n * e scores; then, of another node, the best of those that are less
        # in the other n - 1 nodes.
        left = torch.arange(num_nodes, num_nodes - MAX_NODES_PER_TOKEN, -1) * num_in_node
        best = (self._uniform(num_tokens, MAX_NODES_PER_TOKEN).log() / left).cumsum(1)
        # Behind each, in its node, the next ones.
        below = torch.arange(num_in_node - 1, num_in_node - num_drawn, -1)
        spacing = self._uniform(num_tokens, MAX_NODES_PER_TOKEN, num_drawn - 1).log() / below
        behind = best[:, :, None] + spacing.cumsum(2)
        scores = torch.cat([best[:, :, None], behind], dim=2).flatten(1)
        chosen = scores.topk(self._job.num_topk, dim=1).indices
        nodes = _distinct((num_tokens, MAX_NODES_PER_TOKEN), num_nodes, self._generator)
        order = (self._uniform(num_tokens, MAX_NODES_PER_TOKEN) * self._NUM_ORDERS).long()
        experts = nodes[:, :, None] * num_in_node + self._orders[order]
        return experts.flatten(1).gather(1, chosen)
