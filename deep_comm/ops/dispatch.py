"""dispatch: notify the peers, learn how many rows come, allocate, move. And its cached form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

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
from deep_comm.ops.outputs import Outputs, RecvX, allocate, allocate_cached
from deep_comm.topology import num_local_experts

DispatchResult = tuple[
    RecvX, Tensor | None, Tensor | None, list[int] | None, Handle | None, EventOverlap
]


class Routing(Protocol):
    """Which token goes where, as addresses: a KnownHandle, or what notify has just learned."""

    num_experts: int
    is_token_in_rank: int
    send_head: int
    rank_prefix_matrix: int
    channel_prefix_matrix: int


def _launch_dispatch(
    ctx: Context,
    launch: Launch,
    plan: RingPlan,
    routing: Routing,
    payload: Payload,
    idx: Tensor | None,
    weights: Tensor | None,
    num_rows: int,
    fill_tail: bool,
    out: Outputs,
) -> None:
    scales = payload.scales
    ctx.engine.dispatch(
        x=ctx.address(payload.x),
        row_bytes=payload.row_bytes,
        num_tokens=payload.num_tokens,
        x_scales=0 if scales is None else ctx.address(scales),
        scale_bytes=payload.scale_bytes,
        num_scales=payload.num_scales,
        scale_token_stride=0 if scales is None else scales.stride(0),
        scale_column_stride=0 if scales is None else scales.stride(1),
        topk_idx=0 if idx is None else ctx.address(idx),
        topk_idx_bytes=0 if idx is None else idx.element_size(),
        topk_weights=0 if weights is None else ctx.address(weights),
        num_topk=0 if idx is None else idx.shape[1],
        num_experts=routing.num_experts,
        is_token_in_rank=routing.is_token_in_rank,
        send_head=routing.send_head,
        rank_prefix_matrix=routing.rank_prefix_matrix,
        channel_prefix_matrix=routing.channel_prefix_matrix,
        recv_x=out.x_address,
        recv_x_scales=out.scales_address,
        recv_topk_idx=out.topk_idx_address,
        recv_topk_weights=out.topk_weights_address,
        recv_src_idx=out.src_idx_address,
        recv_channel_prefix_matrix=out.channel_prefix_matrix_address,
        num_recv_rows=num_rows,
        fill_tail=fill_tail,
        output_offset=out.output_offset,
        src_offset=out.src_offset,
        num_channels=plan.num_channels,
        num_send_tokens=plan.num_send_tokens,
        num_slots=plan.num_slots,
        stream=launch.stream,
    )


class Notified:
    """Outputs of the notify kernel, and with them the routing of the dispatch."""

    def __init__(
        self,
        ctx: Context,
        layout: Layout,
        rank_prefix_matrix: Tensor,
        channel_prefix_matrix: Tensor,
        send_head: Tensor,
        num_recv_tokens_per_expert: Tensor,
    ) -> None:
        self.tensors = (rank_prefix_matrix, channel_prefix_matrix, send_head)
        self.num_recv_tokens_per_expert = num_recv_tokens_per_expert
        self.num_experts = layout.num_experts
        self.is_token_in_rank = ctx.address(layout.is_token_in_rank)
        self.rank_prefix_matrix = ctx.address(rank_prefix_matrix)
        self.channel_prefix_matrix = ctx.address(channel_prefix_matrix)
        self.send_head = ctx.address(send_head)


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
        ctx,
        layout,
        rank_prefix_matrix=launch.empty((ctx.num_ranks, ctx.num_ranks), torch.int32),
        channel_prefix_matrix=launch.empty((ctx.num_ranks, plan.num_channels), torch.int32),
        send_head=launch.empty((payload.num_tokens, ctx.num_ranks), torch.int32),
        num_recv_tokens_per_expert=launch.empty((num_local,), torch.int32),
    )
    ctx.engine.notify_dispatch(
        num_tokens_per_rank=ctx.address(layout.num_tokens_per_rank),
        num_tokens_per_expert=ctx.address(layout.num_tokens_per_expert),
        is_token_in_rank=out.is_token_in_rank,
        num_tokens=payload.num_tokens,
        num_topk=num_topk,
        num_experts=layout.num_experts,
        row_bytes=payload.row_bytes,
        scale_row_bytes=payload.scale_row_bytes,
        expert_alignment=expert_alignment,
        num_channels=plan.num_channels,
        num_send_tokens=plan.num_send_tokens,
        num_slots=plan.num_slots,
        rank_prefix_matrix=out.rank_prefix_matrix,
        channel_prefix_matrix=out.channel_prefix_matrix,
        send_head=out.send_head,
        num_recv_tokens_per_expert=ctx.address(out.num_recv_tokens_per_expert),
        stream=launch.stream,
    )
    ctx.end()
    return out


def _wait_counts(ctx: Context) -> tuple[int, int, list[int]]:
    counts = ctx.engine.wait_counts()
    if counts is None:
        ctx.check()
        raise DeepCommError("notify_dispatch failed and left no error record")
    return counts.num_recv_tokens, counts.max_num_tokens, list(counts.num_recv_tokens_per_expert)


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
    computes_layout = (
        num_tokens_per_rank is None
        and is_token_in_rank is None
        and num_tokens_per_expert is None
        and num_experts is not None
    )
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
        payload.row_bytes,
        payload.scale_row_bytes,
        num_topk,
    )

    with options.streams.launch(ctx) as launch:
        if layout is None:
            assert idx is not None and num_experts is not None
            layout = launch_layout(ctx, launch, idx, num_experts)
        notified = _launch_notify(ctx, launch, plan, payload, layout, num_topk, expert_alignment)
        num_recv_tokens: int | None = None
        max_num_tokens: int | None = None
        per_expert_list: list[int] = []
        if num_worst_tokens == 0:
            num_recv_tokens, max_num_tokens, per_expert_list = _wait_counts(ctx)
        num_rows = num_worst_tokens if num_recv_tokens is None else num_recv_tokens
        out = allocate(ctx, launch, plan, payload, idx, weights, num_rows)
        fill_tail = num_recv_tokens is None
        _launch_dispatch(
            ctx, launch, plan, notified, payload, idx, weights, num_rows, fill_tail, out
        )
        event = launch.finish(
            (
                payload.x,
                payload.scales,
                idx,
                weights,
                layout.num_tokens_per_rank,
                layout.num_tokens_per_expert,
                layout.is_token_in_rank,
            )
        )
    ctx.end()
    rank_prefix_matrix, channel_prefix_matrix, send_head = notified.tensors
    assert out.channel_prefix_matrix is not None and out.src_idx is not None
    handle = Handle(
        rank_prefix_matrix=rank_prefix_matrix,
        channel_prefix_matrix=channel_prefix_matrix,
        recv_channel_prefix_matrix=out.channel_prefix_matrix,
        recv_src_idx=out.src_idx,
        is_token_in_rank=layout.is_token_in_rank,
        send_head=send_head,
        rank=ctx.rank,
        num_experts=layout.num_experts,
        num_topk=num_topk,
        num_recv_tokens=num_recv_tokens,
        max_num_tokens=max_num_tokens,
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
    known = ctx.known_handle(handle)
    if known.num_tokens != payload.num_tokens:
        Handle.of(handle).require_num_tokens(payload.num_tokens)
    plan = ctx.plan(
        options.config,
        options.default_config,
        payload.row_bytes,
        payload.scale_row_bytes,
        0,
        known.num_channels,
    )
    if plan.num_channels != known.num_channels:
        Handle.of(handle).require_num_channels(plan.num_channels)
    num_rows = known.num_recv_rows
    with options.streams.launch(ctx) as launch:
        out = allocate_cached(ctx, launch, payload, known)
        _launch_dispatch(ctx, launch, plan, known, payload, None, None, num_rows, False, out)
        event = launch.finish((payload.x, payload.scales), known)
    ctx.end()
    return out.payload, None, None, None, None, event
