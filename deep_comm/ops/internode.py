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
from deep_comm.internode_handle import InternodeHandle
from deep_comm.ops.call import CallOptions
from deep_comm.ops.expand import require_expanded
from deep_comm.ops.internode_expand import expand_received
from deep_comm.ops.internode_outputs import TierOutputs, allocate
from deep_comm.ops.internode_plan import (
    FILL_TAIL,
    IS_EARLY,
    ZERO_TAIL,
    TwoTierPlan,
    dispatch_launcher,
    plan_two_tiers,
)
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
    num_experts: int,
    handle_parts: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    node_channel_prefix: Tensor,
    send_places: Tensor | None,
    combine: tuple[Tensor, Tensor] | None,
    fill_tail: bool,
    zero_tail: bool,
    out: TierOutputs,
    source: int,
    is_early: bool = False,
) -> None:
    """``handle_parts``: is_token_in_rank, send_rdma_head and the four receive prefixes.
    ``combine``: where its rings begin, and forward_places. ``source``: of what is quantised, or 0.
    ``is_early``: before the counts have come; see ops/internode_dispatch.py.
    """
    address, scales, form = ctx.address, payload.scales, payload.form
    is_token_in_rank, send_head, node_prefix, node_sum, rank_start, rank_sum = handle_parts
    num_topk, idx_bytes = (0, 0) if idx is None else (idx.shape[1], idx.element_size())
    flags = FILL_TAIL * fill_tail + ZERO_TAIL * zero_tail + IS_EARLY * is_early
    dispatch_launcher(ctx, plan, form, num_topk, idx_bytes)(
        num_experts,
        address(is_token_in_rank),
        address(send_head),
        address(node_prefix),
        address(node_sum),
        address(rank_start),
        address(rank_sum),
        address(node_channel_prefix),
        address(send_places),
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
        0 if combine is None else address(combine[0]),
        0 if combine is None else address(combine[1]),
        flags,
        source,
        launch.stream,
    )


def known_handle(ctx: Context, handle: Sequence[Tensor]) -> InternodeHandle:
    known = InternodeHandle.of(handle)
    known.require_group(ctx.rank, ctx.num_ranks, ctx.topology.num_nodes, ctx.members, ctx.device)
    return known


def _places(ctx: Context, launch: Launch, known: InternodeHandle) -> Tensor:
    """What a handle made of ten tensors does not bring along."""
    num_targets = known.num_nodes + known.num_ranks
    places = launch.empty((known.num_tokens, num_targets), torch.int32)
    ctx.engine.internode_places(
        is_token_in_rank=ctx.address(known.is_token_in_rank),
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
        places = known.send_places
        if places is None and out.output_offset != 0:
            places = _places(ctx, launch, known)
        parts = (known[0], known[8], known[3], known[4], known[5], known[6])
        launch_dispatch(
            ctx,
            launch,
            plan,
            payload,
            None,
            None,
            known.num_experts or 0,
            parts,
            known.rdma_channel_prefix_matrix,
            places,
            None,
            False,
            False,
            out,
            source,
        )
        rows: RowTensors = out
        if known.expansion is not None:
            rows = expand_received(
                ctx, launch, plan, payload, out, known.recv_gbl_rank_prefix_sum, known.expansion,
                zero_padding,
            )  # fmt: skip
        if scale_options.column_major:
            turn_scales(ctx, launch, plan, rows)
        event = launch.finish((*inputs_of(payload), places, *known.all_tensors))
    ctx.end()
    if options.streams.is_quick and scale_options is PLAIN and known.expansion is None:
        launcher = dispatch_launcher(ctx, plan, payload.form, 0, 0)
        remember_tier_dispatch(ctx, options, payload.form, known.num_channels, launcher)
    return rows.payload, None, None, None, None, event
