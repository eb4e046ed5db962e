"""The readable truth: dispatch and combine over the inputs of all ranks, in plain torch.

Every function takes lists indexed by rank and returns what each rank must see, bit for bit. Nothing
here is fast on purpose and nothing here knows about rings, channels beyond their prefix sums, or
devices: tests compare the engine with it.

R ranks, T tokens of a rank, H hidden, K top-k, E experts, L experts of a rank, C channels, N rows
that a rank receives. An index in topk_idx outside 0..E-1 selects nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deep_comm.ranks.topology import first_expert, num_local_experts

Payload = Tensor | tuple[Tensor, Tensor]
Bias = Tensor | tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class Layout:
    """What get_dispatch_layout returns for one rank."""

    num_tokens_per_rank: Tensor  # int32 [R], a token counts once per rank
    num_tokens_per_rdma_rank: Tensor | None  # int32 [nodes], once per node; None on one node
    num_tokens_per_expert: Tensor  # int32 [E], every selection counts
    is_token_in_rank: Tensor  # bool [T, R]


@dataclass(frozen=True)
class Dispatched:
    """What one rank has after a dispatch, and what its handle holds."""

    recv_x: Tensor  # [N, H], sorted by (source rank, source token)
    recv_x_scales: Tensor | None  # [N, S]
    recv_topk_idx: Tensor  # [N, K], local expert index, or -1: not on this rank
    recv_topk_weights: Tensor | None  # float32 [N, K], 0 where the index is -1
    num_recv_tokens_per_expert: list[int]  # [L], rounded up to the alignment; [] in worst-case mode
    num_recv_tokens: int  # rows that arrived; less than N in worst-case mode only
    recv_src_idx: Tensor  # int32 [N], token index at its source; -1 past num_recv_tokens
    recv_src_rank: Tensor  # int32 [N]; -1 past num_recv_tokens
    rank_prefix_matrix: Tensor  # int32 [R, R], [i, j]: tokens of ranks 0..i to rank j
    channel_prefix_matrix: Tensor  # int32 [R, C], [j, c]: tokens to rank j in channels 0..c
    recv_channel_prefix_matrix: (
        Tensor  # int32 [R, C], [i, c]: start of channel c in source i's block
    )
    is_token_in_rank: Tensor  # bool [T, R]
    send_head: (
        Tensor  # int32 [T, R], ordinal of the token in its (rank, channel) queue; -1: not sent
    )


def owner_of_expert(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """Rank that holds each selected expert; num_ranks where nothing is selected."""
    starts = torch.tensor([first_expert(r, num_experts, num_ranks) for r in range(num_ranks)])
    selected = (topk_idx >= 0) & (topk_idx < num_experts)
    owner = torch.searchsorted(starts, topk_idx.to(torch.int64).contiguous(), right=True) - 1
    return torch.where(selected, owner, num_ranks)


def get_dispatch_layout(
    topk_idx: Tensor, num_experts: int, num_ranks: int, ranks_per_node: int | None = None
) -> Layout:
    """Layout of one rank's ``topk_idx`` [T, K]."""
    num_tokens = topk_idx.shape[0]
    owner = owner_of_expert(topk_idx, num_experts, num_ranks)
    mask = torch.zeros(num_tokens, num_ranks + 1, dtype=torch.bool)
    is_token_in_rank = mask.scatter_(1, owner, True)[:, :num_ranks].contiguous()
    selected = topk_idx[owner < num_ranks].to(torch.int64)
    per_node = None
    if ranks_per_node is not None and ranks_per_node < num_ranks:
        per_node = node_mask(is_token_in_rank, ranks_per_node).sum(dim=0, dtype=torch.int32)
    return Layout(
        num_tokens_per_rank=is_token_in_rank.sum(dim=0, dtype=torch.int32),
        num_tokens_per_rdma_rank=per_node,
        num_tokens_per_expert=torch.bincount(selected, minlength=num_experts).to(torch.int32),
        is_token_in_rank=is_token_in_rank,
    )


def node_mask(is_token_in_rank: Tensor, ranks_per_node: int) -> Tensor:
    """bool [T, N]: does a token go to a node?"""
    num_tokens, num_ranks = is_token_in_rank.shape
    return is_token_in_rank.view(num_tokens, num_ranks // ranks_per_node, ranks_per_node).any(dim=2)


def channel_of_token(num_tokens: int, num_channels: int) -> Tensor:
    """int64 [T]: channel c carries the tokens [c * ceil(T / C), (c + 1) * ceil(T / C))."""
    per_channel = max(1, -(-num_tokens // num_channels))
    return torch.arange(num_tokens) // per_channel


def prefix_of_channels(mask: Tensor, num_channels: int) -> Tensor:
    """int32 [columns, C]: tokens of channels 0..c for each column of ``mask`` [T, columns]."""
    counts = torch.zeros(num_channels, mask.shape[1], dtype=torch.int64)
    counts.index_add_(0, channel_of_token(mask.shape[0], num_channels), mask.long())
    return counts.cumsum(dim=0).t().to(torch.int32).contiguous()


def _exclusive(prefix: Tensor) -> Tensor:
    """[R, C] inclusive prefix sums over the channels to exclusive ones."""
    return torch.cat([torch.zeros_like(prefix[:, :1]), prefix[:, :-1]], dim=1)


def heads_of_tokens(mask: Tensor, prefix: Tensor) -> Tensor:
    """int32 [T, columns]: ordinal of a token in its (column, channel) queue; -1: not there."""
    channel = channel_of_token(mask.shape[0], prefix.shape[1])
    ordinal = mask.long().cumsum(dim=0) - 1
    return torch.where(mask, ordinal - _exclusive(prefix).t()[channel], -1).to(torch.int32)


def _pad_rows(rows: Tensor, num_rows: int, fill: int) -> Tensor:
    missing = max(0, num_rows - rows.shape[0])
    return torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), fill)])


def _gather(
    per_rank: Sequence[Tensor], tokens: Sequence[Tensor], num_rows: int, fill: int = 0
) -> Tensor:
    """The rows ``tokens[r]`` of every ``per_rank[r]``, by rank, padded to ``num_rows``."""
    rows = [source[index] for source, index in zip(per_rank, tokens, strict=True)]
    return _pad_rows(torch.cat(rows), num_rows, fill)


def _bytes(rows: Tensor) -> Tensor:
    """Payload as bytes: it is moved, never read, and torch cannot index every dtype."""
    # Not contiguous(): it keeps odd strides of dimensions of extent 1, which a view then refuses.
    return rows.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def dispatch(
    xs: Sequence[Payload],
    topk_idxs: Sequence[Tensor],
    num_experts: int,
    topk_weights: Sequence[Tensor] | None = None,
    *,
    num_channels: int = 1,
    expert_alignment: int = 1,
    num_worst_tokens: int = 0,
) -> list[Dispatched]:
    """What every rank receives when rank r sends ``xs[r]`` [T_r, H] by ``topk_idxs[r]`` [T_r, K].

    With ``num_worst_tokens`` the results have that many rows; those past ``num_recv_tokens`` hold
    zeros here and anything in the engine, except indices (-1) and weights (0), which are promised.
    """
    num_ranks = len(xs)
    layouts = [get_dispatch_layout(idx, num_experts, num_ranks) for idx in topk_idxs]
    sent = torch.stack([layout.num_tokens_per_rank for layout in layouts])
    rank_prefix_matrix = sent.cumsum(dim=0).to(torch.int32)
    per_expert = torch.stack([layout.num_tokens_per_expert for layout in layouts]).sum(dim=0)
    channel_prefix = [
        prefix_of_channels(layout.is_token_in_rank, num_channels) for layout in layouts
    ]

    dtype = (xs[0][0] if isinstance(xs[0], tuple) else xs[0]).dtype
    data = [_bytes(x[0] if isinstance(x, tuple) else x) for x in xs]
    scales = [x[1] for x in xs if isinstance(x, tuple)]
    scale_bytes = [_bytes(rows) for rows in scales]
    source_ranks = [torch.full((x.shape[0],), r, dtype=torch.int32) for r, x in enumerate(data)]

    results = []
    for rank in range(num_ranks):
        tokens = [layout.is_token_in_rank[:, rank].nonzero().squeeze(1) for layout in layouts]
        num_recv_tokens = int(rank_prefix_matrix[-1, rank])
        num_rows = num_worst_tokens or num_recv_tokens
        first = first_expert(rank, num_experts, num_ranks)
        num_local = num_local_experts(rank, num_experts, num_ranks)
        global_idx = _gather(topk_idxs, tokens, num_rows, -1)
        is_local = (global_idx >= first) & (global_idx < first + num_local)
        weights = None
        if topk_weights is not None:
            weights = torch.where(is_local, _gather(topk_weights, tokens, num_rows), 0.0)
        aligned = -(-per_expert[first : first + num_local] // expert_alignment) * expert_alignment
        results.append(
            Dispatched(
                recv_x=_gather(data, tokens, num_rows).view(dtype),
                recv_x_scales=_gather(scale_bytes, tokens, num_rows).view(scales[0].dtype)
                if scales
                else None,
                recv_topk_idx=torch.where(is_local, global_idx - first, -1),
                recv_topk_weights=weights,
                num_recv_tokens_per_expert=[] if num_worst_tokens else aligned.tolist(),
                num_recv_tokens=num_recv_tokens,
                recv_src_idx=_pad_rows(torch.cat(tokens).to(torch.int32), num_rows, -1),
                recv_src_rank=_gather(source_ranks, tokens, num_rows, -1),
                rank_prefix_matrix=rank_prefix_matrix,
                channel_prefix_matrix=channel_prefix[rank],
                recv_channel_prefix_matrix=_exclusive(
                    torch.stack([prefix[rank] for prefix in channel_prefix])
                ),
                is_token_in_rank=layouts[rank].is_token_in_rank,
                send_head=heads_of_tokens(layouts[rank].is_token_in_rank, channel_prefix[rank]),
            )
        )
    return results


@dataclass(frozen=True)
class Expanded:
    """What one rank has after a dispatch with expand=True: M rows grouped by local expert."""

    recv_x: Tensor  # [M, H]; zeros in rows of no token
    recv_x_scales: Tensor | None  # [M, S]
    recv_topk_idx: Tensor  # [M], local expert, or -1: the row belongs to no token
    recv_topk_weights: Tensor | None  # float32 [M], 0 where the index is -1
    expert_offsets: Tensor  # int32 [L + 1], multiples of the alignment
    expert_counts: Tensor  # int32 [L]
    recv_rows: Tensor  # int32 [N, K], row of a token's selection; -1: not here


def expand(
    received: Dispatched, num_local_experts: int, expert_alignment: int = 1, num_rows: int = 0
) -> Expanded:
    """The expanded output of one rank, from its plain one; ``num_rows``: M in worst-case mode.

    Every selection has a row of its own. Within an expert rows are sorted by (source rank, source
    token, selection), and so the two of a token that selects an expert twice are neighbours.
    """
    idx = received.recv_topk_idx[: received.num_recv_tokens]
    tokens_of, offsets, counts = [], [0], []
    for expert in range(num_local_experts):
        tokens_of.append((idx == expert).nonzero())  # (token, selection), in this order
        counts.append(len(tokens_of[-1]))
        offsets.append(offsets[-1] + -(-counts[-1] // expert_alignment) * expert_alignment)
    num_rows = num_rows or offsets[-1]
    data = _bytes(received.recv_x)
    scales = None if received.recv_x_scales is None else _bytes(received.recv_x_scales)
    out_x = data.new_zeros(num_rows, data.shape[1])
    out_scales = None if scales is None else scales.new_zeros(num_rows, scales.shape[1])
    out_idx = torch.full((num_rows,), -1, dtype=idx.dtype)
    out_weights = None if received.recv_topk_weights is None else torch.zeros(num_rows)
    recv_rows = torch.full(received.recv_topk_idx.shape, -1, dtype=torch.int32)
    for expert, selections in enumerate(tokens_of):
        rows = torch.arange(counts[expert]) + offsets[expert]
        tokens, columns = selections.unbind(dim=1)
        out_x[rows] = data[tokens]
        out_idx[rows] = expert
        recv_rows[tokens, columns] = rows.to(torch.int32)
        if out_scales is not None and scales is not None:
            out_scales[rows] = scales[tokens]
        if out_weights is not None and received.recv_topk_weights is not None:
            out_weights[rows] = received.recv_topk_weights[tokens, columns]
    return Expanded(
        recv_x=out_x.view(received.recv_x.dtype),
        recv_x_scales=None
        if out_scales is None or received.recv_x_scales is None
        else out_scales.view(received.recv_x_scales.dtype),
        recv_topk_idx=out_idx,
        recv_topk_weights=out_weights,
        expert_offsets=torch.tensor(offsets, dtype=torch.int32),
        expert_counts=torch.tensor(counts, dtype=torch.int32),
        recv_rows=recv_rows,
    )


def reduce_experts(x: Tensor, expanded: Expanded, weights: Tensor | None = None) -> Tensor:
    """One row a received token, [N, H], from expanded rows ``x`` [M, H]: what combine sends home.

    float32 from 0.0, selections ascending; with ``weights`` [M] each row times its weight, rounded
    before it is added; the sum is rounded to the dtype of ``x`` once.
    """
    num_tokens, num_topk = expanded.recv_rows.shape
    total = torch.zeros(num_tokens, x.shape[1], dtype=torch.float32)
    for k in range(num_topk):
        rows = expanded.recv_rows[:, k].long()
        tokens = (rows >= 0).nonzero().squeeze(1)
        values = x[rows[tokens]].float()
        if weights is not None:
            values = values * weights[rows[tokens]].unsqueeze(1)
        total[tokens] += values
    return total.to(x.dtype)


def selection_weights(weights: Tensor, expanded: Expanded) -> Tensor:
    """float32 [N, K] from one weight a row [M]: 0 where the selection is on another rank."""
    rows = expanded.recv_rows.long()
    if len(weights) == 0:
        return torch.zeros(rows.shape)
    return torch.where(rows >= 0, weights[rows.clamp(min=0)], 0.0)


def sum_of_biases(bias: Bias) -> Tensor | float:
    """float32 [T, H] from which a token's sum starts."""
    total: Tensor | float = 0.0
    for part in () if bias is None else bias if isinstance(bias, tuple) else (bias,):
        total = total + part.float()
    return total


Turns = Sequence[tuple[int, Tensor | None]]
"""(whose rows are added next, for which tokens [T], None: for all)."""


def turns_of_selections(owner: Tensor, num_owners: int) -> Turns:
    """By the last selection of a token at each of ``num_owners``; ``owner`` of each, [T, K]."""
    return [
        (peer, (owner[:, k] == peer) & (owner[:, k + 1 :] != peer).all(dim=1))
        for k in range(owner.shape[1])
        for peer in range(num_owners)
    ]


def _sum_over_ranks(
    rows: Sequence[Tensor],
    dispatched: Sequence[Dispatched],
    rank: int,
    turns: Turns | None = None,
    start: Tensor | float = 0.0,
) -> Tensor:
    """float32 [T, width]: ``start`` plus the rows that ``rank``'s tokens have, ranks ascending or
    in ``turns``."""
    is_token_in_rank = dispatched[rank].is_token_in_rank
    total = torch.zeros(is_token_in_rank.shape[0], rows[rank].shape[1], dtype=torch.float32)
    total += start
    for peer, are_next in turns or [(peer, None) for peer in range(len(rows))]:
        tokens = is_token_in_rank[:, peer].nonzero().squeeze(1)
        end = int(dispatched[peer].rank_prefix_matrix[rank, peer])
        received = rows[peer][end - len(tokens) : end].float()
        taken = slice(None) if are_next is None else are_next[tokens]
        total[tokens[taken]] += received[taken]
    return total


def combine(
    xs: Sequence[Tensor],
    dispatched: Sequence[Dispatched],
    topk_weights: Sequence[Tensor] | None = None,
    biases: Sequence[Bias] | None = None,
    topk_idxs: Sequence[Tensor] | None = None,
    num_experts: int = 0,
) -> list[tuple[Tensor, Tensor | None]]:
    """Sum of every token's rows over the ranks that got it, plus bias: per rank ([T, H], [T, K]).

    The sum runs in float32, starts at 0.0, takes the first and the second bias, then ranks in
    ascending order, and is rounded to the dtype of x once. With ``topk_idxs`` [T, K] and
    ``num_experts`` a token takes its ranks in the order of its last selections there. Weights are
    summed alike and stay float32.
    """
    results: list[tuple[Tensor, Tensor | None]] = []
    for rank, x in enumerate(xs):
        turns = None
        if topk_idxs is not None:
            owner = owner_of_expert(topk_idxs[rank], num_experts, len(xs))
            turns = turns_of_selections(owner, len(xs))
        start = sum_of_biases(biases[rank] if biases is not None else None)
        total = _sum_over_ranks(xs, dispatched, rank, turns, start)
        weights = None
        if topk_weights is not None:
            weights = _sum_over_ranks(topk_weights, dispatched, rank, turns)
        results.append((total.to(x.dtype), weights))
    return results


Expert = Callable[[int, Tensor], Tensor]
"""(global expert index, rows [n, H]) -> rows [n, H]."""


def local_experts(
    recv_x: Tensor,
    recv_topk_idx: Tensor,
    recv_topk_weights: Tensor,
    first_expert: int,
    num_local_experts: int,
    expert: Expert,
) -> Tensor:
    """What a rank hands to combine: each row's weighted sum over this rank's experts, [N, H].

    float32, experts in ascending order, rounded to the dtype of ``recv_x`` once. A row that selects
    an expert twice counts it with the sum of both weights.
    """
    total = torch.zeros(recv_x.shape, dtype=torch.float32, device=recv_x.device)
    for local in range(num_local_experts):
        chosen = recv_topk_idx == local
        rows = chosen.any(dim=1).nonzero().squeeze(1)
        if len(rows) == 0:
            continue
        weight = torch.where(chosen[rows], recv_topk_weights[rows], 0.0).sum(dim=1, keepdim=True)
        total[rows] += weight * expert(first_expert + local, recv_x[rows]).float()
    return total.to(recv_x.dtype)


def experts_of_ranks(
    dispatched: Sequence[Dispatched], num_experts: int, expert: Expert
) -> list[Tensor]:
    """local_experts of every rank, on what it has received."""
    outputs = []
    for rank, received in enumerate(dispatched):
        assert received.recv_topk_weights is not None
        outputs.append(
            local_experts(
                received.recv_x,
                received.recv_topk_idx,
                received.recv_topk_weights,
                first_expert(rank, num_experts, len(dispatched)),
                num_local_experts(rank, num_experts, len(dispatched)),
                expert,
            )
        )
    return outputs


def moe_layer(
    xs: Sequence[Tensor],
    topk_idxs: Sequence[Tensor],
    topk_weights: Sequence[Tensor],
    num_experts: int,
    expert: Expert,
) -> list[Tensor]:
    """A Mixture-of-Experts layer of all ranks in one process: dispatch, experts, combine.

    Every expert sees the very rows, in the very order and shape, that it sees in a distributed run,
    so that results can be compared bit for bit.
    """
    dispatched = dispatch(xs, topk_idxs, num_experts, topk_weights)
    outputs = experts_of_ranks(dispatched, num_experts, expert)
    return [combined for combined, _ in combine(outputs, dispatched)]
