"""dispatch: notify the peers, learn how many rows come, allocate, move. And its cached form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from deep_comm import checks
from deep_comm.backends import Launch
from deep_comm.checks import Payload
from deep_comm.config import Config, require_config
from deep_comm.context import Context
from deep_comm.events import EventOverlap
from deep_comm.expansion import Expansion
from deep_comm.handle import Handle
from deep_comm.handle_parts import slab_layout as slab_layout_of
from deep_comm.ops.call import SYNCHRONOUS, StreamOptions
from deep_comm.ops.expand import (
    Numbering,
    cached_arguments,
    expand_rows,
    require_expandable,
    require_expanded,
)
from deep_comm.ops.layout import checked_routing
from deep_comm.ops.notify import (
    NO_EXPANSION,
    NOWHERE,
    Notified,
    Place,
    launch_notify,
    wait_counts,
)
from deep_comm.ops.outputs import (
    Outputs,
    Reservation,
    allocate,
    allocate_cached,
    outputs_anywhere,
    outputs_in,
    reserve,
    reserve_unknown,
    reserve_unknown_expanded,
)
from deep_comm.ops.plans import (
    FILL_TAIL,
    FOLLOWS_NOTIFY,
    IS_SPECULATIVE,
    ZERO_TAIL,
    DispatchPlan,
    plan_cached,
    plan_new,
)
from deep_comm.ops.quick import remember_dispatch
from deep_comm.ops.scales import PLAIN, ScaleOptions, allocate_source, inputs_of, turn_scales
from deep_comm.topology import num_local_experts
from deep_comm.tuning import DefaultConfig

# `| Any`: what an item is follows from the arguments, and callers know it.
DispatchResult = tuple[
    Tensor | Any, Tensor | Any, Tensor | Any, list[int] | Any, Handle | Any, EventOverlap
]


def _launch_dispatch(
    ctx: Context,
    launch: Launch,
    plan: DispatchPlan,
    routing: tuple[int, int, int, int, int],
    payload: Payload,
    idx: Tensor | None,
    weights: Tensor | None,
    num_rows: int,
    flags: int,
    out: Outputs,
    recv_channel_prefix_matrix: int,
    expansion: tuple[int, int, int, int],
    source: int,
) -> None:
    """``expansion``: addresses of what expanded outputs add. ``source``: of what is quantised."""
    scales = payload.scales
    if scales is None:
        x_scales = token_stride = column_stride = 0
    else:
        token_stride, column_stride = scales.stride()
        x_scales = scales.data_ptr() or ctx.heap.base
    plan.launch(
        *routing,
        payload.address or ctx.heap.base,
        payload.num_tokens,
        x_scales,
        token_stride,
        column_stride,
        0 if idx is None else idx.data_ptr() or ctx.heap.base,
        0 if weights is None else weights.data_ptr() or ctx.heap.base,
        out.x_address,
        out.scales_address,
        out.topk_idx_address,
        out.topk_weights_address,
        out.src_idx_address,
        recv_channel_prefix_matrix,
        num_rows,
        out.output_offset,
        out.src_offset,
        flags,
        *expansion,
        source,
        launch.stream,
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
    expand: bool,
    zero_padding: bool,
    scale_options: ScaleOptions,
    config: Config | None,
    default: Config | DefaultConfig | None,
    streams: StreamOptions,
) -> DispatchResult:
    ctx.begin()
    is_plain = scale_options is PLAIN
    payload = checks.payload(x, ctx.device) if is_plain else scale_options.payload(x, ctx.device)
    idx, weights = checks.topk_pair(topk_idx, topk_weights, ctx.device, payload.num_tokens)
    if expand or zero_padding:
        require_expandable(idx, expand, zero_padding, zero_tail)
    layout, num_experts = checked_routing(
        ctx, payload.num_tokens, idx, num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank,
        num_experts, expert_alignment, num_worst_tokens,
    )  # fmt: skip
    num_topk, topk_idx_bytes = (0, 0) if idx is None else (idx.shape[1], idx.element_size())
    key = (
        config, default, payload.form, num_topk, topk_idx_bytes, num_experts, expert_alignment,
        layout is None, expand,
    )  # fmt: skip
    if config is not None and type(config) is not Config:
        require_config(config)  # or it might be no key
    plan = ctx.calls.get(key) or plan_new(ctx, key, *key)

    with streams.launch(ctx) as launch:
        source = 0 if is_plain else allocate_source(ctx, launch, payload)
        numbering: Numbering | None = None
        places = 0  # of a received token, with expanded outputs
        row_idx, row_weights = idx, weights  # of the shape that outputs have
        if expand:
            assert idx is not None
            numbering = Numbering(ctx, launch, num_experts, idx)
            places = num_topk
            row_idx, row_weights = idx[:, :1], None if weights is None else weights[:, :1]

        slab_layout = slab_layout_of(
            ctx.num_ranks, plan.rings.num_channels,
            num_local_experts(ctx.rank, num_experts, ctx.num_ranks), payload.num_tokens,
            layout is None,
        )  # fmt: skip

        def notify(reserved: Reservation | None, is_exact: bool) -> Notified:
            if reserved is None:
                slab, place = None, NOWHERE
            else:
                slab = reserved.slab(ctx, slab_layout)
                place = Place(
                    reserved.block.offset, reserved.src_offset, reserved.num_rows, is_exact
                )
            notified = Notified(ctx, launch, slab_layout, num_experts, layout, slab)
            launch_notify(
                ctx, launch, plan, payload, idx, notified, layout, place,
                NO_EXPANSION if numbering is None else numbering.notify_arguments(ctx),
            )  # fmt: skip
            if numbering is not None:
                assert idx is not None
                numbering.launch(ctx, launch, plan.rings, idx, num_experts)
            return notified

        def move(out: Outputs, num_rows: int, flags: int = 0) -> None:
            _launch_dispatch(
                ctx, launch, plan, notified.routing, payload, idx, weights, num_rows,
                flags | FOLLOWS_NOTIFY, out, notified.recv_channel_prefix_matrix,
                NO_EXPANSION if numbering is None else numbering.dispatch_arguments(ctx, out),
                source,
            )  # fmt: skip

        num_recv_tokens: int | None = None
        max_num_tokens: int | None = None
        per_expert_list: list[int] = []
        if num_worst_tokens > 0:
            num_rows = num_worst_tokens
            reserved = reserve(
                ctx, launch, payload, row_idx, num_rows, slab_layout.num_bytes, places
            )
            if reserved is None:
                out = outputs_anywhere(ctx, launch, payload, row_idx, row_weights, num_rows, places)
            else:
                out = outputs_in(ctx, reserved, payload, row_idx, row_weights, num_rows, places)
            notified = notify(reserved, False)
            move(out, num_worst_tokens, FILL_TAIL | (ZERO_TAIL if zero_tail else 0))
        else:
            # The rows may begin to move before this host knows how many they
            # are (docs/design/0009).
            if row_idx is None or numbering is None:
                reserved = reserve_unknown(ctx, launch, payload, idx, slab_layout.num_bytes)
            else:
                reserved = reserve_unknown_expanded(
                    ctx, launch, payload, row_idx, places, num_experts, expert_alignment,
                    slab_layout.num_bytes,
                )  # fmt: skip
            notified = notify(reserved, True)
            if reserved is not None:
                move(Outputs.blank(ctx, reserved), reserved.num_rows, IS_SPECULATIVE)
            counts = wait_counts(ctx)
            num_recv_tokens, max_num_tokens = counts.num_recv_tokens, counts.max_num_tokens
            per_expert_list = list(counts.num_recv_tokens_per_expert)
            num_rows = num_recv_tokens
            if numbering is None:
                ctx.most_recv_rows = max(ctx.most_recv_rows, num_rows)
            else:
                num_rows = sum(per_expert_list)
                ctx.most_expanded_rows = max(ctx.most_expanded_rows, num_rows)
            ctx.most_tokens = max(ctx.most_tokens, max_num_tokens)
            if counts.is_direct:
                assert reserved is not None
                out = outputs_in(ctx, reserved, payload, row_idx, row_weights, num_rows, places)
            else:
                if reserved is not None:  # some rank has no room for so many; all launch again
                    reserved.keep_slab()
                    del reserved
                out = allocate(ctx, launch, payload, row_idx, row_weights, num_rows, places)
                move(out, num_rows)
        expansion: Expansion | None = None
        if numbering is not None:
            num_tokens = num_rows if num_recv_tokens is None else num_recv_tokens
            expansion = numbering.expansion(out, num_rows, num_tokens, expert_alignment)
            expand_rows(
                ctx, launch, plan.rings, payload, expansion, notified.slab.address, out,
                zero_padding=zero_padding, fill_handle=num_recv_tokens is None,
            )  # fmt: skip
        if scale_options.column_major:
            turn_scales(ctx, launch, plan.rings, out)
        inputs = [payload.x, payload.scales, idx, weights]
        if not is_plain:
            inputs += inputs_of(payload)
        if layout is not None:
            inputs += layout.num_tokens_per_rank, layout.num_tokens_per_expert
            inputs.append(layout.is_token_in_rank)
        event = launch.finish(inputs)
    ctx.end()
    handle = Handle.fresh(
        ctx.owner, notified.slab, notified.storage, notified.mask, out.src_rows, out.src_idx,
        notified.routing,
        rank=ctx.rank,
        num_experts=num_experts,
        num_topk=num_topk,
        num_recv_tokens=num_recv_tokens,
        max_num_tokens=max_num_tokens,
        members=ctx.members,
        home_stream=launch.home_stream,
        expansion=expansion,
    )  # fmt: skip
    return out.payload, out.topk_idx, out.topk_weights, per_expert_list, handle, event


def cached_dispatch(
    ctx: Context,
    x: Any,
    handle: Sequence[Tensor],
    *,
    expand: bool,
    zero_padding: bool,
    scale_options: ScaleOptions,
    config: Config | None,
    default: Config | DefaultConfig | None,
    streams: StreamOptions,
) -> DispatchResult:
    """The routing of ``handle`` with another x: no counts to exchange, no wait of the host."""
    ctx.begin()
    is_plain = scale_options is PLAIN
    payload = checks.payload(x, ctx.device) if is_plain else scale_options.payload(x, ctx.device)
    known = ctx.known_handle(handle)
    expansion = known.expansion
    require_expanded(expansion, expand, zero_padding)
    if known.num_tokens != payload.num_tokens:
        Handle.of(handle).require_num_tokens(payload.num_tokens)
    form = payload.form
    key = (config, default, form, known.num_channels, expansion is not None)
    if config is not None and type(config) is not Config:
        require_config(config)  # or it might be no key
    plan = ctx.calls.get(key) or plan_cached(ctx, key, *key)
    if plan.rings.num_channels != known.num_channels:
        Handle.of(handle).require_num_channels(plan.rings.num_channels)
    with streams.launch(ctx) as launch:
        source = 0 if is_plain else allocate_source(ctx, launch, payload)
        out = allocate_cached(ctx, launch, form, known)
        _launch_dispatch(
            ctx, launch, plan, known.routing, payload, None, None, known.num_output_rows, 0, out, 0,
            NO_EXPANSION if expansion is None else cached_arguments(ctx, expansion), source,
        )  # fmt: skip
        if expansion is not None:
            expand_rows(
                ctx, launch, plan.rings, payload, expansion, known.rank_prefix_matrix, out,
                zero_padding=zero_padding, fill_handle=False,
            )  # fmt: skip
        if scale_options.column_major:
            turn_scales(ctx, launch, plan.rings, out)
        inputs = (payload.x, payload.scales) if is_plain else inputs_of(payload)
        event = launch.finish(inputs, known)
    ctx.end()
    if is_plain and streams is SYNCHRONOUS and out.output_offset != 0:
        kind = getattr(x, "dtype", None)
        remember_dispatch(ctx, (config, default, kind), known, plan, form)
    return out.payload, None, None, None, None, event
