"""dispatch: notify the peers, learn how many rows come, allocate, move. And its cached form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from deep_comm import checks
from deep_comm.backends import Launch
from deep_comm.checks import Payload
from deep_comm.config import RingPlan
from deep_comm.context import Context
from deep_comm.errors import ArgumentError
from deep_comm.events import EventOverlap
from deep_comm.handle import Handle
from deep_comm.ops.call import CallOptions
from deep_comm.ops.layout import Layout, checked_layout
from deep_comm.ops.notify import NOWHERE, Notified, Place, launch_notify, wait_counts
from deep_comm.ops.outputs import (
    Outputs,
    RecvX,
    allocate,
    allocate_cached,
    outputs_in,
    reserve_unknown,
)

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
    zero_tail: bool,
    out: Outputs,
    recv_channel_prefix_matrix: int,
    follows_notify: bool = False,
    is_speculative: bool = False,
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
        recv_channel_prefix_matrix=recv_channel_prefix_matrix,
        num_recv_rows=num_rows,
        fill_tail=fill_tail,
        zero_tail=zero_tail,
        output_offset=out.output_offset,
        src_offset=out.src_offset,
        follows_notify=follows_notify,
        is_speculative=is_speculative,
        num_channels=plan.num_channels,
        num_send_tokens=plan.num_send_tokens,
        num_slots=plan.num_slots,
        stream=launch.stream,
    )


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
    zero_tail: bool,
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

    if num_experts is None:
        assert layout is not None
        num_experts = layout.num_experts
    with options.streams.launch(ctx) as launch:

        def notify(place: Place) -> Notified:
            return launch_notify(
                ctx, launch, plan, payload, idx, num_experts, layout, expert_alignment, place
            )

        def move(
            out: Outputs, num_rows: int, fill_tail: bool = False, is_speculative: bool = False
        ) -> None:
            _launch_dispatch(
                ctx, launch, plan, notified, payload, idx, weights, num_rows, fill_tail,
                fill_tail and zero_tail, out, notified.recv_channel_prefix_matrix, True,
                is_speculative,
            )  # fmt: skip

        num_recv_tokens: int | None = None
        max_num_tokens: int | None = None
        per_expert_list: list[int] = []
        if num_worst_tokens > 0:
            out = allocate(ctx, launch, payload, idx, weights, num_worst_tokens)
            notified = notify(Place(out.output_offset, out.src_offset, num_worst_tokens, False))
            move(out, num_worst_tokens, fill_tail=True)
        else:
            # The rows may begin to move before this host knows how many they are (docs/design/0009).
            reserved = reserve_unknown(ctx, launch, payload, idx)
            if reserved is None:
                notified = notify(NOWHERE)
            else:
                blank = Outputs.blank(ctx, reserved)
                notified = notify(
                    Place(blank.output_offset, blank.src_offset, reserved.num_rows, True)
                )
                move(blank, reserved.num_rows, is_speculative=True)
            counts = wait_counts(ctx)
            num_recv_tokens, max_num_tokens = counts.num_recv_tokens, counts.max_num_tokens
            per_expert_list = list(counts.num_recv_tokens_per_expert)
            ctx.most_recv_rows = max(ctx.most_recv_rows, num_recv_tokens)
            ctx.most_tokens = max(ctx.most_tokens, max_num_tokens)
            if counts.is_direct:
                assert reserved is not None
                out = outputs_in(ctx, reserved, payload, idx, weights, num_recv_tokens)
            else:
                del reserved  # some rank has no room for so many; all launch again
                out = allocate(ctx, launch, payload, idx, weights, num_recv_tokens)
                move(out, num_recv_tokens)
        inputs = [payload.x, payload.scales, idx, weights]
        if layout is not None:
            inputs += layout.num_tokens_per_rank, layout.num_tokens_per_expert
            inputs.append(layout.is_token_in_rank)
        event = launch.finish(inputs)
    ctx.end()
    assert out.src_idx is not None
    handle = Handle(
        **notified.tensors(),
        recv_src_idx=out.src_idx,
        rank=ctx.rank,
        num_experts=num_experts,
        num_topk=num_topk,
        num_recv_tokens=num_recv_tokens,
        max_num_tokens=max_num_tokens,
        members=ctx.members,
        home_stream=launch.home_stream,
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
        _launch_dispatch(
            ctx, launch, plan, known, payload, None, None, num_rows, False, False, out,
            out.channel_prefix_matrix_address,
        )  # fmt: skip
        event = launch.finish((payload.x, payload.scales), known)
    ctx.end()
    return out.payload, None, None, None, None, event
