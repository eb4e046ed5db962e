"""The readable truth of ExpertParallel, in plain torch; see deep_comm.reference.

R ranks, T tokens of a rank, H hidden, K top-k, E experts. An expert is a function of its global
index and of rows, which it computes one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deep_comm.ranks.topology import first_expert, num_local_experts
from deep_comm.reference import Expert, get_dispatch_layout


def _rows_of_selections(x: Tensor, topk_idx: Tensor, num_experts: int, expert: Expert) -> Tensor:
    """[T, K, H]: what each selected expert makes of the token; zeros where nothing is selected."""
    rows = torch.zeros(*topk_idx.shape, x.shape[1], dtype=x.dtype)
    for idx in range(num_experts):
        tokens, selections = (topk_idx == idx).nonzero(as_tuple=True)
        rows[tokens, selections] = expert(idx, x[tokens])
    return rows


def _sum_of_selections(rows: Tensor, weights: Tensor | None, chosen: Tensor) -> Tensor:
    """[T, K, H] to [T, H] in float32 from 0.0, k ascending; every product rounded."""
    total = torch.zeros(rows.shape[0], rows.shape[2], dtype=torch.float32)
    for k in range(rows.shape[1]):
        addend = rows[:, k].float()
        if weights is not None:
            addend = addend * weights[:, k : k + 1]
        total = torch.where(chosen[:, k : k + 1], total + addend, total)
    return total


def _sum_over_ranks(
    rows: Tensor,
    weights: Tensor | None,
    topk_idx: Tensor,
    num_experts: int,
    num_ranks: int,
    ranks_per_node: int | None = None,
) -> Tensor:
    """Per rank the sum of its selections, rounded; then the ranks' sums, ascending, rounded.

    With several nodes: the ranks' sums of a node, rounded, then the nodes'
    sums, ascending, rounded.
    """
    per_node = num_ranks if ranks_per_node is None else ranks_per_node
    if per_node < num_ranks:
        total = torch.zeros(rows.shape[0], rows.shape[2], dtype=torch.float32)
        for first in range(0, num_ranks, per_node):
            begin = first_expert(first, num_experts, num_ranks)
            last = first + per_node - 1
            end = first_expert(last, num_experts, num_ranks)
            end += num_local_experts(last, num_experts, num_ranks)
            here = torch.where((topk_idx >= begin) & (topk_idx < end), topk_idx, -1)
            of_node = _sum_over_ranks(rows, weights, here, num_experts, num_ranks)
            total += of_node.float()
        return total.to(rows.dtype)
    layout = get_dispatch_layout(topk_idx, num_experts, num_ranks)
    total = torch.zeros(rows.shape[0], rows.shape[2], dtype=torch.float32)
    for rank in range(num_ranks):
        first = first_expert(rank, num_experts, num_ranks)
        end = first + num_local_experts(rank, num_experts, num_ranks)
        chosen = (topk_idx >= first) & (topk_idx < end)
        partial = _sum_of_selections(rows, weights, chosen).to(rows.dtype).float()
        total = torch.where(layout.is_token_in_rank[:, rank : rank + 1], total + partial, total)
    return total.to(rows.dtype)


def of_one_rank(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    num_ranks: int,
    expert: Expert,
    ranks_per_node: int | None = None,
) -> Tensor:
    """y [T, H] of these tokens; see expert_parallel. Other ranks' tokens do not matter."""
    rows = _rows_of_selections(x, topk_idx, num_experts, expert)
    return _sum_over_ranks(rows, topk_weights, topk_idx, num_experts, num_ranks, ranks_per_node)


def expert_parallel(
    xs: Sequence[Tensor],
    topk_idxs: Sequence[Tensor],
    topk_weights: Sequence[Tensor],
    num_experts: int,
    expert: Expert,
    ranks_per_node: int | None = None,
) -> list[Tensor]:
    """y [T, H] of every rank.

    A rank of experts adds weight * row over a token's selections there in float32, k ascending,
    starting at 0.0, each product rounded to float32, and rounds the sum to the dtype of x; the
    token's rank adds those in float32, ranks ascending, and rounds.
    """
    return [
        of_one_rank(x, idx, weights, num_experts, len(xs), expert, ranks_per_node)
        for x, idx, weights in zip(xs, topk_idxs, topk_weights, strict=True)
    ]


def gradients(
    grad: Tensor,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    num_ranks: int,
    expert: Expert,
    backward: Expert,
) -> tuple[Tensor, Tensor]:
    """Of x [T, H] and of topk_weights [T, K], for ``grad`` [T, H] of one rank's y.

    Args:
        backward: (global expert index, gradients of an expert's output rows) -> of its input rows.

    An expert's rows get weight * grad, rounded to the dtype once; what comes back is added as y is,
    without weights. A weight gets row * grad, added in float32 (in any order: compare with a
    tolerance).
    """
    rows = _rows_of_selections(x, topk_idx, num_experts, expert)
    weight_grads = (rows.float() * grad.float().unsqueeze(1)).sum(dim=2)
    chosen = (topk_idx >= 0) & (topk_idx < num_experts)
    spread = (grad.float().unsqueeze(1) * topk_weights.unsqueeze(2)).to(grad.dtype)
    for idx in range(num_experts):
        tokens, selections = (topk_idx == idx).nonzero(as_tuple=True)
        spread[tokens, selections] = backward(idx, spread[tokens, selections])
    grad_x = _sum_over_ranks(spread, None, topk_idx, num_experts, num_ranks)
    return grad_x, torch.where(chosen, weight_grads, 0.0)
