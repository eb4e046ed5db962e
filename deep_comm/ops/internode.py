"""dispatch of a group of several nodes, whose tokens cross once to a node: its launch; and cached
dispatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deep_comm.backends import Launch
from deep_comm.checks import Payload
from deep_comm.context import Context
from deep_comm.errors import HandleMismatch
from deep_comm.events import EventOverlap
from deep_comm.internode_handle import InternodeHandle, KnownTierHandle
from deep_comm.ops.call import CallOptions
from deep_comm.ops.expand import require_expanded
from deep_comm.ops.internode_expand import expand_received
from deep_comm.ops.internode_outputs import TierOutputs, allocate
from deep_comm.ops.internode_plan import TwoTierPlan, dispatch_launcher, plan_two_tiers
from deep_comm.ops.outputs import RowTensors
from deep_comm.ops.quick import remember_tier_dispatch
from deep_comm.ops.scales import PLAIN, ScaleOptions, allocate_source, inputs_of, turn_scales

# See ops/dispatch.py for `| Any`.
DispatchResult = tuple[
    Tensor | Any, Tensor | Any, Tensor | Any, list[int] | Any, InternodeHandle | Any, EventOverlap
]


def launch_dispatch(
    ctx: Context,
    launch: Launch,
    plan: TwoTierPlan,
    payload: Payload,
    idx: Tensor | None,
    weights: Tensor | None,
    routing: tuple[int, ...],
    combine: tuple[int, int],
    flags: int,
    out: TierOutputs,
    source: int,
) -> None:
    """``routing``: as KnownTierHandle has it. ``combine``: where its rings begin, and
    forward_places; 0 of a cached dispatch. ``source``: of what is quantised, or 0.
    """
    address, scales, form = ctx.address, payload.scales, payload.form
    num_topk, idx_bytes = (0, 0) if idx is None else (idx.shape[1], idx.element_size())
    dispatch_launcher(ctx, plan, form, num_topk, idx_bytes)(
        *routing,
        address(payload.x),
        payload.num_tokens,
        address(scales),
        0 if scales is None else scales.stride(0),
        0 if scales is None else scales.stride(1),
        address(idx),
        address(weights),
        address(out.x),
        address(out.scales),
        address(out.topk_idx),
        address(out.topk_weights),
        out.num_rows,
        out.num_forward_rows,
        out.output_offset,
        address(out.src_idx),
        address(out.src_meta),
        address(out.send_rank_head),
        out.src_offset,
        *combine,
        flags,
        source,
        launch.stream,
    )


def known_handle(ctx: Context, handle: Sequence[Tensor]) -> KnownTierHandle:
    if type(handle) is InternodeHandle:
        known = handle.known_to(ctx.owner)
        if known is not None:
            return known
    checked = InternodeHandle.of(handle)
    checked.require_group(ctx.rank, ctx.num_ranks, ctx.topology.num_nodes, ctx.members, ctx.device)
    return checked.remember(ctx.owner, ctx.heap.base)


def _places(ctx: Context, launch: Launch, known: KnownTierHandle) -> Tensor:
    """What a handle made of ten tensors does not bring along."""
    places = launch.empty((known.num_tokens, ctx.topology.num_nodes + ctx.num_ranks), torch.int32)
    ctx.engine.internode_places(
        is_token_in_rank=known.routing[1],
        num_tokens=known.num_tokens,
        num_channels=known.num_channels,
        send_places=ctx.address(places),
        stream=launch.stream,
    )
    return places


def cached_internode_dispatch(
    ctx: Context,
    x: Any,
    handle: Sequence[Tensor],
    *,
    expand: bool,
    zero_padding: bool,
    scale_options: ScaleOptions,
    options: CallOptions,
) -> DispatchResult:
    """The routing of ``handle`` with another x: no counts to exchange, no wait of the host."""
    ctx.begin()
    payload = scale_options.payload(x, ctx.device)
    known = known_handle(ctx, handle)
    require_expanded(known.expansion, expand, zero_padding)
    if known.num_tokens != payload.num_tokens:
        raise HandleMismatch(
            "handle",
            f"{known.num_tokens} tokens",
            f"must be of a dispatch of as many tokens as x has rows ({payload.num_tokens})",
        )
    plan = plan_two_tiers(
        ctx,
        options,
        payload.row_bytes,
        payload.scale_row_bytes,
        0,
        known.num_channels,
    )
    with options.streams.launch(ctx) as launch:
        source = allocate_source(ctx, launch, payload)
        out = allocate(
            ctx,
            launch,
            payload,
            None,
            None,
            known.num_recv_rows,
            known.num_forward_rows,
            makes_handle=False,
            is_scratch=known.expansion is not None,
        )
        routing, places = known.routing, None
        if routing[-1] == 0 and out.output_offset != 0:
            places = _places(ctx, launch, known)
            routing = *routing[:-1], ctx.address(places)
        launch_dispatch(
            ctx, launch, plan, payload, None, None, routing, (0, 0), 0, out, source
        )  # fmt: skip
        rows: RowTensors = out
        if known.expansion is not None:
            rows = expand_received(
                ctx, launch, plan, payload, out, known.num_received, known.expansion, zero_padding
            )
        if scale_options.column_major:
            turn_scales(ctx, launch, plan, rows)
        event = launch.finish((*inputs_of(payload), places), known)
    ctx.end()
    if options.streams.is_quick and scale_options is PLAIN and known.expansion is None:
        launcher = dispatch_launcher(ctx, plan, payload.form, 0, 0)
        remember_tier_dispatch(ctx, options, payload.form, known.num_channels, launcher)
    return rows.payload, None, None, None, None, event
