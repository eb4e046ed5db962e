"""The two ways of a batch, over the calls of a Buffer; no rule, no autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deep_comm.events import EventOverlap
from deep_comm.handle import Handle
from deep_comm.layer.batch import ExpertBatch
from deep_comm.layer.grouping import Groups, group, num_grouped_rows
from deep_comm.layer.shape import MoEShape
from deep_comm.low_latency_handle import LowLatencyHandle
from deep_comm.reference_low_latency import quantise
from deep_comm.topology import first_expert, num_local_experts

if TYPE_CHECKING:
    from deep_comm.buffer import Buffer


@dataclass(eq=False)
class Prefilled:
    """What combine needs of a prefill batch."""

    handle: Handle
    groups: Groups
    weights: Tensor  # float32 [N, K]


@dataclass(eq=False)
class Decoded:
    """What combine needs of a decode batch."""

    handle: LowLatencyHandle
    topk_idx: Tensor


@dataclass(eq=False)
class Sent:
    """Received rows of a prefill exchange, before they are grouped."""

    x: Tensor  # [N, H]
    scales: Tensor | None
    topk_idx: Tensor  # [N, K]
    weights: Tensor  # float32 [N, K]
    counts: list[int]  # [] with bounded counts
    handle: Handle
    event: EventOverlap


class Transport:
    """Of one layer on one rank."""

    def __init__(
        self, buffer: Buffer, shape: MoEShape, expert_alignment: int, max_recv_tokens: int
    ) -> None:
        self.buffer = buffer
        self.shape = shape
        self.alignment = expert_alignment
        self.max_recv_tokens = max_recv_tokens
        rank, num_ranks = buffer.rank, buffer.group_size
        self.num_local = num_local_experts(rank, shape.num_experts, num_ranks)
        self.first_expert = first_expert(rank, shape.num_experts, num_ranks)
        self.capacity = num_ranks * shape.num_slots
        self._decode_offsets = (
            torch.arange(self.num_local + 1, dtype=torch.int32) * self.capacity
        ).to(buffer.device)

    # ---- prefill -------------------------------------------------------------------------------

    def send(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        *,
        is_bounded: bool,
        is_async: bool = False,
    ) -> Sent:
        payload = quantise(x) if self.shape.fp8 else x
        recv, recv_idx, recv_weights, counts, handle, event = self.buffer.dispatch(
            payload,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_experts=self.shape.num_experts,
            num_worst_tokens=self.max_recv_tokens if is_bounded else 0,
            async_finish=is_async,
        )
        recv_x, scales = recv if isinstance(recv, tuple) else (recv, None)
        assert recv_idx is not None and recv_weights is not None
        assert handle is not None and counts is not None
        return Sent(recv_x, scales, recv_idx, recv_weights, counts, handle, event)

    def group(self, sent: Sent) -> tuple[Groups, bool]:
        """Groups, and whether any row is padding."""
        is_bounded = sent.handle.num_recv_tokens is None
        if is_bounded:
            num_rows = sent.topk_idx.numel() + self.num_local * (self.alignment - 1)
        else:
            num_rows = num_grouped_rows(sent.counts, self.alignment)
        groups = group(sent.topk_idx, self.num_local, self.alignment, num_rows)
        return groups, is_bounded or self.alignment > 1

    def prefill_batch(
        self, sent: Sent, groups: Groups, is_padded: bool, x: Tensor, weights: Tensor
    ) -> ExpertBatch:
        scales = None if sent.scales is None else groups.gather(sent.scales, is_padded)
        return ExpertBatch(
            x=x,
            scales=scales,
            num_tokens_per_expert=groups.num_tokens_per_expert,
            offsets=groups.offsets,
            counts=None if sent.handle.num_recv_tokens is None else sent.counts,
            capacity=None,
            mode="prefill",
            first_expert=self.first_expert,
            alignment=self.alignment,
            state=Prefilled(sent.handle, groups, weights),
        )

    def sum_of_ranks(self, sums: Tensor, handle: Handle, is_async: bool) -> tuple[Tensor, EventOverlap]:
        combined, _, event = self.buffer.combine(sums, handle, async_finish=is_async)
        return combined, event

    # Gradients: of dispatch, combine; of combine, dispatch along the same routing.

    def combine_grads(
        self, grad_rows: Tensor, grad_weights: Tensor, handle: Handle
    ) -> tuple[Tensor, Tensor]:
        grad_x, grad_topk_weights, _ = self.buffer.combine(
            grad_rows.contiguous(), handle, topk_weights=grad_weights.contiguous()
        )
        assert grad_topk_weights is not None
        return grad_x, grad_topk_weights

    def dispatch_grads(self, grad: Tensor, handle: Handle) -> Tensor:
        recv = self.buffer.dispatch(grad.contiguous(), handle=handle)[0]
        assert isinstance(recv, Tensor)
        return recv

    # ---- decode --------------------------------------------------------------------------------

    def decode(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        *,
        is_asking: bool,
        is_async: bool = False,
    ) -> tuple[ExpertBatch, Callable[[], None] | None]:
        shape = self.shape
        payload, counts, handle, _, hook = self.buffer.low_latency_dispatch(
            x,
            topk_idx,
            shape.num_slots,
            shape.num_experts,
            use_fp8=shape.fp8,
            return_recv_hook=is_async,
            topk_weights=topk_weights,
            report_num_tokens=is_asking,
        )
        scales = None
        if isinstance(payload, tuple):
            payload, scales = payload
            scales = scales.reshape(-1, scales.shape[-1])
        batch = ExpertBatch(
            payload.view(-1, shape.hidden),
            scales,
            counts,
            self._decode_offsets,
            None,
            self.capacity,
            "decode",
            self.first_expert,
            1,
            Decoded(handle, topk_idx),
        )
        return batch, hook

    def decode_combine(
        self, rows: Tensor, state: Decoded, is_async: bool
    ) -> tuple[Tensor, Callable[[], None] | None]:
        combined, _, hook = self.buffer.low_latency_combine(
            rows.view(self.num_local, self.capacity, self.shape.hidden),
            state.topk_idx,
            None,
            state.handle,
            return_recv_hook=is_async,
        )
        return combined, hook
