"""Rows grouped by expert, from rows that arrived once: where each goes, and back again.

For handles of compact dispatches that are used expanded; an expanded dispatch is the engine's.
Torch operations on tensors that are already here; no peer takes part and the host waits for
nothing, so that CUDA graphs hold them. N received rows, K top-k, L local experts, A alignment, P
expanded rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deep_comm.settings import integers

_REDUCE_ROWS = 8192  # rows whose float32 sums exist at a time


def aligned(counts: Tensor, alignment: int) -> Tensor:
    return (counts + (alignment - 1)) // alignment * alignment


def owners(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """int64 [T, K]: rank of each selected expert, or -1."""
    num_least, num_larger = divmod(num_experts, num_ranks)  # ranks with one expert more come first
    experts = topk_idx.to(torch.int64)
    among_rest = num_larger + (experts - num_larger * (num_least + 1)) // max(num_least, 1)
    owners = torch.where(
        experts < num_larger * (num_least + 1), experts // (num_least + 1), among_rest
    )
    return torch.where((experts >= 0) & (experts < num_experts), owners, -1)


def is_last_at_owner(owners: Tensor) -> Tensor:
    """bool [T, K]: a selection whose rank the token does not select again later."""
    is_same = owners.unsqueeze(2) == owners.unsqueeze(1)
    return (owners >= 0) & ~is_same.triu(1).any(dim=2)


def slots(recv_topk_idx: Tensor, counts: Tensor, alignment: int) -> Tensor:
    """int32 [N, K]: expanded row of each selection, or -1 where its expert is elsewhere.

    Groups begin at multiples of ``alignment``; inside one the order is that of the received rows,
    then of their selections. An expert that stands in a row twice gets the row twice.

    Args:
        recv_topk_idx: [N, K], local experts or -1.
        counts: int32 [L], selections of each.
    """
    num_local = counts.shape[0]
    experts = recv_topk_idx.reshape(-1).to(torch.int64)
    is_local = experts >= 0
    keys = torch.where(is_local, experts, num_local)
    order = torch.sort(keys, stable=True).indices
    ends = counts.to(torch.int64).cumsum(0)
    aligned_ends = aligned(counts.to(torch.int64), alignment).cumsum(0)
    # What an expert's rows move by when padding is put between the groups;
    # nothing for the last key.
    starts = torch.nn.functional.pad(ends, (1, 0))
    moves = torch.nn.functional.pad(aligned_ends, (1, 0)) - starts
    positions = torch.arange(experts.shape[0], device=experts.device)
    found = torch.empty_like(positions)
    found.scatter_(0, order, positions + moves[keys[order]])
    return torch.where(is_local, found, -1).to(torch.int32).view(recv_topk_idx.shape)


def num_rows_bound(num_recv: int, num_topk: int, num_local: int, alignment: int) -> int:
    """P that serves any routing of ``num_recv`` rows."""
    rows = num_recv * min(num_topk, num_local) + (alignment - 1) * num_local
    return integers.round_up(rows, alignment)


class Expansion:
    """[N, K] slots turned round: which received row each expanded row repeats."""

    def __init__(self, slots: Tensor, num_rows: int) -> None:
        num_recv, num_topk = slots.shape
        self.num_rows = num_rows
        flat = slots.reshape(-1).to(torch.int64)
        # Selections without a row, and rows past the end, go to one more that is cut off.
        inside = (flat >= 0) & (flat < num_rows)
        target = torch.where(inside, flat, num_rows)
        self._target = target
        received = torch.arange(num_recv, device=slots.device).repeat_interleave(num_topk)
        source = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=slots.device)
        source.scatter_(0, target, received)
        self.source = source[:num_rows]  # int64 [P], -1: padding

    def rows(self, x: Tensor, zero_padding: bool) -> Tensor:
        """[P, H] of [N, H], contiguous. Padding repeats some row unless it is zeroed."""
        if x.shape[0] == 0:
            return x.new_zeros((self.num_rows, x.shape[1]))
        # As integers: rows are copied, and float8 has no gather.
        row_bytes = x.shape[1] * x.element_size()
        width = next(dtype for dtype in _INTEGERS if row_bytes % dtype.itemsize == 0)
        out = x.contiguous().view(width).index_select(0, self.source.clamp(min=0))
        if zero_padding:
            out.masked_fill_((self.source < 0).unsqueeze(1), 0)
        return out.view(x.dtype)

    def weights(self, topk_weights: Tensor) -> Tensor:
        """float32 [P] of [N, K]; 0 in padding."""
        out = topk_weights.new_zeros((self.num_rows + 1,))
        out.scatter_(0, self._target, topk_weights.reshape(-1))
        return out[: self.num_rows]


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def reduce(x: Tensor, slots: Tensor, biases: Sequence[Tensor] = ()) -> Tensor:
    """[N, H] of expanded rows [P, H]: the sum of each received row's own.

    In float32, from the biases [N, H], selections ascending, rounded once. Slots outside 0..P-1
    add nothing.
    """
    num_recv, num_topk = slots.shape
    out = x.new_empty((num_recv, x.shape[1]))
    if x.shape[0] == 0:
        x = x.new_zeros((1, x.shape[1]))
        slots = torch.full_like(slots, -1)
    for first in range(0, num_recv, _REDUCE_ROWS):
        part = slots[first : first + _REDUCE_ROWS].to(torch.int64)
        inside = (part >= 0) & (part < x.shape[0])
        index = torch.where(inside, part, 0)
        total = torch.zeros(part.shape[0], x.shape[1], dtype=torch.float32, device=x.device)
        for bias in biases:
            total += bias[first : first + _REDUCE_ROWS]
        for k in range(num_topk):
            rows = x.index_select(0, index[:, k]).to(torch.float32)
            # Not a product with 0: a row that is not meant may hold anything.
            total += rows.masked_fill_(~inside[:, k : k + 1], 0.0)
        out[first : first + _REDUCE_ROWS] = total.to(x.dtype)
    return out


def reduce_weights(weights: Tensor, slots: Tensor) -> Tensor:
    """float32 [N, K] of [P]: each selection's own, 0 where it has no row."""
    index = slots.to(torch.int64)
    inside = (index >= 0) & (index < weights.shape[0])
    if weights.shape[0] == 0:
        return weights.new_zeros(slots.shape)
    found = weights[torch.where(inside, index, 0)]
    return torch.where(inside, found, 0.0)


def rows_in_order(x: Tensor, slots: Tensor, arrived: Tensor, num_rows: int) -> Tensor:
    """[num_rows, ...] of expanded rows [P, ...]: those of the selections that ``arrived``, bool
    [N, K], one after the other. Slots outside 0..P-1 give zeros."""
    taken = arrived.reshape(-1)
    position = torch.where(taken, taken.cumsum(0) - 1, num_rows).clamp(max=num_rows)
    index = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=slots.device)
    index.scatter_(0, position, slots.reshape(-1).to(torch.int64))
    index = index[:num_rows]
    is_inside = (index >= 0) & (index < x.shape[0])
    if x.shape[0] == 0:
        return x.new_zeros((num_rows, *x.shape[1:]))
    rows = x.index_select(0, torch.where(is_inside, index, 0))
    return rows.masked_fill_(~is_inside.view(-1, *[1] * (x.dim() - 1)), 0)
