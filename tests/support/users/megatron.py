"""The calls of Megatron-LM's flex dispatcher with the deepep backend."""

from __future__ import annotations

from typing import Any

import drop_in
import torch
from drop_in import NUM_EXPERTS

from deep_ep import Buffer  # type: ignore[import-not-found]  # isort: skip
from deep_ep.utils import EventHandle, EventOverlap  # type: ignore[import-not-found]  # isort: skip

_buffer: dict[int, Any] = {}  # by rank: ranks may be threads


def get_buffer(group: Any, hidden_bytes: int) -> Any:
    num_nvl_bytes, num_rdma_bytes = 0, 0
    for config in (
        Buffer.get_dispatch_config(group.size()), Buffer.get_combine_config(group.size())
    ):  # fmt: skip
        num_nvl_bytes = max(
            config.get_nvl_buffer_size_hint(hidden_bytes, group.size()), num_nvl_bytes
        )
        num_rdma_bytes = max(
            config.get_rdma_buffer_size_hint(hidden_bytes, group.size()), num_rdma_bytes
        )
    known = _buffer.get(group.rank())
    if (
        known is None
        or known.group != group
        or known.num_nvl_bytes < num_nvl_bytes
        or known.num_rdma_bytes < num_rdma_bytes
    ):
        _buffer[group.rank()] = Buffer(group, num_nvl_bytes, num_rdma_bytes)
    return _buffer[group.rank()]


class FusedDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token_indices, token_probs, group, async_finish):
        previous_event = EventOverlap(EventHandle()) if async_finish else None
        buffer = get_buffer(group, x.shape[1] * max(x.element_size(), 2))
        per_rank, per_rdma_rank, per_expert, mask, event = buffer.get_dispatch_layout(
            token_indices, NUM_EXPERTS, previous_event=previous_event,
            async_finish=async_finish, allocate_on_comm_stream=async_finish,
        )  # fmt: skip
        # Without async_finish the layout's event holds nothing and is passed on all the same.
        recv_x, recv_ids, recv_probs, counts, handle, event = buffer.dispatch(
            x, topk_idx=token_indices, topk_weights=token_probs, num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank, is_token_in_rank=mask,
            num_tokens_per_expert=per_expert, previous_event=event, async_finish=async_finish,
            allocate_on_comm_stream=async_finish,
        )  # fmt: skip
        if async_finish:
            event.current_stream_wait()
        ctx.group, ctx.handle, ctx.async_finish = group, handle, async_finish
        return recv_x, recv_ids, recv_probs, torch.tensor(counts), handle

    @staticmethod
    def backward(ctx, grad_x, grad_ids, grad_probs, grad_counts, grad_handle):
        buffer = get_buffer(ctx.group, grad_x.shape[1] * max(grad_x.element_size(), 2))
        previous_event = EventOverlap(EventHandle()) if ctx.async_finish else None
        grad_x, grad_probs, event = buffer.combine(
            grad_x.contiguous(), ctx.handle, topk_weights=grad_probs.float(),
            previous_event=previous_event, async_finish=ctx.async_finish,
            allocate_on_comm_stream=ctx.async_finish,
        )  # fmt: skip
        if ctx.async_finish:
            event.current_stream_wait()
        return grad_x, None, grad_probs, None, None


class FusedCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, handle, async_finish):
        previous_event = EventOverlap(EventHandle()) if async_finish else None
        buffer = get_buffer(group, x.shape[1] * max(x.element_size(), 2))
        combined_x, _, event = buffer.combine(
            x, handle=handle, async_finish=async_finish, previous_event=previous_event,
            allocate_on_comm_stream=async_finish,
        )  # fmt: skip
        if async_finish:
            event.current_stream_wait()
        ctx.handle, ctx.group, ctx.async_finish = handle, group, async_finish
        return combined_x

    @staticmethod
    def backward(ctx, grad):
        previous_event = EventOverlap(EventHandle()) if ctx.async_finish else None
        buffer = get_buffer(ctx.group, grad.shape[1] * max(grad.element_size(), 2))
        grad_x, _, _, _, _, event = buffer.dispatch(
            grad.contiguous(), handle=ctx.handle, previous_event=previous_event,
            async_finish=ctx.async_finish, allocate_on_comm_stream=ctx.async_finish,
        )  # fmt: skip
        if ctx.async_finish:
            event.current_stream_wait()
        return grad_x, None, None, None


def step(group: Any, async_finish: bool) -> None:
    """Forward and backward against the gradients of the same layer written densely."""
    rank, num_ranks = group.rank(), group.size()
    Buffer.set_num_sms(20)
    x, ids, probs = drop_in.routed(rank, drop_in.num_tokens_of(rank), routing="holes")
    x.requires_grad_()
    probs.requires_grad_()
    recv_x, recv_ids, recv_probs, counts, handle = FusedDispatch.apply(
        x, ids, probs, group, async_finish
    )
    first = drop_in.first_of(rank, num_ranks)
    scale = torch.where(recv_ids >= 0, (recv_ids + first + 1) * recv_probs, 0.0)
    rows = (recv_x.float() * scale.sum(dim=1, keepdim=True)).to(torch.bfloat16)
    out = FusedCombine.apply(rows, group, handle, async_finish)
    # Contiguous, as those of the layers above are: the copy of another gradient would be made after
    # previous_event, so that the call need not wait for it.
    out.backward(torch.ones_like(out))
    dense_x = x.detach().clone().requires_grad_()
    dense_probs = probs.detach().clone().requires_grad_()
    drop_in.dense(dense_x, ids, dense_probs).sum().backward()
    assert torch.equal(x.grad, dense_x.grad)
    assert torch.equal(probs.grad, dense_probs.grad)
    assert int(counts.sum()) == int((recv_ids >= 0).sum())
    buffer = get_buffer(group, x.shape[1] * 2)
    assert buffer is get_buffer(group, x.shape[1] * 2)
    # A layer with longer rows gets a larger buffer in its place, which serves the others too.
    sizes = buffer.num_nvl_bytes, buffer.num_rdma_bytes
    del buffer
    drop_in.barrier(group)
    larger = get_buffer(group, 2 * 7168)
    assert larger.num_nvl_bytes > sizes[0] and larger.num_rdma_bytes >= sizes[1]
    assert larger is get_buffer(group, x.shape[1] * 2)
    del larger
    drop_in.barrier(group)
    del _buffer[rank]


def recorded(group: Any, async_finish: bool) -> None:
    """NeMo Automodel: layers run again under activation checkpointing take the handles that their
    first run has kept, in the same order, and exchange no layout."""
    rank, num_ranks = group.rank(), group.size()
    assert type(Buffer.is_sm90_compiled()) is bool
    layers = [
        drop_in.routed(rank, drop_in.num_tokens_of((rank + layer) % num_ranks), routing="holes",
                       seed=layer)
        for layer in range(3)
    ]  # fmt: skip
    kept = []
    for x, ids, probs in layers:
        recv_x, recv_ids, recv_probs, _, handle = FusedDispatch.apply(
            x, ids, probs, group, async_finish
        )
        kept.append((recv_x, recv_ids, recv_probs, handle))
    buffer = get_buffer(group, layers[0][0].shape[1] * 2)
    for (x, ids, probs), (first_recv_x, recv_ids, recv_probs, handle) in zip(
        layers, kept, strict=True
    ):
        previous_event = EventOverlap(EventHandle()) if async_finish else None
        recv_x, *rest, event = buffer.dispatch(
            x, handle=handle, previous_event=previous_event, async_finish=async_finish,
            allocate_on_comm_stream=async_finish,
        )  # fmt: skip
        if async_finish:
            event.current_stream_wait()
        assert rest == [None] * 4 and torch.equal(recv_x, first_recv_x)
        first = drop_in.first_of(rank, num_ranks)
        rows = drop_in.local_experts(recv_x, recv_ids, recv_probs, first)
        out = FusedCombine.apply(rows, group, handle, async_finish)
        assert torch.equal(out.float(), drop_in.dense(x, ids, probs))
    drop_in.barrier(group)
    _buffer.pop(rank).destroy()
    drop_in.barrier(group)
