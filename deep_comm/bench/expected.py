"""Inputs of one rank, and what the reference says every operation must return for them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from deep_comm.bench import payload
from deep_comm.bench.grouped import Grouped
from deep_comm.bench.workload import Workload, plan_of

Rows = Tensor | tuple[Tensor, Tensor]


class Expected:
    """Everything of one rank, on its device, per slot: the rotating inputs and the true outputs.

    What is asked for is kept: results are compared several times.
    """

    def __init__(self, workload: Workload, rank: int, device: torch.device, num_slots: int) -> None:
        self.workload = workload
        self.rank = rank
        self.device = device
        self.num_slots = num_slots
        routings, dispatched = plan_of(workload)
        self.plan = dispatched[rank]
        self.topk_idx = routings[rank].topk_idx.to(device)
        self.topk_weights = routings[rank].topk_weights.to(device)
        assert self.plan.recv_topk_weights is not None
        self.recv_topk_idx = self.plan.recv_topk_idx.to(device)
        self.recv_topk_weights = self.plan.recv_topk_weights.to(device)
        self.recv_src_idx = self.plan.recv_src_idx.to(device)
        self.recv_src_rank = self.plan.recv_src_rank.to(device)
        self._is_token_in_rank = self.plan.is_token_in_rank.to(device)
        self._tokens = torch.arange(workload.num_tokens_of(rank), device=device)
        # Kept per instance, so that all goes when the workload has been measured.
        self.x = functools.cache(self._make_x)
        self.recv_x = functools.cache(self._make_recv_x)
        self.expert_output = functools.cache(self._make_expert_output)
        self.combined = functools.cache(self._make_combined)
        self.echoed = functools.cache(self._make_echoed)
        self.grouped = functools.cache(lambda: Grouped(self))

    @property
    def num_recv_rows(self) -> int:
        return len(self.recv_src_idx)

    def _rows(self, keys: Tensor) -> Rows:
        workload = self.workload
        if workload.dtype == "bf16":
            return payload.bf16_rows(keys, workload.hidden)
        bits = payload.byte_rows(keys, workload.num_columns).view(workload.torch_dtype)
        return bits, payload.scale_rows(keys, workload.num_scales)

    def x_of(self, rank: int, slot: int) -> Rows:
        """What any rank dispatches."""
        tokens = torch.arange(self.workload.num_tokens_of(rank), device=self.device)
        return self._rows(payload.row_keys(rank, tokens, slot))

    def _make_x(self, slot: int) -> Rows:
        """What this rank dispatches."""
        return self.x_of(self.rank, slot)

    def _make_recv_x(self, slot: int) -> Rows:
        """What dispatch must deliver to this rank."""
        return self._rows(payload.row_keys(self.recv_src_rank, self.recv_src_idx, slot))

    def _make_expert_output(self, slot: int) -> Tensor:
        """bf16 [N, H]: what this rank hands to combine. Differs between the ranks that got a
        token."""
        keys = payload.row_keys(self.recv_src_rank, self.recv_src_idx, slot, salt=1 + self.rank)
        return payload.bf16_rows(keys, self.workload.hidden)

    def _make_combined(self, slot: int, ranks_per_node: int | None = None) -> Tensor:
        """Sum of this rank's tokens' rows over the ranks that got them, ascending, rounded once.

        With nodes of ``ranks_per_node``: once a node, and once over the nodes, ascending.
        """

        def row_of(peer: int) -> Tensor:
            keys = payload.row_keys(self.rank, self._tokens, slot, salt=1 + peer)
            return payload.bf16_rows(keys, self.workload.hidden)

        return self._sum(row_of, ranks_per_node)

    def _make_echoed(self, slot: int, ranks_per_node: int | None = None) -> Tensor:
        """The sum when every rank hands back what it received (bf16 payload)."""
        x = self.x(slot)
        assert isinstance(x, Tensor)
        return self._sum(lambda _peer: x, ranks_per_node)

    def _sum(self, row_of: Callable[[int], Tensor], ranks_per_node: int | None) -> Tensor:
        shape = (len(self._tokens), self.workload.hidden)
        num_ranks = self.workload.num_ranks
        per_node = num_ranks if ranks_per_node is None else ranks_per_node
        total = torch.zeros(shape, device=self.device)
        for first in range(0, num_ranks, per_node):
            node_total = torch.zeros(shape, device=self.device)
            for peer in range(first, first + per_node):
                goes = self._is_token_in_rank[:, peer, None]
                node_total += torch.where(goes, row_of(peer).float(), 0.0)
            if per_node == num_ranks:
                return node_total.to(torch.bfloat16)
            total += node_total.to(torch.bfloat16).float()
        return total.to(torch.bfloat16)
