"""The readable truth of groups of several nodes: what the two-tier dispatch and
combine must give, bit for bit.

Rows arrive as inside one node (deep_comm.reference); what differs is the handle and where sums are
rounded. N nodes of M ranks, R = N * M; otherwise the names of deep_comm.reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deep_comm import reference
from deep_comm.reference import (
    Bias,
    Dispatched,
    Payload,
    Turns,
    channel_of_token,
    heads_of_tokens,
    node_mask,
    owner_of_expert,
    prefix_of_channels,
    sum_of_biases,
    turns_of_selections,
)


@dataclass(frozen=True)
class InternodeDispatched:
    """What one rank has after a dispatch between nodes, and what its handle holds."""

    received: Dispatched
    ranks_per_node: int
    rdma_channel_prefix_matrix: Tensor  # int32 [N, C]
    gbl_channel_prefix_matrix: Tensor  # int32 [R, C]
    recv_rdma_channel_prefix_matrix: Tensor  # int32 [N, C]
    recv_rdma_rank_prefix_sum: Tensor  # int32 [N]
    recv_gbl_channel_prefix_matrix: Tensor  # int32 [R, C]
    recv_gbl_rank_prefix_sum: Tensor  # int32 [R]
    recv_src_meta: Tensor  # int32 [num_recv_tokens, 2]: source node, mask of this node's ranks
    send_rdma_head: Tensor  # int32 [T, N]
    send_nvl_head: Tensor  # int32 [F, M], see _forwarded


def _positions(owner: Tensor, first: int, num_local: int) -> Tensor:
    """int64 [T, M] of ``owner`` [T, K] of each selection: how many of the ranks from ``first`` on a
    token selects for the last time before it does so at this one."""
    is_there = owner.unsqueeze(2) == torch.arange(first, first + num_local)
    last = (is_there * torch.arange(1, owner.shape[1] + 1).view(-1, 1)).amax(dim=1)  # 0: never
    return ((last.unsqueeze(1) < last.unsqueeze(2)) & (last.unsqueeze(1) > 0)).sum(dim=2)


def _forwarded(tokens: Sequence[Tensor], positions: Sequence[Tensor], num_channels: int) -> Tensor:
    """int32 [F, M] from ``tokens[n]``: bool [T_n, M], which of this node's ranks node n's tokens go
    to, and ``positions[n]`` [T_n, M] of these in the order of the token's last selections there.

    Position * 2^28 + a row's place in the ring that combine fills for a local rank: the ring of
    channel c takes the nodes c, c + 1, … modulo N, and a node's rows in order. -1: not sent there.
    """
    num_nodes, num_local = len(tokens), tokens[0].shape[1]
    heads = [torch.full(mask.shape, -1, dtype=torch.int32) for mask in tokens]
    for channel in range(num_channels):
        next_place = torch.zeros(num_local, dtype=torch.int64)
        for step in range(num_nodes):
            node = (channel + step) % num_nodes
            channels = channel_of_token(len(tokens[node]), num_channels)
            here = (channels == channel).nonzero().squeeze(1)
            goes = tokens[node][here]
            places = next_place + goes.long().cumsum(dim=0) - 1
            words = (positions[node][here] << 28) + places
            heads[node][here] = torch.where(goes, words, -1).to(torch.int32)
            next_place += goes.sum(dim=0)
    # A row is forwarded if it goes to any rank of this node.
    rows = [head[mask.any(dim=1)] for head, mask in zip(heads, tokens, strict=True)]
    return torch.cat(rows)


def dispatch(
    xs: Sequence[Payload],
    topk_idxs: Sequence[Tensor],
    num_experts: int,
    ranks_per_node: int,
    topk_weights: Sequence[Tensor] | None = None,
    *,
    num_channels: int = 1,
    expert_alignment: int = 1,
    num_worst_tokens: int = 0,
) -> list[InternodeDispatched]:
    """What every rank receives; arguments as of ``reference.dispatch``."""
    received = reference.dispatch(
        xs,
        topk_idxs,
        num_experts,
        topk_weights,
        num_channels=num_channels,
        expert_alignment=expert_alignment,
        num_worst_tokens=num_worst_tokens,
    )
    num_ranks = len(xs)
    num_nodes = num_ranks // ranks_per_node
    masks = [got.is_token_in_rank for got in received]
    node_masks = [node_mask(mask, ranks_per_node) for mask in masks]
    node_prefixes = [prefix_of_channels(mask, num_channels) for mask in node_masks]
    owners = [owner_of_expert(idx, num_experts, num_ranks) for idx in topk_idxs]
    results = []
    for rank, got in enumerate(received):
        node, local = divmod(rank, ranks_per_node)
        rail = range(local, num_ranks, ranks_per_node)  # the ranks of this local index
        own = slice(node * ranks_per_node, (node + 1) * ranks_per_node)
        recv_node_prefix = torch.stack([node_prefixes[peer][node] for peer in rail])
        starts = got.rank_prefix_matrix[:, rank] - torch.diff(
            got.rank_prefix_matrix[:, rank], prepend=torch.zeros(1, dtype=torch.int32)
        )
        num = got.num_recv_tokens
        # Rows come by source rank and token: those of a source are its tokens for this rank.
        goes = torch.cat([mask[mask[:, rank]][:, own] for mask in masks])
        bits = torch.tensor([1 << i for i in range(ranks_per_node)])
        ranks_of = (goes.long() * bits).sum(dim=1)
        nodes = got.recv_src_rank[:num] // ranks_per_node
        meta = torch.stack([nodes, ranks_of.to(torch.int32)], dim=1)
        results.append(
            InternodeDispatched(
                received=got,
                ranks_per_node=ranks_per_node,
                rdma_channel_prefix_matrix=node_prefixes[rank],
                gbl_channel_prefix_matrix=got.channel_prefix_matrix,
                recv_rdma_channel_prefix_matrix=recv_node_prefix,
                recv_rdma_rank_prefix_sum=recv_node_prefix[:, -1].cumsum(0).to(torch.int32),
                recv_gbl_channel_prefix_matrix=got.recv_channel_prefix_matrix
                + starts.unsqueeze(1).to(torch.int32),
                recv_gbl_rank_prefix_sum=got.rank_prefix_matrix[:, rank].contiguous(),
                recv_src_meta=meta,
                send_rdma_head=heads_of_tokens(node_masks[rank], node_prefixes[rank]),
                send_nvl_head=_forwarded(
                    [masks[peer][:, own] for peer in rail],
                    [_positions(owners[peer], own.start, ranks_per_node) for peer in rail],
                    num_channels,
                ),
            )
        )
    assert num_nodes * ranks_per_node == num_ranks
    return results


def _sums_of_nodes(
    rows: Sequence[Tensor],
    dispatched: Sequence[InternodeDispatched],
    rank: int,
    dtype: torch.dtype,
    turns: tuple[Turns, Turns] | None = None,
    start: Tensor | float = 0.0,
) -> Tensor:
    """float32 [T, width]: per node the float32 sum over its ranks, rounded to ``dtype``; these
    added to ``start`` in float32. Ranks and nodes ascending, or in ``turns`` (of ranks, of nodes).
    """
    received = [got.received for got in dispatched]
    is_token_in_rank = received[rank].is_token_in_rank
    ranks_per_node = dispatched[rank].ranks_per_node
    num_tokens, num_ranks = is_token_in_rank.shape
    num_nodes = num_ranks // ranks_per_node
    ranks, nodes = turns or [
        [(peer, None) for peer in range(num)] for num in (num_ranks, num_nodes)
    ]
    sums = torch.zeros(num_nodes, num_tokens, rows[rank].shape[1], dtype=torch.float32)
    for peer, are_next in ranks:
        tokens = is_token_in_rank[:, peer].nonzero().squeeze(1)
        end = int(received[peer].rank_prefix_matrix[rank, peer])
        got = rows[peer][end - len(tokens) : end].float()
        taken = slice(None) if are_next is None else are_next[tokens]
        sums[peer // ranks_per_node, tokens[taken]] += got[taken]
    sums = sums.to(dtype).float()
    total = torch.zeros_like(sums[0])
    total += start
    goes = node_mask(is_token_in_rank, ranks_per_node)
    for node, are_next in nodes:
        taken = goes[:, node] if are_next is None else goes[:, node] & are_next
        total[taken] += sums[node, taken]
    return total


def combine(
    xs: Sequence[Tensor],
    dispatched: Sequence[InternodeDispatched],
    topk_weights: Sequence[Tensor] | None = None,
    biases: Sequence[Bias] | None = None,
    topk_idxs: Sequence[Tensor] | None = None,
    num_experts: int = 0,
) -> list[tuple[Tensor, Tensor | None]]:
    """Sum of every token's rows over the ranks that got it, plus bias: per rank ([T, H], [T, K]).

    A node's rows are added in float32 from 0.0, ranks ascending, and rounded to the dtype of x, the
    source's own node included. The nodes' sums are added in float32 to the sum of the biases, nodes
    ascending, and rounded once more. With ``topk_idxs`` [T, K], of the dispatch, and
    ``num_experts`` a token takes its nodes, and in each node its ranks, in the order of its last
    selections there. Weights are summed in the same order and stay float32.
    """
    results: list[tuple[Tensor, Tensor | None]] = []
    for rank, x in enumerate(xs):
        turns = None
        if topk_idxs is not None:
            ranks_per_node = dispatched[rank].ranks_per_node
            owner = owner_of_expert(topk_idxs[rank], num_experts, len(xs))
            turns = (
                turns_of_selections(owner, len(xs)),
                turns_of_selections(owner // ranks_per_node, len(xs) // ranks_per_node),
            )
        start = sum_of_biases(biases[rank] if biases is not None else None)
        total = _sums_of_nodes(xs, dispatched, rank, x.dtype, turns, start)
        weights = None
        if topk_weights is not None:
            weights = _sums_of_nodes(topk_weights, dispatched, rank, torch.float32, turns)
        results.append((total.to(x.dtype), weights))
    return results
