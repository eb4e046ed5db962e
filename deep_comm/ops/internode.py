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
from deep_comm.ops.internode_plan import TwoTierPlan, plan_two_tiers
from deep_comm.ops.outputs import RowTensors
from deep_comm.ops.scales import ScaleOptions, allocate_source, inputs_of, turn_scales

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
    ctx.engine.internode_dispatch(
        x=address(payload.x),
        row_bytes=payload.row_bytes,
        num_tokens=payload.num_tokens,
        x_scales=address(scales),
        scale_bytes=payload.scale_bytes,
        num_scales=payload.num_scales,
        scale_token_stride=0 if scales is None else scales.stride(0),
        scale_column_stride=0 if scales is None else scales.stride(1),
        topk_idx=address(idx),
        topk_idx_bytes=0 if idx is None else idx.element_size(),
        topk_weights=address(weights),
        num_topk=0 if idx is None else idx.shape[1],
        num_experts=num_experts,
        is_token_in_rank=address(is_token_in_rank),
        send_node_head=address(send_head),
        recv_node_channel_prefix=address(node_prefix),
        recv_node_prefix_sum=address(node_sum),
        recv_rank_channel_start=address(rank_start),
        recv_rank_prefix_sum=address(rank_sum),
        combine_start=0 if combine is None else address(combine[0]),
        forward_places=0 if combine is None else address(combine[1]),
        node_channel_prefix=address(node_channel_prefix),
        send_places=address(send_places),
        recv_x=address(out.x),
        recv_x_scales=address(out.scales),
        recv_topk_idx=address(out.topk_idx),
        recv_topk_weights=address(out.topk_weights),
        recv_src_idx=address(out.src_idx),
        recv_src_meta=address(out.src_meta),
        send_rank_head=address(out.send_rank_head),
        num_recv_rows=out.num_rows,
        num_forward_rows=out.num_forward_rows,
        output_offset=out.output_offset,
        src_offset=out.src_offset,
        fill_tail=fill_tail,
        zero_tail=zero_tail,
        source=source,
        round_scale=form.round_scale,
        use_ue8m0=form.use_ue8m0,
        is_early=is_early,
        stream=launch.stream,
        **plan.as_arguments(),
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
    return rows.payload, None, None, None, None, event
