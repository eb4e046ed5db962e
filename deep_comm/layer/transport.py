"""Batches over the calls of a Buffer: decode here, prefill in prefill.py; no rule, no autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deep_comm.layer.batch import ExpertBatch
from deep_comm.layer.prefill import Sent, prefill_of
from deep_comm.layer.shape import MoEShape
from deep_comm.low_latency_handle import LowLatencyHandle
from deep_comm.topology import first_expert, num_local_experts

if TYPE_CHECKING:
    from deep_comm.buffer import Buffer


@dataclass(eq=False)
class Prefilled:
    """What combine needs of a prefill batch."""

    handle: Any  # of the way of prefill
    weights: Tensor  # float32 [S], of each row


@dataclass(eq=False)
class Decoded:
    """What combine needs of a decode batch."""

    handle: LowLatencyHandle
    topk_idx: Tensor


class Transport:
    """Of one layer on one rank."""

    def __init__(
        self, buffer: Buffer, shape: MoEShape, expert_alignment: int, max_recv_rows: int
    ) -> None:
        self.buffer = buffer
        self.shape = shape
        self.alignment = expert_alignment
        self.prefill = prefill_of(buffer, shape, expert_alignment, max_recv_rows)
        rank, num_ranks = buffer.rank, buffer.group_size
        self.num_local = num_local_experts(rank, shape.num_experts, num_ranks)
        self.first_expert = first_expert(rank, shape.num_experts, num_ranks)
        self._num_slots = shape.num_slots
        self.num_decodes = 0  # exchanges that were launched; alike on all ranks
        self.capacity = num_ranks * self._num_slots
        self._decode_offsets = (
            torch.arange(self.num_local + 1, dtype=torch.int32) * self.capacity
        ).to(buffer.device)

    def prefill_batch(self, sent: Sent, rows: Tensor, weights: Tensor) -> ExpertBatch:
        """``rows``, ``weights``: of ``sent``, or what autograd knows them by."""
        assert sent.num_tokens_per_expert is not None and sent.offsets is not None
        return ExpertBatch(
            rows,
            sent.scales,
            sent.num_tokens_per_expert,
            sent.offsets,
            None if sent.is_bounded else sent.counts,
            None,
            "prefill",
            self.first_expert,
            self.alignment,
            Prefilled(sent.handle, weights),
        )

    # ---- decode --------------------------------------------------------------------------------

    def decode(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        is_async: bool,
        is_asking: bool,
    ) -> tuple[ExpertBatch, Callable[[], None] | None]:
        shape = self.shape
        payload, counts, handle, _, hook = self.buffer.low_latency_dispatch(
            x,
            topk_idx,
            self._num_slots,
            shape.num_experts,
            use_fp8=shape.fp8,
            return_recv_hook=is_async,
            topk_weights=topk_weights,
            report_num_tokens=is_asking,
        )
        self.num_decodes += 1
        scales = None
        if isinstance(payload, tuple):
            payload, scales = payload
            scales = scales.reshape(-1, scales.shape[-1])
        batch = ExpertBatch.of(
            x=payload.view(-1, shape.hidden),
            scales=scales,
            num_tokens_per_expert=counts,
            offsets=self._decode_offsets,
            counts=None,
            capacity=self.capacity,
            mode="decode",
            first_expert=self.first_expert,
            alignment=1,
            state=Decoded(handle, topk_idx),
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
