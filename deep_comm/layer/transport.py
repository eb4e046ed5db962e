"""Batches over the calls of a Buffer: decode here, prefill in prefill.py; no rule, no autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deep_comm._core import Decoded
from deep_comm.handle import LowLatencyHandle
from deep_comm.layer.batch import ExpertBatch
from deep_comm.layer.decode import NEVER, decode_calls
from deep_comm.layer.host_words import HostWords
from deep_comm.layer.mode import ModeRule
from deep_comm.layer.prefill import prefill_of
from deep_comm.layer.shape import MoEShape
from deep_comm.ranks.topology import first_expert, num_local_experts

if TYPE_CHECKING:
    from deep_comm.buffer import Buffer


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
        self.capacity = num_ranks * self._num_slots
        firsts = torch.arange(self.num_local + 1, dtype=torch.int32, device=buffer.device)
        # Alike in all decode batches.
        self._decoded: dict[str, Any] = dict(
            scales=None,
            offsets=firsts * self.capacity,
            counts=None,
            capacity=self.capacity,
            mode="decode",
            first_expert=self.first_expert,
            alignment=1,
        )
        self.words: HostWords | None = None
        self.quick = NEVER

    def enable_decode(self, words: HostWords | None, rule: ModeRule) -> None:
        """``words``: that tell the ranks of this host how many tokens there are in an exchange."""
        self.words = words
        self.quick = decode_calls(self.buffer, self.shape, self._decoded, words, rule)

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
        if not is_async:
            made = self.quick.begin(x, topk_idx, topk_weights, is_asking)
            if made is not None:
                return made, None
        payload, counts, handle, _, hook = self.buffer.low_latency_dispatch(
            x,
            topk_idx,
            self._num_slots,
            shape.num_experts,
            use_fp8=shape.fp8,
            return_recv_hook=is_async,
            topk_weights=topk_weights,
            report_num_tokens=is_asking and self.words is None,
        )
        # Peers may act on it at once: what raises before this is no exchange.
        exchange = 0
        if is_asking and self.words is not None:
            exchange = self.words.tell(x.shape[0])
        by_column = None
        if isinstance(payload, tuple):
            payload, by_column = payload
        held = dict(
            self._decoded,
            x=payload.view(-1, shape.hidden),
            num_tokens_per_expert=counts,
            state=Decoded(handle, topk_idx, exchange),
        )
        if by_column is None:
            return ExpertBatch.of(held), hook

        def turn_scales() -> None:
            """A copy, mostly: of what has been received."""
            if hook is not None:
                hook()
            held["scales"] = by_column.reshape(-1, by_column.shape[-1])

        if hook is None:
            turn_scales()
            return ExpertBatch.of(held), None
        return ExpertBatch.of(held), turn_scales

    def decode_combine(
        self, rows: Tensor, state: Decoded, is_async: bool
    ) -> tuple[Tensor, Callable[[], None] | None]:
        combined, _, hook = self.buffer.low_latency_combine(
            rows.view(self.num_local, self.capacity, self.shape.hidden),
            state.topk_idx,
            None,
            LowLatencyHandle(state.record),
            return_recv_hook=is_async,
        )
        return combined, hook
