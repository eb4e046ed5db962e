"""Gradients of a prefill batch: backward of dispatch is combine, of combine dispatch along the
same routing.

Where forward rounds a sum once, backward rounds its sum once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from deep_comm.layer.batch import ExpertBatch

if TYPE_CHECKING:
    from deep_comm._core import Prefilled
    from deep_comm.buffer import Buffer


def dispatched(
    buffer: Buffer, x: Tensor, topk_weights: Tensor, receive: Callable[[], ExpertBatch]
) -> ExpertBatch:
    """A batch whose rows and weights have gradients.

    ``receive``: of an exchange of these two that has been sent, or sends it now.
    """
    received: list[ExpertBatch] = []
    rows, weights = Dispatch.apply(  # type: ignore[no-untyped-call]
        x, topk_weights, buffer, receive, received
    )
    batch = received[0]
    vars(batch).update(x=rows, state=batch.state.weighed_by(weights))  # nobody has seen it yet
    return batch


def combine(buffer: Buffer, rows: Tensor, state: Prefilled, send: Callable[[], Tensor]) -> Tensor:
    """``send()``, whose sums have gradients of the rows and of their weights."""
    combined: Tensor = Combine.apply(  # type: ignore[no-untyped-call]
        rows, state.weights, buffer, state.handle, send
    )
    return combined


class Dispatch(Function):
    """x, topk_weights to the rows of experts and their weights."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_weights: Tensor,
        buffer: Buffer,
        receive: Callable[[], ExpertBatch],
        received: list[ExpertBatch],
    ) -> tuple[Tensor, Tensor]:
        batch = receive()
        received.append(batch)
        # Not the state: it holds the weights that are returned here.
        ctx.buffer, ctx.handle = buffer, batch.state.handle
        return batch.x, batch.state.weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor) -> tuple[Any, ...]:
        grads = dispatch_grads(ctx.buffer, grad_rows, grad_weights, ctx.handle)
        return (*grads, None, None, None)


class Combine(Function):
    """Rows and their weights to sums."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor,
        buffer: Buffer,
        handle: Any,
        send: Callable[[], Tensor],
    ) -> Tensor:
        combined = send()
        ctx.save_for_backward(rows, weights)
        ctx.buffer, ctx.handle = buffer, handle
        return combined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, weights = ctx.saved_tensors
        grads = combine_grads(ctx.buffer, grad, rows, weights, ctx.handle)
        return (*grads, None, None, None)


def dispatch_grads(
    buffer: Buffer, grad_rows: Tensor, grad_weights: Tensor, handle: Any
) -> tuple[Tensor, Tensor]:
    """Of x and of topk_weights: combine, along the routing of ``handle``."""
    grad_x, grad_topk_weights, _ = buffer.combine(
        grad_rows.contiguous(), handle, topk_weights=grad_weights.contiguous()
    )
    assert grad_topk_weights is not None
    return grad_x, grad_topk_weights


def combine_grads(
    buffer: Buffer, grad: Tensor, rows: Tensor, weights: Tensor, handle: Any
) -> tuple[Tensor, Tensor]:
    """Of the rows and of their weights: dispatch, along the same routing. Of rows of no token,
    zeros and anything."""
    recv = buffer.dispatch(grad.contiguous(), handle=handle, zero_padding=True)[0]
    assert isinstance(recv, Tensor)
    wide = recv.float()
    return (wide * weights.unsqueeze(1)).to(grad.dtype), (rows.float() * wide).sum(dim=1)
