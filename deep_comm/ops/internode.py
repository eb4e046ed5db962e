"""dispatch of a group of several nodes: each token crosses once to a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deep_comm import checks
from deep_comm.backends import Launch
from deep_comm.checks import Payload
from deep_comm.context import Context
from deep_comm.errors import DeepCommError, HandleMismatch
from deep_comm.events import EventOverlap
from deep_comm.expansion import Expansion
from deep_comm.internode_handle import InternodeHandle
from deep_comm.ops.call import CallOptions
from deep_comm.ops.expand import require_expandable, require_expanded
from deep_comm.ops.internode_expand import expand_received, number_received
from deep_comm.ops.internode_outputs import TierOutputs, allocate
from deep_comm.ops.internode_plan import TwoTierPlan, plan_two_tiers
from deep_comm.ops.layout import Layout, checked_routing, launch_layout
from deep_comm.ops.outputs import RowTensors
from deep_comm.ops.scales import ScaleOptions, allocate_source, inputs_of, turn_scales
from deep_comm.topology import num_local_experts

# See ops/dispatch.py for `| Any`.
DispatchResult = tuple[
    Tensor | Any, Tensor | Any, Tensor | Any, list[int] | Any, InternodeHandle | Any, EventOverlap
]


class _Routing:
    """What the counting kernels write: the handle's matrices, and where combine's rings begin."""

    def __init__(
        self, ctx: Context, launch: Launch, layout: Layout, num_tokens: int, num_channels: int
    ) -> None:
        def empty(*shape: int) -> Tensor:
            return launch.empty(shape, torch.int32)

        num_nodes, num_ranks = ctx.topology.num_nodes, ctx.num_ranks
        self.layout = layout
        self.node_channel_prefix = empty(num_nodes, num_channels)
        self.rank_channel_prefix = empty(num_ranks, num_channels)
        self.send_node_head = empty(num_tokens, num_nodes)
        self.recv_node_channel_prefix = empty(num_nodes, num_channels)
        self.recv_node_prefix_sum = empty(num_nodes)
        self.recv_rank_channel_start = empty(num_ranks, num_channels)
        self.recv_rank_prefix_sum = empty(num_ranks)
        self.combine_start = empty(num_channels, num_nodes, ctx.topology.ranks_per_node)
        num_local = ctx.topology.ranks_per_node
        self.forward_places = empty((num_nodes + 1 + num_channels * num_nodes) * num_local)
        self.send_places = (
            None if ctx.num_direct_bytes == 0 else empty(num_tokens, num_nodes + num_ranks)
        )
        num_local = num_local_experts(ctx.rank, layout.num_experts, num_ranks)
        self.num_recv_tokens_per_expert = empty(num_local)


def _launch_dispatch(
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
) -> None:
    """``handle_parts``: is_token_in_rank, send_rdma_head and the four receive prefixes.
    ``combine``: where its rings begin, and forward_places. ``source``: of what is quantised, or 0.
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
        stream=launch.stream,
        **plan.as_arguments(),
    )


def _notify(
    ctx: Context,
    launch: Launch,
    plan: TwoTierPlan,
    payload: Payload,
    layout: Layout,
    num_topk: int,
    expert_alignment: int,
) -> _Routing:
    routing = _Routing(ctx, launch, layout, payload.num_tokens, plan.num_channels)
    address, form = ctx.address, payload.form
    ctx.engine.internode_notify(
        num_tokens_per_expert=address(layout.num_tokens_per_expert),
        is_token_in_rank=address(layout.is_token_in_rank),
        num_tokens=payload.num_tokens,
        num_topk=num_topk,
        num_experts=layout.num_experts,
        row_bytes=payload.row_bytes,
        scale_row_bytes=payload.scale_row_bytes,
        cast=form.quantises + form.round_scale + form.use_ue8m0,
        expert_alignment=expert_alignment,
        node_channel_prefix=address(routing.node_channel_prefix),
        rank_channel_prefix=address(routing.rank_channel_prefix),
        send_node_head=address(routing.send_node_head),
        send_places=address(routing.send_places),
        recv_node_channel_prefix=address(routing.recv_node_channel_prefix),
        recv_node_prefix_sum=address(routing.recv_node_prefix_sum),
        recv_rank_channel_start=address(routing.recv_rank_channel_start),
        recv_rank_prefix_sum=address(routing.recv_rank_prefix_sum),
        combine_start=address(routing.combine_start),
        forward_places=address(routing.forward_places),
        num_recv_tokens_per_expert=address(routing.num_recv_tokens_per_expert),
        stream=launch.stream,
        **plan.as_arguments(),
    )
    ctx.end()
    return routing


def internode_dispatch(
    ctx: Context,
    x: Any,
    *,
    num_tokens_per_rank: Any,
    num_tokens_per_rdma_rank: Any,
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
    options: CallOptions,
) -> DispatchResult:
    ctx.begin()
    payload = scale_options.payload(x, ctx.device)
    idx, weights = checks.topk_pair(topk_idx, topk_weights, ctx.device, payload.num_tokens)
    require_expandable(idx, expand, zero_padding, zero_tail)
    layout, num_experts = checked_routing(
        ctx, payload.num_tokens, idx, num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank,
        num_experts, expert_alignment, num_worst_tokens,
    )  # fmt: skip
    if num_tokens_per_rdma_rank is not None:
        checks.tensor(
            "num_tokens_per_rdma_rank",
            num_tokens_per_rdma_rank,
            ctx.device,
            shape=(ctx.topology.num_nodes,),
            dtypes=(torch.int32,),
        )
    num_topk = 0 if idx is None else idx.shape[1]
    plan = plan_two_tiers(
        ctx,
        options.config,
        options.default_config,
        payload.row_bytes,
        payload.scale_row_bytes,
        num_topk,
    )

    with options.streams.launch(ctx) as launch:
        source = allocate_source(ctx, launch, payload)
        if layout is None:
            assert idx is not None
            layout = launch_layout(ctx, launch, idx, num_experts)
        routing = _notify(ctx, launch, plan, payload, layout, num_topk, expert_alignment)
        counts = None
        if num_worst_tokens == 0:
            counts = ctx.engine.wait_internode_counts()
            if counts is None:
                ctx.check()
                raise DeepCommError("internode_notify failed and left no error record")
        # Without counts: as many rows as can come when all ranks have as many tokens as this one,
        # or as they have agreed on.
        most_tokens = max(payload.num_tokens, ctx.agreed_tokens)
        num_forward = max(num_worst_tokens, ctx.topology.num_nodes * most_tokens)
        out = allocate(
            ctx,
            launch,
            payload,
            idx,
            weights,
            num_worst_tokens if counts is None else counts.num_recv_tokens,
            num_forward if counts is None else counts.num_forward_tokens,
            makes_handle=True,
            is_scratch=expand,
        )
        parts = (
            layout.is_token_in_rank,
            routing.send_node_head,
            routing.recv_node_channel_prefix,
            routing.recv_node_prefix_sum,
            routing.recv_rank_channel_start,
            routing.recv_rank_prefix_sum,
        )
        _launch_dispatch(
            ctx,
            launch,
            plan,
            payload,
            idx,
            weights,
            layout.num_experts,
            parts,
            routing.node_channel_prefix,
            routing.send_places,
            (routing.combine_start, routing.forward_places),
            counts is None,
            counts is None and zero_tail,
            out,
            source,
        )
        rows: RowTensors = out
        expansion: Expansion | None = None
        if expand:
            expansion = number_received(
                ctx,
                launch,
                plan,
                out,
                routing.recv_rank_prefix_sum,
                routing.num_recv_tokens_per_expert.shape[0],
                expert_alignment,
                num_worst_tokens if counts is None else sum(counts.num_recv_tokens_per_expert),
            )
            rows = expand_received(
                ctx, launch, plan, payload, out, routing.recv_rank_prefix_sum, expansion,
                zero_padding,
            )  # fmt: skip
        if scale_options.column_major:
            turn_scales(ctx, launch, plan, rows)
        event = launch.finish(
            (
                *inputs_of(payload),
                idx,
                weights,
                layout.num_tokens_per_rank,
                layout.num_tokens_per_expert,
                layout.is_token_in_rank,
                routing.combine_start,
                routing.forward_places,
                routing.send_places,
            )
        )
    ctx.end()
    assert out.src_meta is not None and out.send_rank_head is not None
    handle = InternodeHandle(
        is_token_in_rank=layout.is_token_in_rank,
        rdma_channel_prefix_matrix=routing.node_channel_prefix,
        gbl_channel_prefix_matrix=routing.rank_channel_prefix,
        recv_rdma_channel_prefix_matrix=routing.recv_node_channel_prefix,
        recv_rdma_rank_prefix_sum=routing.recv_node_prefix_sum,
        recv_gbl_channel_prefix_matrix=routing.recv_rank_channel_start,
        recv_gbl_rank_prefix_sum=routing.recv_rank_prefix_sum,
        recv_src_meta=out.src_meta,
        send_rdma_head=routing.send_node_head,
        send_nvl_head=out.send_rank_head,
        recv_src_idx=out.src_idx,
        rank=ctx.rank,
        num_experts=layout.num_experts,
        num_topk=num_topk,
        num_recv_tokens=None if counts is None else counts.num_recv_tokens,
        max_num_tokens=None if counts is None else counts.max_num_tokens,
        num_recv_tokens_per_expert=routing.num_recv_tokens_per_expert,
        members=ctx.members,
        forward_places=routing.forward_places,
        num_returning_rows=None if counts is None else counts.num_returning_rows,
        send_places=routing.send_places,
        expansion=expansion,
    )
    per_expert = [] if counts is None else list(counts.num_recv_tokens_per_expert)
    return rows.payload, rows.topk_idx, rows.topk_weights, per_expert, handle, event


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
        options.config,
        options.default_config,
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
        _launch_dispatch(
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
