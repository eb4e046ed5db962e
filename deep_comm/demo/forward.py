"""One rank's forward pass through the layer, and what it saw on the way."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from deep_comm import Buffer
from deep_comm.demo.layer import NUM_EXPERTS, Experts, Tokens
from deep_comm.ranks import topology
from deep_comm.reference import local_experts

T = TypeVar("T")

STAGES = ("layout", "dispatch", "experts", "combine")


@dataclass
class Forward:
    """What one rank sent, received and computed. Tensors are on the host."""

    rank: int
    num_tokens: int
    num_sent_tokens: int  # copies to other ranks
    num_recv_tokens: int  # copies from other ranks
    num_rows: int  # rows its experts work on, its own included
    tokens_per_expert: list[int]
    sent_bytes: int  # payload rows to other ranks, dispatch and combine together
    times_s: dict[str, float] = field(default_factory=dict)
    recv_x: Tensor | None = None  # dispatched payload
    combined_x: Tensor | None = None


class Stopwatch:
    """Times of the stages. On a GPU a stage ends when its kernels have."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.times_s: dict[str, float] = {}

    def run(self, stage: str, work: Callable[[], T]) -> T:
        started = time.perf_counter()
        result = work()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.times_s[stage] = time.perf_counter() - started
        return result


def forward(buffer: Buffer, tokens: Tokens, experts: Experts, device: torch.device) -> Forward:
    """Dispatch this rank's ``tokens``, run this rank's experts, combine."""
    rank, num_ranks = buffer.rank, buffer.group_size
    x = tokens.x.to(device)
    topk_idx = tokens.topk_idx.to(device)
    topk_weights = tokens.topk_weights.to(device)
    watch = Stopwatch(device)

    per_rank, per_node, per_expert, is_token_in_rank, _ = watch.run(
        "layout", lambda: buffer.get_dispatch_layout(topk_idx, NUM_EXPERTS)
    )
    recv_x, recv_topk_idx, recv_topk_weights, counts, handle, _ = watch.run(
        "dispatch",
        lambda: buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=is_token_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
        ),
    )
    first = topology.first_expert(rank, NUM_EXPERTS, num_ranks)
    num_local = topology.num_local_experts(rank, NUM_EXPERTS, num_ranks)
    outputs = watch.run(
        "experts",
        lambda: local_experts(recv_x, recv_topk_idx, recv_topk_weights, first, num_local, experts),
    )
    combined_x, _, _ = watch.run("combine", lambda: buffer.combine(outputs, handle))

    num_sent = int(per_rank.sum()) - int(per_rank[rank])
    num_rows = recv_x.shape[0]
    num_own = int(per_rank[rank])
    row_bytes = x.shape[1] * x.element_size()
    return Forward(
        rank=rank,
        num_tokens=x.shape[0],
        num_sent_tokens=num_sent,
        num_recv_tokens=num_rows - num_own,
        num_rows=num_rows,
        tokens_per_expert=list(counts),
        # Every row sent by dispatch; combine sends the received ones back.
        sent_bytes=(num_sent + num_rows - num_own) * row_bytes,
        times_s=watch.times_s,
        recv_x=recv_x.cpu(),
        combined_x=combined_x.cpu(),
    )
