"""dispatch with new routing, of a group of several nodes: notify the peers, move, learn how many
rows come.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deep_comm import checks
from deep_comm.backends import Launch
from deep_comm.checks import Payload
from deep_comm.context import Context
from deep_comm.errors import DeepCommError
from deep_comm.expansion import Expansion
from deep_comm.internode_handle import InternodeHandle
from deep_comm.ops.call import CallOptions
from deep_comm.ops.internode import DispatchResult, launch_dispatch
from deep_comm.ops.internode_expand import expand_received, number_received
from deep_comm.ops.internode_outputs import (
    TierOutputs,
    TierReservation,
    allocate,
    outputs_in,
    reserve_unknown,
)
from deep_comm.ops.internode_plan import TwoTierPlan, plan_two_tiers
from deep_comm.ops.layout import Layout, launch_layout
from deep_comm.ops.new_routing import checked_new_routing
from deep_comm.ops.outputs import RowTensors
from deep_comm.ops.scales import ScaleOptions, allocate_source, inputs_of, turn_scales
from deep_comm.topology import num_local_experts


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
        self.num_recv_tokens_per_rank = empty(num_ranks)


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
        num_recv_tokens_per_rank=address(routing.num_recv_tokens_per_rank),
        stream=launch.stream,
        **plan.as_arguments(),
    )
    ctx.end()
    return routing


class NewTierDispatch:
    """As ops.dispatch.NewDispatch: checked and planned when it is made; then ``send``; ``receive``,
    where the host waits for counts, unless there are num_worst_tokens; ``end``.
    """

    __slots__ = (
        "_alignment", "_counts", "_expand", "_expects_counts", "_idx", "_launch", "_layout",
        "_num_experts", "_num_topk", "_out", "_payload", "_plan", "_reserved", "_routing",
        "_scale_options", "_source", "_weights", "_zero_padding", "_zero_tail", "ctx",
        "num_worst_tokens",
    )  # fmt: skip

    def __init__(
        self,
        ctx: Context,
        x: Any,
        scale_options: ScaleOptions,
        *,
        num_tokens_per_rdma_rank: Any,
        options: CallOptions,
        **given: Any,
    ) -> None:
        """``given``: as checked_new_routing has it."""
        routing = checked_new_routing(ctx, x, scale_options, **given)
        payload, idx, weights, self._layout, self._num_experts = routing
        if num_tokens_per_rdma_rank is not None:
            checks.tensor(
                "num_tokens_per_rdma_rank",
                num_tokens_per_rdma_rank,
                ctx.device,
                shape=(ctx.topology.num_nodes,),
                dtypes=(torch.int32,),
            )
        self._num_topk = routing.num_topk
        self._plan = plan_two_tiers(
            ctx,
            options,
            payload.row_bytes,
            payload.scale_row_bytes,
            self._num_topk,
        )
        self.ctx, self._payload, self._idx, self._weights = ctx, payload, idx, weights
        self._alignment, self.num_worst_tokens = (
            given["expert_alignment"],
            given["num_worst_tokens"],
        )
        self._zero_tail, self._zero_padding = given["zero_tail"], given["zero_padding"]
        self._expand, self._scale_options = given["expand"], scale_options
        self._counts: Any = None
        self._reserved: TierReservation | None = None
        self._expects_counts = False

    def send(self, launch: Launch) -> None:
        """Counts, and rows if they can already move: they may before this host knows how many they
        are (docs/design/0035).
        """
        ctx, payload = self.ctx, self._payload
        self._launch = launch
        self._source = allocate_source(ctx, launch, payload)
        if self._layout is None:
            assert self._idx is not None
            self._layout = launch_layout(ctx, launch, self._idx, self._num_experts)
        self._routing = _notify(
            ctx, launch, self._plan, payload, self._layout, self._num_topk, self._alignment
        )
        # As many as can come to be forwarded when all ranks have as many tokens as this one, as any
        # rank has ever had, or as they have agreed on.
        most_tokens = max(payload.num_tokens, ctx.agreed_tokens, ctx.expected.most_tokens)
        num_forward = ctx.topology.num_nodes * most_tokens
        if self.num_worst_tokens > 0:
            num_forward = max(self.num_worst_tokens, num_forward)
            self._out = self._allocate(self.num_worst_tokens, num_forward)
            self._move(self._out)
        elif ctx.num_direct_bytes > 0 and ctx.early_launches.is_next():
            self._expects_counts = True
            self._reserved = reserve_unknown(
                ctx, launch, payload, self._idx, num_forward, self._expand
            )
            # Also without: no other rank knows, and all of them will see that there is no room.
            self._move(TierOutputs.blank(self._reserved, payload.x), is_early=True)

    def receive(self) -> None:
        """Waits until the counts have come; tensors of so many rows."""
        ctx, launch, reserved = self.ctx, self._launch, self._reserved
        self._reserved = None
        counts = self._counts = ctx.engine.wait_internode_counts(self._expects_counts)
        if counts is None:
            ctx.check()
            raise DeepCommError("internode_notify failed and left no error record")
        num_rows, num_forward = counts.num_recv_tokens, counts.num_forward_tokens
        ctx.expected.learn(num_rows, counts.max_num_tokens)
        if self._expects_counts:
            ctx.early_launches.learn(counts.is_direct)
        if counts.is_direct:
            assert reserved is not None
            self._out = outputs_in(
                ctx, reserved, self._payload, self._idx, self._weights, num_rows, num_forward
            )
            if self._expand:
                launch.follow_caller()
            return
        del reserved  # some rank has no room for so many; all launch again
        launch.follow_caller()
        self._out = self._allocate(num_rows, num_forward)
        self._move(self._out)

    def end(self) -> DispatchResult:
        """What follows the rows, and the end of the operation."""
        ctx, launch, out = self.ctx, self._launch, self._out
        layout, routing, counts = self._layout, self._routing, self._counts
        assert layout is not None and out.src_meta is not None and out.send_rank_head is not None
        rows: RowTensors = out
        expansion: Expansion | None = None
        if self._expand:
            expansion = number_received(
                ctx,
                launch,
                self._plan,
                out,
                routing.recv_rank_prefix_sum,
                routing.num_recv_tokens_per_expert.shape[0],
                self._alignment,
                self.num_worst_tokens if counts is None else sum(counts.num_recv_tokens_per_expert),
            )
            rows = expand_received(
                ctx, launch, self._plan, self._payload, out, routing.recv_rank_prefix_sum,
                expansion, self._zero_padding,
            )  # fmt: skip
        if self._scale_options.column_major:
            turn_scales(ctx, launch, self._plan, rows)
        event = launch.finish(
            (
                *inputs_of(self._payload),
                self._idx,
                self._weights,
                layout.num_tokens_per_rank,
                layout.num_tokens_per_expert,
                layout.is_token_in_rank,
                routing.combine_start,
                routing.forward_places,
                routing.send_places,
            )
        )
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
            num_topk=self._num_topk,
            num_recv_tokens=None if counts is None else counts.num_recv_tokens,
            max_num_tokens=None if counts is None else counts.max_num_tokens,
            num_recv_tokens_per_expert=routing.num_recv_tokens_per_expert,
            num_recv_tokens_tensor=routing.recv_rank_prefix_sum[-1:],
            num_recv_tokens_per_rank=routing.num_recv_tokens_per_rank,
            members=ctx.members,
            forward_places=routing.forward_places,
            num_returning_rows=None if counts is None else counts.num_returning_rows,
            send_places=routing.send_places,
            expansion=expansion,
            home_stream=launch.home_stream,
        ).made_by(ctx.owner)
        per_expert = [] if counts is None else list(counts.num_recv_tokens_per_expert)
        return rows.payload, rows.topk_idx, rows.topk_weights, per_expert, handle, event

    def remember(self) -> None:
        """Between nodes no call has a native step of its own."""

    def _allocate(self, num_rows: int, num_forward_rows: int) -> TierOutputs:
        return allocate(
            self.ctx,
            self._launch,
            self._payload,
            self._idx,
            self._weights,
            num_rows,
            num_forward_rows,
            makes_handle=True,
            is_scratch=self._expand,
        )

    def _move(self, out: TierOutputs, is_early: bool = False) -> None:
        layout, routing = self._layout, self._routing
        assert layout is not None
        parts = (
            layout.is_token_in_rank,
            routing.send_node_head,
            routing.recv_node_channel_prefix,
            routing.recv_node_prefix_sum,
            routing.recv_rank_channel_start,
            routing.recv_rank_prefix_sum,
        )
        is_bounded = self.num_worst_tokens > 0
        launch_dispatch(
            self.ctx,
            self._launch,
            self._plan,
            self._payload,
            self._idx,
            self._weights,
            layout.num_experts,
            parts,
            routing.node_channel_prefix,
            routing.send_places,
            (routing.combine_start, routing.forward_places),
            is_bounded,
            is_bounded and self._zero_tail,
            out,
            self._source,
            is_early,
        )
