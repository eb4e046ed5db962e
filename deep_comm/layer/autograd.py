"""Gradients of a prefill batch: backward of dispatch is combine, of combine dispatch along the
same routing.

Where forward rounds a sum once, backward rounds its sum once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from deep_comm.events import EventOverlap
from deep_comm.layer.prefill import Prefill, Sent


class Dispatch(Function):
    """x, topk_weights to the rows of experts and their weights."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_weights: Tensor,
        prefill: Prefill,
        receive: Callable[[], Sent],
        out: list[Sent],
    ) -> tuple[Tensor, Tensor]:
        """``receive``: of an exchange of these two that has been sent, or sends it now."""
        sent = receive()
        out.append(sent)
        ctx.prefill, ctx.handle = prefill, sent.handle
        return sent.x, sent.weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor) -> tuple[Any, ...]:
        grads = ctx.prefill.dispatch_grads(grad_rows, grad_weights, ctx.handle)
        return (*grads, None, None, None)


class Combine(Function):
    """Rows and their weights to sums."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor,
        handle: Any,
        prefill: Prefill,
        is_async: bool,
        out: list[EventOverlap],
    ) -> Tensor:
        combined, event = prefill.combine(rows, weights, handle, is_async)
        out.append(event)
        ctx.save_for_backward(rows, weights)
        ctx.prefill, ctx.handle = prefill, handle
        return combined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grads = ctx.prefill.combine_grads(grad, *ctx.saved_tensors, ctx.handle)
        return (*grads, None, None, None, None)
