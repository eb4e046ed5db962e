"""Prefill exchanges: rows to their experts, grouped, and back, summed;
and the gradients of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from deep_comm.errors import CapacityError
from deep_comm.events import EventOverlap
from deep_comm.handle import Handle
from deep_comm.layer.grouping import Groups, group
from deep_comm.layer.shape import MoEShape
from deep_comm.reference_low_latency import quantise
from deep_comm.topology import num_local_experts

if TYPE_CHECKING:
    from deep_comm.buffer import Buffer


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
    num_tokens_per_expert: Tensor | None = None  # int32 [L]
    offsets: Tensor | None = None  # int32 [L + 1]
    topk_idx: Tensor | None = None  # before rows have been grouped: [N, K]


class Prefill(Protocol):
    def send(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *, is_bounded: bool, is_async: bool
    ) -> Sent: ...

    def begin(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Callable[[], Sent]:
        """``send`` with is_async and exact counts, which the host need not have waited for when
        this returns; the function does.
        """

    def receive(self, sent: Sent) -> None:
        """Behind the event of ``sent``."""

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
    """Inside a node the engine groups and adds; between nodes it moves rows as they are."""
    if buffer._context.topology.num_nodes > 1:
        return GroupedPrefill(buffer, shape, alignment, max_recv_rows)
    return ExpandedPrefill(buffer, shape, alignment, max_recv_rows)


class ExpandedPrefill:
    """Rows arrive grouped, and combine weighs and adds them."""

    def __init__(self, buffer: Buffer, shape: MoEShape, alignment: int, max_recv_rows: int) -> None:
        self._buffer = buffer
        self._shape = shape
        self._alignment = alignment
        self._max_recv_rows = max_recv_rows

    def send(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *, is_bounded: bool, is_async: bool
    ) -> Sent:
        shape = self._shape
        recv, _, weights, counts, handle, event = self._buffer.dispatch(
            quantise(x) if shape.fp8 else x,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_experts=shape.num_experts,
            expert_alignment=self._alignment,
            num_worst_tokens=self._max_recv_rows if is_bounded else 0,
            async_finish=is_async,
            expand=True,
            zero_padding=is_bounded or self._alignment > 1,
        )
        return self._sent(recv, weights, counts, handle, event, is_bounded)

    def begin(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Callable[[], Sent]:
        shape = self._shape
        pending = self._buffer._begin_expanded_dispatch(
            quantise(x) if shape.fp8 else x,
            topk_idx,
            topk_weights,
            num_experts=shape.num_experts,
            expert_alignment=self._alignment,
            zero_padding=self._alignment > 1,
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
        assert weights is not None and isinstance(handle, Handle) and counts is not None
        expansion = handle.expansion
        assert expansion is not None
        return Sent(
            rows, scales, weights, counts, handle, event, is_bounded, handle.max_num_tokens,
            expansion.expert_counts, expansion.expert_offsets,
        )  # fmt: skip

    def receive(self, sent: Sent) -> None:
        pass

    def combine(
        self, rows: Tensor, weights: Tensor, handle: Handle, is_async: bool
    ) -> tuple[Tensor, EventOverlap]:
        combined, _, event = self._buffer.combine(
            rows, handle, topk_weights=weights, apply_weights=True, async_finish=is_async
        )
        return combined, event

    def dispatch_grads(
        self, grad_rows: Tensor, grad_weights: Tensor, handle: Handle
    ) -> tuple[Tensor, Tensor]:
        grad_x, grad_topk_weights, _ = self._buffer.combine(
            grad_rows.contiguous(), handle, topk_weights=grad_weights.contiguous()
        )
        assert grad_topk_weights is not None
        return grad_x, grad_topk_weights

    def combine_grads(
        self, grad: Tensor, rows: Tensor, weights: Tensor, handle: Handle
    ) -> tuple[Tensor, Tensor]:
        recv = self._buffer.dispatch(grad.contiguous(), handle=handle, zero_padding=True)[0]
        assert isinstance(recv, Tensor)
        wide = recv.float()
        return (wide * weights.unsqueeze(1)).to(grad.dtype), (rows.float() * wide).sum(dim=1)


@dataclass(eq=False)
class GroupedHandle:
    handle: Any
    groups: Groups


class GroupedPrefill:
    """Rows arrive by source; this rank groups them, and adds a token's rows before they return."""

    def __init__(self, buffer: Buffer, shape: MoEShape, alignment: int, max_recv_rows: int) -> None:
        self._buffer = buffer
        self._shape = shape
        self._alignment = alignment
        self._max_recv_rows = max_recv_rows
        self._num_local = num_local_experts(buffer.rank, shape.num_experts, buffer.group_size)

    def send(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *, is_bounded: bool, is_async: bool
    ) -> Sent:
        buffer, shape = self._buffer, self._shape
        recv, recv_idx, weights, counts, handle, event = buffer.dispatch(
            quantise(x) if shape.fp8 else x,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_experts=shape.num_experts,
            expert_alignment=self._alignment,
            num_worst_tokens=buffer.group_size * shape.max_tokens if is_bounded else 0,
            async_finish=is_async,
        )
        rows, scales = recv if isinstance(recv, tuple) else (recv, None)
        assert weights is not None and handle is not None and counts is not None
        return Sent(
            rows, scales, weights, counts, handle, event, is_bounded,
            getattr(handle, "max_num_tokens", None), topk_idx=recv_idx,
        )  # fmt: skip

    def begin(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Callable[[], Sent]:
        # Between nodes the host waits at once.
        sent = self.send(x, topk_idx, topk_weights, is_bounded=False, is_async=True)
        return lambda: sent

    def receive(self, sent: Sent) -> None:
        assert sent.topk_idx is not None
        num_rows = self._max_recv_rows if sent.is_bounded else sum(sent.counts)
        groups = group(sent.topk_idx, self._num_local, self._alignment, num_rows)
        if sent.is_bounded:
            self._check_capacity(groups, num_rows)
        is_padded = sent.is_bounded or self._alignment > 1
        sent.x = groups.gather(sent.x, is_padded)
        if sent.scales is not None:
            sent.scales = groups.gather(sent.scales, is_padded)
        sent.weights = groups.of_rows(sent.weights)
        sent.handle = GroupedHandle(sent.handle, groups)
        sent.num_tokens_per_expert, sent.offsets = groups.num_tokens_per_expert, groups.offsets
        sent.topk_idx = None

    def _check_capacity(self, groups: Groups, num_rows: int) -> None:
        needed = groups.offsets[-1]
        if needed.device.type == "cpu":
            if int(needed) > num_rows:
                raise CapacityError(self._buffer.rank, int(needed), num_rows)
        else:
            torch._assert_async(needed <= num_rows, "more rows than max_recv_rows have come")

    def combine(
        self, rows: Tensor, weights: Tensor, handle: GroupedHandle, is_async: bool
    ) -> tuple[Tensor, EventOverlap]:
        groups = handle.groups
        sums = groups.sum_rows(rows, groups.of_selections(weights))
        combined, _, event = self._buffer.combine(sums, handle.handle, async_finish=is_async)
        return combined, event

    def dispatch_grads(
        self, grad_rows: Tensor, grad_weights: Tensor, handle: GroupedHandle
    ) -> tuple[Tensor, Tensor]:
        groups = handle.groups
        sums = groups.sum_rows(grad_rows.contiguous(), None)
        grad_x, grad_topk_weights, _ = self._buffer.combine(
            sums, handle.handle, topk_weights=groups.of_selections(grad_weights)
        )
        assert grad_topk_weights is not None
        return grad_x, grad_topk_weights

    def combine_grads(
        self, grad: Tensor, rows: Tensor, weights: Tensor, handle: GroupedHandle
    ) -> tuple[Tensor, Tensor]:
        recv = self._buffer.dispatch(grad.contiguous(), handle=handle.handle)[0]
        assert isinstance(recv, Tensor)
        wide = handle.groups.gather(recv, True).float()
        return (wide * weights.unsqueeze(1)).to(grad.dtype), (rows.float() * wide).sum(dim=1)
