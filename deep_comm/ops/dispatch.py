"""dispatch: notify the peers, learn how many rows come, allocate, move. And its cached form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deep_comm import checks
from deep_comm.backends import Launch
from deep_comm.checks import Payload
from deep_comm.config import RingPlan
from deep_comm.context import Context
from deep_comm.errors import ArgumentError, DeepCommError
from deep_comm.events import EventOverlap
from deep_comm.handle import Handle
from deep_comm.ops.call import CallOptions
from deep_comm.ops.layout import Layout, checked_layout, launch_layout
from deep_comm.topology import num_local_experts

RecvX = Tensor | tuple[Tensor, Tensor]
DispatchResult = tuple[
    RecvX, Tensor | None, Tensor | None, list[int] | None, Handle | None, EventOverlap
]


@dataclass(frozen=True)
class Routing:
    """What a dispatch sends and where, in the form the engine takes; cached or not."""

    payload: Payload
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    num_experts: int
    is_token_in_rank: Tensor
    send_head: Tensor
    rank_prefix_matrix: Tensor
    channel_prefix_matrix: Tensor

    @property
    def num_topk(self) -> int:
        return 0 if self.topk_idx is None else self.topk_idx.shape[1]


@dataclass(frozen=True)
class Received:
    """Outputs of the dispatch kernel, N rows."""

    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    src_idx: Tensor
    output_offset: int  # in the heap; 0: not in the receive region
    src_offset: int

    @property
    def payload(self) -> RecvX:
        return self.x if self.scales is None else (self.x, self.scales)


def _launch_dispatch(
    ctx: Context,
    launch: Launch,
    plan: RingPlan,
    routing: Routing,
    num_rows: int,
    *,
    fill_tail: bool,
) -> tuple[Received, Tensor]:
    """Allocate the outputs of ``num_rows`` rows and launch the kernel.

    Returns them and recv_channel_prefix_matrix.
    """
    payload = routing.payload
    idx, weights, scales = routing.topk_idx, routing.topk_weights, payload.scales
    num_topk = routing.num_topk
    out = _allocate_in_region(ctx, launch, routing, num_rows)
    if out is None:
        out = _allocate_anywhere(launch, routing, num_rows)
    channel_prefix_matrix = launch.empty((ctx.num_ranks, plan.num_channels), torch.int32)
    ctx.engine.dispatch(
        x=ctx.address(payload.x),
        row_bytes=payload.row_bytes,
        num_tokens=payload.num_tokens,
        x_scales=ctx.address(scales),
        scale_bytes=payload.scale_bytes,
        num_scales=payload.num_scales,
        scale_token_stride=0 if scales is None else scales.stride(0),
        scale_column_stride=0 if scales is None else scales.stride(1),
        topk_idx=ctx.address(idx),
        topk_idx_bytes=0 if idx is None else idx.element_size(),
        topk_weights=ctx.address(weights),
        num_topk=num_topk,
        num_experts=routing.num_experts,
        is_token_in_rank=ctx.address(routing.is_token_in_rank),
        send_head=ctx.address(routing.send_head),
        rank_prefix_matrix=ctx.address(routing.rank_prefix_matrix),
        channel_prefix_matrix=ctx.address(routing.channel_prefix_matrix),
        recv_x=ctx.address(out.x),
        recv_x_scales=ctx.address(out.scales),
        recv_topk_idx=ctx.address(out.topk_idx),
        recv_topk_weights=ctx.address(out.topk_weights),
        recv_src_idx=ctx.address(out.src_idx),
        recv_channel_prefix_matrix=ctx.address(channel_prefix_matrix),
        num_recv_rows=num_rows,
        fill_tail=fill_tail,
        output_offset=out.output_offset,
        src_offset=out.src_offset,
        num_channels=plan.num_channels,
        num_send_tokens=plan.num_send_tokens,
        num_slots=plan.num_slots,
        stream=launch.stream,
    )
    return out, channel_prefix_matrix


def _allocate_anywhere(launch: Launch, routing: Routing, num_rows: int) -> Received:
    """Ordinary tensors: the rows will come through the rings."""
    payload, num_topk = routing.payload, routing.num_topk
    idx, weights, scales = routing.topk_idx, routing.topk_weights, payload.scales
    return Received(
        x=launch.empty((num_rows, payload.x.shape[1]), payload.x.dtype),
        scales=None
        if scales is None
        else launch.empty((num_rows, payload.num_scales), scales.dtype),
        topk_idx=None if idx is None else launch.empty((num_rows, num_topk), idx.dtype),
        topk_weights=None if weights is None else launch.empty((num_rows, num_topk), weights.dtype),
        src_idx=launch.empty((num_rows,), torch.int32),
        output_offset=0,
        src_offset=0,
    )


def _allocate_in_region(
    ctx: Context, launch: Launch, routing: Routing, num_rows: int
) -> Received | None:
    """Tensors over the receive region, where peers can write the rows in place; None without room."""
    payload, num_topk = routing.payload, routing.num_topk
    idx, weights, scales = routing.topk_idx, routing.topk_weights, payload.scales
    layout = ctx.engine.output_layout(
        num_rows=num_rows,
        row_bytes=payload.row_bytes,
        scale_row_bytes=payload.num_scales * payload.scale_bytes,
        num_topk=num_topk,
        topk_idx_bytes=0 if idx is None else idx.element_size(),
    )
    output = ctx.region.allocate(layout.num_bytes)
    # The handle keeps the source tokens, and must not keep the payload's memory with them.
    sources = ctx.region.allocate(4 * num_rows)
    if output is None or sources is None:
        return None
    launch.wait(output[1])
    launch.wait(sources[1])
    block = launch.adopt(ctx.heap.view(output[0].offset, layout.num_bytes, output[0]))
    src_idx = launch.adopt(ctx.heap.view(sources[0].offset, 4 * num_rows, sources[0]))

    def part(offset: int, columns: int, dtype: torch.dtype) -> Tensor:
        num_bytes = num_rows * columns * dtype.itemsize
        return block[offset : offset + num_bytes].view(dtype).view(num_rows, columns)

    return Received(
        x=part(layout.x, payload.x.shape[1], payload.x.dtype),
        scales=None if scales is None else part(layout.scales, payload.num_scales, scales.dtype),
        topk_idx=None if idx is None else part(layout.topk_idx, num_topk, idx.dtype),
        topk_weights=None if weights is None else part(layout.topk_weights, num_topk, weights.dtype),
        src_idx=src_idx.view(torch.int32),
        output_offset=output[0].offset,
        src_offset=sources[0].offset,
    )


@dataclass(frozen=True)
class Notified:
    """Outputs of the notify kernel."""

    rank_prefix_matrix: Tensor
    channel_prefix_matrix: Tensor
    send_head: Tensor
    num_recv_tokens_per_expert: Tensor


def _launch_notify(
    ctx: Context,
    launch: Launch,
    plan: RingPlan,
    payload: Payload,
    layout: Layout,
    num_topk: int,
    expert_alignment: int,
) -> Notified:
    num_local = num_local_experts(ctx.rank, layout.num_experts, ctx.num_ranks)
    out = Notified(
        rank_prefix_matrix=launch.empty((ctx.num_ranks, ctx.num_ranks), torch.int32),
        channel_prefix_matrix=launch.empty((ctx.num_ranks, plan.num_channels), torch.int32),
        send_head=launch.empty((payload.num_tokens, ctx.num_ranks), torch.int32),
        num_recv_tokens_per_expert=launch.empty((num_local,), torch.int32),
    )
    ctx.engine.notify_dispatch(
        num_tokens_per_rank=ctx.address(layout.num_tokens_per_rank),
        num_tokens_per_expert=ctx.address(layout.num_tokens_per_expert),
        is_token_in_rank=ctx.address(layout.is_token_in_rank),
        num_tokens=payload.num_tokens,
        num_topk=num_topk,
        num_experts=layout.num_experts,
        row_bytes=payload.row_bytes,
        scale_row_bytes=payload.num_scales * payload.scale_bytes,
        expert_alignment=expert_alignment,
        num_channels=plan.num_channels,
        num_send_tokens=plan.num_send_tokens,
        num_slots=plan.num_slots,
        rank_prefix_matrix=ctx.address(out.rank_prefix_matrix),
        channel_prefix_matrix=ctx.address(out.channel_prefix_matrix),
        send_head=ctx.address(out.send_head),
        num_recv_tokens_per_expert=ctx.address(out.num_recv_tokens_per_expert),
        stream=launch.stream,
    )
    ctx.end()
    return out


def _wait_counts(ctx: Context) -> tuple[int, list[int]]:
    counts = ctx.engine.wait_counts()
    if counts is None:
        ctx.check()
        raise DeepCommError("notify_dispatch failed and left no error record")
    return counts.num_recv_tokens, list(counts.num_recv_tokens_per_expert)


def dispatch(
    ctx: Context,
    x: Any,
    *,
    num_tokens_per_rank: Any,
    is_token_in_rank: Any,
    num_tokens_per_expert: Any,
    topk_idx: Any,
    topk_weights: Any,
    num_experts: int | None,
    expert_alignment: int,
    num_worst_tokens: int,
    options: CallOptions,
) -> DispatchResult:
    ctx.begin()
    payload = checks.payload(x, ctx.device)
    idx, weights = checks.topk_pair(topk_idx, topk_weights, ctx.device, payload.num_tokens)
    for name, value, smallest in (
        ("expert_alignment", expert_alignment, 1),
        ("num_worst_tokens", num_worst_tokens, 0),
    ):
        if not isinstance(value, int) or value < smallest:
            raise ArgumentError(name, value, f"must be an integer of at least {smallest}")
    layout: Layout | None = None
    given = (num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert)
    computes_layout = all(value is None for value in given) and num_experts is not None
    if computes_layout:
        if idx is None:
            raise ArgumentError("topk_idx", None, "is needed to compute the layout")
        checks.num_experts(num_experts, ctx.num_max_experts)
    else:
        layout = checked_layout(
            ctx, payload.num_tokens, num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank
        )
        if num_experts is not None and num_experts != layout.num_experts:
            raise ArgumentError(
                "num_experts", num_experts, f"must be that of the layout ({layout.num_experts})"
            )
    num_topk = 0 if idx is None else idx.shape[1]
    plan = ctx.plan(
        options.config,
        options.default_config,
        row_bytes=payload.row_bytes,
        scale_row_bytes=payload.num_scales * payload.scale_bytes,
        num_topk=num_topk,
    )

    with options.streams.launch(ctx) as launch:
        if layout is None:
            assert idx is not None and num_experts is not None
            layout = launch_layout(ctx, launch, idx, num_experts)
        notified = _launch_notify(ctx, launch, plan, payload, layout, num_topk, expert_alignment)
        num_recv_tokens: int | None = None
        per_expert_list: list[int] = []
        if num_worst_tokens == 0:
            num_recv_tokens, per_expert_list = _wait_counts(ctx)
        routing = Routing(
            payload=payload,
            topk_idx=idx,
            topk_weights=weights,
            num_experts=layout.num_experts,
            is_token_in_rank=layout.is_token_in_rank,
            send_head=notified.send_head,
            rank_prefix_matrix=notified.rank_prefix_matrix,
            channel_prefix_matrix=notified.channel_prefix_matrix,
        )
        num_rows = num_worst_tokens if num_recv_tokens is None else num_recv_tokens
        out, recv_channel_prefix_matrix = _launch_dispatch(
            ctx,
            launch,
            plan,
            routing,
            num_rows,
            fill_tail=num_recv_tokens is None,
        )
        event = launch.finish(
            [
                payload.x,
                payload.scales,
                idx,
                weights,
                layout.num_tokens_per_rank,
                layout.num_tokens_per_expert,
                layout.is_token_in_rank,
            ]
        )
    ctx.end()
    handle = Handle(
        rank_prefix_matrix=notified.rank_prefix_matrix,
        channel_prefix_matrix=notified.channel_prefix_matrix,
        recv_channel_prefix_matrix=recv_channel_prefix_matrix,
        recv_src_idx=out.src_idx,
        is_token_in_rank=layout.is_token_in_rank,
        send_head=notified.send_head,
        rank=ctx.rank,
        num_experts=layout.num_experts,
        num_topk=num_topk,
        num_recv_tokens=num_recv_tokens,
        num_recv_tokens_per_expert=notified.num_recv_tokens_per_expert,
        members=ctx.members,
    )
    return out.payload, out.topk_idx, out.topk_weights, per_expert_list, handle, event


def cached_dispatch(
    ctx: Context,
    x: Any,
    handle: Handle | Sequence[Tensor],
    options: CallOptions,
) -> DispatchResult:
    """The routing of ``handle`` with another x: no counts to exchange, no wait of the host."""
    ctx.begin()
    payload = checks.payload(x, ctx.device)
    handle = Handle.of(handle)
    handle.require_group(ctx.rank, ctx.num_ranks, ctx.members, ctx.device)
    handle.require_num_tokens(payload.num_tokens)
    plan = ctx.plan(
        options.config,
        options.default_config,
        row_bytes=payload.row_bytes,
        scale_row_bytes=payload.num_scales * payload.scale_bytes,
        num_topk=0,
        num_channels=handle.num_channels,
    )
    handle.require_num_channels(plan.num_channels)
    routing = Routing(
        payload=payload,
        topk_idx=None,
        topk_weights=None,
        num_experts=handle.num_experts or 0,
        is_token_in_rank=handle.is_token_in_rank,
        send_head=handle.send_head,
        rank_prefix_matrix=handle.rank_prefix_matrix,
        channel_prefix_matrix=handle.channel_prefix_matrix,
    )
    with options.streams.launch(ctx) as launch:
        out, _ = _launch_dispatch(
            ctx,
            launch,
            plan,
            routing,
            handle.num_recv_rows,
            fill_tail=False,
        )
        event = launch.finish([payload.x, payload.scales, *handle])
    ctx.end()
    return out.payload, None, None, None, None, event
