"""Received rows to rows grouped by expert, and their weighted sums, in plain torch.

Nothing here asks the device for a number, so that all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Groups:
    """N received rows of K selections, S grouped rows, L local experts.

    A selection of a local expert has a row of its own, also where a token selects an expert twice.
    """

    row_of_selection: Tensor  # int64 [N, K], or -1: of another rank
    selection_of_row: Tensor  # int64 [S], n * K + k, or -1: padding
    num_tokens_per_expert: Tensor  # int32 [L]
    offsets: Tensor  # int32 [L + 1]

    @property
    def num_topk(self) -> int:
        return self.row_of_selection.shape[1]

    def gather(self, received: Tensor, is_padded: bool) -> Tensor:
        """[N, width] to [S, width]; padding becomes zeros."""
        if received.shape[0] == 0:
            return received.new_zeros((self.selection_of_row.shape[0], received.shape[1]))
        source = self.selection_of_row // self.num_topk
        # torch cannot index every dtype: FP8 rows are moved as bytes.
        as_bytes = received.element_size() == 1
        rows = received.view(torch.uint8) if as_bytes else received
        grouped = rows.index_select(0, source.clamp(min=0))
        if is_padded:
            grouped.masked_fill_((source < 0).unsqueeze(1), 0)
        return grouped.view(received.dtype)

    def sum_rows(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """[S, H] to [N, H]: sums over a row's selections, k ascending, from +0.0 in float32, every
        product with float32 ``weights`` [N, K] rounded; rounded to the dtype of ``rows`` once.

        The arithmetic of low-latency combine, so that results do not depend on the mode.
        """
        num_received = self.row_of_selection.shape[0]
        total = rows.new_zeros((num_received, rows.shape[1]), dtype=torch.float32)
        if rows.shape[0] == 0:
            return total.to(rows.dtype)
        for k in range(self.num_topk):
            row = self.row_of_selection[:, k]
            picked = rows.index_select(0, row.clamp(min=0)).float()
            if weights is not None:
                picked *= weights[:, k : k + 1]
            # Not a product with 0: rows of padding may hold anything.
            total += picked.masked_fill_((row < 0).unsqueeze(1), 0.0)
        return total.to(rows.dtype)

    def of_rows(self, by_selection: Tensor) -> Tensor:
        """[N, K] to [S], zeros for padding."""
        selection = self.selection_of_row
        if by_selection.numel() == 0:
            return by_selection.new_zeros(selection.shape)
        values = by_selection.reshape(-1).index_select(0, selection.clamp(min=0))
        return values.masked_fill_(selection < 0, 0.0)

    def of_selections(self, by_row: Tensor) -> Tensor:
        """[S] to [N, K], zeros for selections of other ranks' experts."""
        row = self.row_of_selection
        if by_row.numel() == 0:
            return by_row.new_zeros(row.shape)
        values = by_row.index_select(0, row.reshape(-1).clamp(min=0)).view(row.shape)
        return values.masked_fill_(row < 0, 0.0)


def group(recv_topk_idx: Tensor, num_local: int, alignment: int, num_rows: int) -> Groups:
    """Rows by (expert, received row, k); groups start at multiples of ``alignment``.

    Args:
        recv_topk_idx: [N, K], local expert or -1.
        num_rows: S, at least what the groups take; rows behind them are padding.
    """
    device = recv_topk_idx.device
    flat = recv_topk_idx.reshape(-1)
    key = torch.where(flat < 0, num_local, flat)
    sorted_key, order = key.sort(stable=True)
    bounds = torch.arange(num_local + 1, dtype=key.dtype, device=device)
    ends = torch.searchsorted(sorted_key, bounds)  # [L + 1]: first sorted selection of each expert
    counts = ends[1:] - ends[:-1]
    offsets = torch.zeros(num_local + 1, dtype=torch.int64, device=device)
    torch.cumsum((counts + alignment - 1) // alignment * alignment, dim=0, out=offsets[1:])
    # From a place among the sorted to a row: the same, but for the padding of the groups before.
    shift = torch.cat([offsets[:-1] - ends[:-1], offsets.new_zeros(1)])
    row = torch.arange(len(flat), device=device) + shift.index_select(0, sorted_key.long())
    is_local = sorted_key < num_local
    row_of_selection = torch.full_like(order, -1)
    row_of_selection[order] = torch.where(is_local, row, -1)
    # With too few rows the caller raises; nothing may be written outside.
    row = row.clamp(max=num_rows)
    # One row more takes what is not local, so that nothing needs to be counted on the host.
    selection_of_row = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=device)
    selection_of_row[torch.where(is_local, row, num_rows)] = torch.where(is_local, order, -1)
    return Groups(
        row_of_selection=row_of_selection.view(recv_topk_idx.shape),
        selection_of_row=selection_of_row[:num_rows],
        num_tokens_per_expert=counts.to(torch.int32),
        offsets=offsets.to(torch.int32),
    )
