"""Dispatch, experts and combine without a word from the host: the body of a
CUDA graph, and its checks.

Experts work on the worst case of rows, from device-side counts alone. Every rank can compute
what must come out for its own tokens; the arithmetic is the same, element by element, so results
are compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import deep_comm
from deep_comm.ranks.topology import first_expert, num_local_experts

TOKENS, HIDDEN, EXPERTS, TOPK = 24, 256, 10, 3


@dataclass
class Step:
    """One dispatch → experts → combine over tensors that stay where they are."""

    x: Tensor
    idx: Tensor
    weights: Tensor
    recv_x: Tensor | None = None
    recv_idx: Tensor | None = None
    recv_weights: Tensor | None = None
    combined: Tensor | None = None
    handle: Any = None


def captured(body: Callable[[], Any], group: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of ``body``, which has run before, and what it returned."""
    torch.cuda.synchronize()
    group.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = body()
    return graph, made


def factor_of(idx: Tensor, weights: Tensor, first: int) -> Tensor:
    """What a row's experts multiply it with, summed: exact in float32."""
    here = (idx >= 0).float()
    return (weights * here * (idx + 1 + first).float()).sum(1, keepdim=True)


def fill(step: Step, rank: int, call: int) -> None:
    """Another routing and another payload; -1 here and there, some tokens to nobody."""
    chance = torch.Generator().manual_seed(1000 * call + rank)
    idx = torch.rand(TOKENS, EXPERTS, generator=chance).topk(TOPK, dim=1).indices
    idx[torch.rand(TOKENS, TOPK, generator=chance) < 0.2] = -1
    if call % 3 == 1:
        idx[:] = torch.where(idx >= 0, (call // 3) % EXPERTS, -1)  # all to one rank
    step.idx.copy_(idx)
    step.x.copy_(torch.randint(-4, 5, (TOKENS, HIDDEN), generator=chance).bfloat16())
    step.weights.copy_(torch.randint(1, 4, (TOKENS, TOPK), generator=chance) / 2)


def make_step(device: torch.device) -> Step:
    return Step(
        torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, device=device),
        torch.zeros(TOKENS, TOPK, dtype=torch.int64, device=device),
        torch.zeros(TOKENS, TOPK, device=device),
    )


def run_step(buffer: deep_comm.Buffer, step: Step, config: deep_comm.Config | None = None) -> None:
    step.recv_x, step.recv_idx, step.recv_weights, _, step.handle, _ = buffer.dispatch(
        step.x, topk_idx=step.idx, topk_weights=step.weights, num_experts=EXPERTS, config=config,
        num_worst_tokens=TOKENS * buffer.group_size, zero_tail=True,
    )  # fmt: skip
    first = first_expert(buffer.rank, EXPERTS, buffer.group_size)
    rows = step.recv_x.float() * factor_of(step.recv_idx, step.recv_weights, first)
    step.combined = buffer.combine(rows.bfloat16(), step.handle, config=config)[0]


def expected(step: Step, num_ranks: int, ranks_per_node: int = 1) -> Tensor:
    """``ranks_per_node``: of several nodes, each of which rounds its sum; one node rounds each
    rank's, as do nodes of one rank."""
    total = torch.zeros(TOKENS, HIDDEN, device=step.x.device)
    node_sum = torch.zeros_like(total)
    for rank in range(num_ranks):
        first, count = (
            first_expert(rank, EXPERTS, num_ranks),
            num_local_experts(rank, EXPERTS, num_ranks),
        )
        local = step.idx - first
        local = torch.where((local >= 0) & (local < count), local, -1)
        row = (step.x.float() * factor_of(local, step.weights, first)).bfloat16().float()
        node_sum += torch.where((local >= 0).any(1, keepdim=True), row, torch.zeros_like(row))
        if (rank + 1) % ranks_per_node == 0:
            total += node_sum.bfloat16().float()
            node_sum.zero_()
    return total.bfloat16()


def check(buffer: deep_comm.Buffer, step: Step, gather: Callable[[Any], list[Any]]) -> None:
    """Sums, counts and the rows past the received ones."""
    ranks = buffer.group_size
    per_node = buffer.ranks_per_node if buffer.num_nodes > 1 else 1
    assert torch.equal(step.combined, expected(step, ranks, per_node)), "wrong sums"
    first_experts = [first_expert(r, EXPERTS, ranks) for r in range(ranks)]
    owner = torch.searchsorted(
        torch.tensor(first_experts, device=step.idx.device), step.idx, right=True
    ) - 1  # fmt: skip
    sent = [bool_rows(owner, step.idx, rank) for rank in range(ranks)]
    per_rank = [row[buffer.rank] for row in gather(sent)]
    count = int(step.handle.num_recv_tokens_tensor)
    assert step.handle.num_recv_tokens_per_rank.tolist() == per_rank
    assert count == sum(per_rank)
    local = step.recv_idx[:count]
    per_expert = torch.bincount(
        local[local >= 0], minlength=num_local_experts(buffer.rank, EXPERTS, ranks)
    )
    assert step.handle.num_recv_tokens_per_expert.tolist() == per_expert.tolist()
    assert not step.recv_x[count:].any() and not step.recv_weights[count:].any()
    assert bool((step.recv_idx[count:] == -1).all())
    assert bool((step.handle.recv_src_idx[count:] == -1).all())


def bool_rows(owner: Tensor, idx: Tensor, rank: int) -> int:
    """Tokens of this rank that go to ``rank``."""
    return int(((owner == rank) & (idx >= 0)).any(1).sum())
