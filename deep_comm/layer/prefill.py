"""Prefill exchanges: rows to their experts, grouped, and back, summed;
and the gradients of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from deep_comm.events import EventOverlap
from deep_comm.layer.batch import ExpertBatch
from deep_comm.layer.shape import MoEShape
from deep_comm.ranks.topology import first_expert

if TYPE_CHECKING:
    from deep_comm.buffer import Buffer


class Prefilled(NamedTuple):
    """What combine needs of a prefill batch."""

    handle: Any
    weights: Tensor  # float32 [S], of each row


@dataclass(eq=False)
class Sent:
    """An exchange that has been sent. Complete when it has been received."""

    x: Tensor  # [S, H]
    scales: Tensor | None
    weights: Tensor  # float32 [S]
    counts: list[int]  # rows of groups with their padding; [] with bounded counts
    handle: Any
    event: EventOverlap
    is_bounded: bool
    max_num_tokens: int | None  # of all ranks; None: the host has not waited


class Prefill(Protocol):
    def batch(self, sent: Sent, rows: Tensor, weights: Tensor) -> ExpertBatch:
        """``rows``, ``weights``: of ``sent``, or what autograd knows them by."""

    def send(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *, is_bounded: bool, is_async: bool
    ) -> Sent: ...

    def begin(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Callable[[], Sent]:
        """``send`` with is_async and exact counts, which the host need not have waited for when
        this returns; the function does.
        """

    def combine(
        self, rows: Tensor, weights: Tensor, handle: Any, is_async: bool
    ) -> tuple[Tensor, EventOverlap]: ...

    def dispatch_grads(
        self, grad_rows: Tensor, grad_weights: Tensor, handle: Any
    ) -> tuple[Tensor, Tensor]:
        """Of x and of topk_weights: combine, along the routing of ``handle``."""

    def combine_grads(
        self, grad: Tensor, rows: Tensor, weights: Tensor, handle: Any
    ) -> tuple[Tensor, Tensor]:
        """Of the rows and of their weights: dispatch, along the same routing. Of rows of no token,
        zeros and anything."""


def prefill_of(buffer: Buffer, shape: MoEShape, alignment: int, max_recv_rows: int) -> Prefill:
    """The engine groups and adds, inside a node and between nodes."""
    buffer._context.native_calls.agree_on_tokens(shape.max_tokens)
    return ExpandedPrefill(buffer, shape, alignment, max_recv_rows)


class ExpandedPrefill:
    """Rows arrive grouped, and combine weighs and adds them."""

    def __init__(self, buffer: Buffer, shape: MoEShape, alignment: int, max_recv_rows: int) -> None:
        self._buffer = buffer
        self._shape = shape
        self._alignment = alignment
        self._max_recv_rows = max_recv_rows
        self._alike: dict[str, Any] = dict(
            capacity=None,
            mode="prefill",
            first_expert=first_expert(buffer.rank, shape.num_experts, buffer.group_size),
            alignment=alignment,
        )

    def batch(self, sent: Sent, rows: Tensor, weights: Tensor) -> ExpertBatch:
        counts = None if sent.is_bounded else sent.counts
        return self._batch(rows, sent.scales, weights, counts, sent.handle)

    def _batch(
        self,
        rows: Tensor,
        scales: Tensor | None,
        weights: Tensor,
        counts: list[int] | None,
        handle: Any,
    ) -> ExpertBatch:
        expansion = handle.expansion
        held = self._alike.copy()
        held["x"] = rows
        held["scales"] = scales
        held["num_tokens_per_expert"] = expansion.expert_counts
        held["offsets"] = expansion.expert_offsets
        held["counts"] = counts
        held["state"] = Prefilled(handle, weights)
        return ExpertBatch.of(held)

    def send(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *, is_bounded: bool, is_async: bool
    ) -> Sent:
        shape = self._shape
        recv, _, weights, counts, handle, event = self._buffer.dispatch(
            x,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_experts=shape.num_experts,
            expert_alignment=self._alignment,
            num_worst_tokens=self._max_recv_rows if is_bounded else 0,
            async_finish=is_async,
            expand=True,
            zero_padding=is_bounded or self._alignment > 1,
            use_fp8=shape.fp8,
        )
        return self._sent(recv, weights, counts, handle, event, is_bounded)

    def begin(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Callable[[], Sent]:
        shape = self._shape
        pending = self._buffer._begin_expanded_dispatch(
            x,
            topk_idx,
            topk_weights,
            num_experts=shape.num_experts,
            expert_alignment=self._alignment,
            zero_padding=self._alignment > 1,
            use_fp8=shape.fp8,
        )

        def finish() -> Sent:
            recv, _, weights, counts, handle, event = pending.result()
            return self._sent(recv, weights, counts, handle, event, False)

        return finish

    def _sent(
        self,
        recv: Tensor | tuple[Tensor, Tensor],
        weights: Tensor | None,
        counts: list[int] | None,
        handle: Any,
        event: EventOverlap,
        is_bounded: bool,
    ) -> Sent:
        rows, scales = recv if isinstance(recv, tuple) else (recv, None)
        assert weights is not None and counts is not None and handle is not None
        return Sent(rows, scales, weights, counts, handle, event, is_bounded, handle.max_num_tokens)

    def combine(
        self, rows: Tensor, weights: Tensor, handle: Any, is_async: bool
    ) -> tuple[Tensor, EventOverlap]:
        combined, _, event = self._buffer.combine(
            rows, handle, topk_weights=weights, apply_weights=True, async_finish=is_async
        )
        return combined, event

    def dispatch_grads(
        self, grad_rows: Tensor, grad_weights: Tensor, handle: Any
    ) -> tuple[Tensor, Tensor]:
        grad_x, grad_topk_weights, _ = self._buffer.combine(
            grad_rows.contiguous(), handle, topk_weights=grad_weights.contiguous()
        )
        assert grad_topk_weights is not None
        return grad_x, grad_topk_weights

    def combine_grads(
        self, grad: Tensor, rows: Tensor, weights: Tensor, handle: Any
    ) -> tuple[Tensor, Tensor]:
        recv = self._buffer.dispatch(grad.contiguous(), handle=handle, zero_padding=True)[0]
        assert isinstance(recv, Tensor)
        wide = recv.float()
        return (wide * weights.unsqueeze(1)).to(grad.dtype), (rows.float() * wide).sum(dim=1)
