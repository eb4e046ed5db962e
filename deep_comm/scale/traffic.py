"""What the kernels of two tiers send for a routing: rows, bytes, puts, signals, by their own rules.

The rules are the kernels' (deep_comm._core); tests compare the counts with those
of the simulated network.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from deep_comm import _core
from deep_comm.config import Config
from deep_comm.errors import ArgumentError
from deep_comm.ranks.topology import num_local_experts
from deep_comm.scale.routing import Job


@dataclass(frozen=True)
class Wire:
    """Sizes of one shape on the wire, and how it is cut into messages.

    Between nodes two SMs are a channel.
    """

    num_channels: int
    batch: int  # rows of a put, at most
    num_slots: int  # of a ring between two nodes, a multiple of batch
    num_local_slots: int  # of a ring inside a node
    dispatch_slot_bytes: int  # a row on the rail
    dispatch_row_bytes: int  # a row inside the node
    combine_slot_bytes: int

    @staticmethod
    def of(
        config: Config, row_bytes: int, scale_row_bytes: int, num_topk: int, combine_row_bytes: int
    ) -> Wire:
        batch = config.num_max_rdma_chunked_send_tokens
        return Wire(
            num_channels=max(1, config.num_sms // 2),
            batch=batch,
            num_slots=config.num_max_rdma_chunked_recv_tokens,
            num_local_slots=config.num_max_nvl_chunked_recv_tokens,
            dispatch_slot_bytes=_core.dispatch_slot_bytes(row_bytes, scale_row_bytes, num_topk),
            dispatch_row_bytes=_core.dispatch_row_bytes(row_bytes, scale_row_bytes, num_topk),
            combine_slot_bytes=_core.combine_slot_bytes(combine_row_bytes, num_topk),
        )

    @staticmethod
    def of_job(job: Job, config: Config) -> Wire:
        return Wire.of(
            config, job.row_bytes, job.scale_row_bytes, job.num_topk, job.combine_row_bytes
        )


@dataclass(frozen=True)
class Posts:
    """What ranks post on their rails: int64 [R, N] by rank and node; nothing for the own node."""

    num_puts: Tensor
    num_put_bytes: Tensor
    num_signals: Tensor


@dataclass(frozen=True)
class Traffic:
    """Rows of one dispatch. Combine sends them back: a row for a row."""

    ranks_per_node: int
    num_experts: int
    to_node: Tensor  # int64 [R, N, C]: tokens of a rank that go to a node, by channel
    to_rank: Tensor  # int64 [R, R]: tokens of a rank that go to a rank
    selections: Tensor  # int64 [R, R]: a token counts for each of its experts there

    @property
    def num_ranks(self) -> int:
        return self.to_rank.shape[0]

    @property
    def num_nodes(self) -> int:
        return self.to_node.shape[1]

    @property
    def is_remote(self) -> Tensor:
        """bool [R, N]: is it another node?"""
        own = torch.arange(self.num_ranks) // self.ranks_per_node
        return own[:, None] != torch.arange(self.num_nodes)

    # ---- messages --------------------------------------------------------------------------

    def dispatch_posts(self, wire: Wire) -> Posts:
        """A cached dispatch: rows in puts of a batch, each with its tail,
        credits, a word about its room and an arrival a node.
        """
        if wire.num_slots % wire.batch != 0:
            # Puts would be split where the ring ends and cut short where it is full.
            raise ArgumentError(
                "wire.num_slots", wire.num_slots, f"must be a multiple of {wire.batch}"
            )
        rows = self.to_node * self.is_remote[:, :, None]
        puts = -(-rows // wire.batch)
        # A sender gets no credit that it cannot need.
        credits = -(-(rows - wire.num_slots).clamp(min=0) // wire.batch)
        # At entry: whether the rank has room, and that it has come.
        signals = puts.sum(2) + self.back(credits.sum(2)) + 2 * self.is_remote.long()
        return Posts(puts.sum(2), rows.sum(2) * wire.dispatch_slot_bytes, signals)

    def back(self, posts: Tensor) -> Tensor:
        """[rank, node] -> [rank that is posted to, node of that rank]: rank (n, l) to
        node m is rank (m, l) to n.
        """
        by_node = posts.view(self.num_nodes, self.ranks_per_node, self.num_nodes)
        return by_node.permute(2, 1, 0).reshape(self.num_ranks, self.num_nodes)

    # ---- bytes -----------------------------------------------------------------------------

    def rail_rows(self) -> Tensor:
        """int64 [R]: rows that a rank puts on its rail in dispatch, and gets from it in combine."""
        return (self.to_node.sum(2) * self.is_remote).sum(1)

    def rail_rows_in(self) -> Tensor:
        """int64 [R]: rows that arrive over a rank's rail in dispatch."""
        return self.back(self.to_node.sum(2) * self.is_remote).sum(1)

    def forwarded_rows(self) -> tuple[Tensor, Tensor]:
        """int64 [R], [R]: rows that leave a rank over NVLink in
        dispatch, and that arrive over it.
        """
        num_nodes, num_local = self.num_nodes, self.ranks_per_node
        # [source node, local index of source and forwarder, node, rank of the node]
        rows = self.to_rank.view(num_nodes, num_local, num_nodes, num_local).sum(0)
        rows = rows * ~torch.eye(num_local, dtype=torch.bool)[:, None, :]
        return rows.sum(2).t().flatten(), rows.sum(0).flatten()


def count(
    routings: Iterable[Tensor],
    num_ranks: int,
    ranks_per_node: int,
    num_experts: int,
    num_channels: int,
) -> Traffic:
    """Traffic of the ranks' top-k indices [T, K], rank by rank; -1 selects nothing."""
    num_nodes = max(1, num_ranks // ranks_per_node)
    num_local = min(num_ranks, ranks_per_node)
    rank_of = torch.repeat_interleave(
        torch.tensor([num_local_experts(rank, num_experts, num_ranks) for rank in range(num_ranks)])
    ).to(torch.int32)
    to_node = torch.zeros(num_ranks, num_nodes, num_channels, dtype=torch.int64)
    to_rank = torch.zeros(num_ranks, num_ranks, dtype=torch.int64)
    selections = torch.zeros(num_ranks, num_ranks, dtype=torch.int64)
    for rank, topk_idx in enumerate(routings):
        num_tokens = topk_idx.shape[0]
        if topk_idx.numel() == 0:
            continue
        # What is not counted goes into one bin more.
        ranks = torch.where(topk_idx >= 0, rank_of[topk_idx.clamp(min=0)], num_ranks)
        ranks = ranks.sort(dim=1).values
        nodes = torch.div(ranks, num_local, rounding_mode="floor")
        per_channel = _core.channel_range(num_tokens, num_channels, 0)[1]
        channels = torch.arange(num_tokens, dtype=torch.int32)[:, None] // per_channel
        pairs = torch.where(
            _first_of_runs(nodes), nodes * num_channels + channels, num_nodes * num_channels
        )
        once = torch.where(_first_of_runs(ranks), ranks, num_ranks)
        to_rank[rank] = _histogram(once, num_ranks)
        selections[rank] = _histogram(ranks, num_ranks)
        to_node[rank] = _histogram(pairs, num_nodes * num_channels).view(num_nodes, num_channels)
    return Traffic(num_local, num_experts, to_node, to_rank, selections)


def count_job(job: Job, num_channels: int) -> Traffic:
    return count(job.routings(), job.num_ranks, job.ranks_per_node, job.num_experts, num_channels)


def _histogram(values: Tensor, num_values: int) -> Tensor:
    return torch.bincount(values.flatten(), minlength=num_values + 1)[:num_values]


def _first_of_runs(values: Tensor) -> Tensor:
    """bool, like ``values``: is it the first of equal neighbours in its (sorted) row?"""
    first = torch.ones(values.shape, dtype=torch.bool)
    first[:, 1:] = values[:, 1:] != values[:, :-1]
    return first
