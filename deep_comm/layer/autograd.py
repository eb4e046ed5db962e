"""Gradients of the four steps of a prefill batch: send, gather, sum, return.

    x, weights → [dispatch] → received rows → [gather] → grouped rows → experts
    sums of ranks ← [combine] ← sums of a rank ← [sum over selections, weighted] ← grouped rows

Backward of dispatch is combine, of combine the cached dispatch along the same routing. Where forward
rounds a sum once, backward rounds its sum once.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from deep_comm.events import EventOverlap
from deep_comm.handle import Handle
from deep_comm.layer.grouping import Groups
from deep_comm.layer.transport import Sent, Transport


class Dispatch(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_idx: Tensor,
        transport: Transport,
        is_bounded: bool,
        is_async: bool,
        out: list[Sent],
    ) -> tuple[Tensor, Tensor]:
        sent = transport.send(x, topk_idx, topk_weights, is_bounded=is_bounded, is_async=is_async)
        out.append(sent)
        ctx.transport, ctx.handle = transport, sent.handle
        return sent.x, sent.weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor, grad_weights: Tensor) -> tuple[Any, ...]:
        grads = ctx.transport.combine_grads(grad_x, grad_weights, ctx.handle)
        return (*grads, None, None, None, None, None)


class Gather(Function):
    @staticmethod
    def forward(ctx: Any, received: Tensor, groups: Groups, is_padded: bool) -> Tensor:
        ctx.groups = groups
        return groups.gather(received, is_padded)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.groups.sum_rows(grad, None), None, None


class Sum(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, groups: Groups) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.groups = groups
        return groups.sum_rows(rows, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, weights = ctx.saved_tensors
        grad_rows = ctx.groups.spread_rows(grad, weights) if ctx.needs_input_grad[0] else None
        grad_weights = ctx.groups.dot_rows(rows, grad) if ctx.needs_input_grad[1] else None
        return grad_rows, grad_weights, None


class Combine(Function):
    @staticmethod
    def forward(
        ctx: Any,
        sums: Tensor,
        handle: Handle,
        transport: Transport,
        is_async: bool,
        out: list[EventOverlap],
    ) -> Tensor:
        combined, event = transport.sum_of_ranks(sums, handle, is_async)
        out.append(event)
        ctx.transport, ctx.handle = transport, handle
        return combined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.transport.dispatch_grads(grad, ctx.handle), None, None, None, None
