"""dispatch with new routing, of a group of several nodes: notify the peers, move, learn how many
rows come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from deep_comm import checks
from deep_comm.backends import Launch
from deep_comm.context import Context
from deep_comm.expansion import Expansion
from deep_comm.internode_handle import InternodeHandle
from deep_comm.ops.call import CallOptions
from deep_comm.ops.internode import DispatchResult, launch_dispatch
from deep_comm.ops.internode_expand import expand_received, number_received
from deep_comm.ops.internode_notify import TierRouting
from deep_comm.ops.internode_outputs import (
    TierOutputs,
    TierReservation,
    allocate,
    outputs_in,
    reserve_unknown,
)
from deep_comm.ops.internode_plan import (
    FILL_TAIL,
    IS_EARLY,
    ZERO_TAIL,
    TwoTierPlan,
    dispatch_launcher,
    notify_launcher,
    plan_two_tiers,
)
from deep_comm.ops.new_routing import checked_new_routing
from deep_comm.ops.notify import Counts, counts_of
from deep_comm.ops.outputs import RowTensors
from deep_comm.ops.quick import remember_new_tier_dispatch
from deep_comm.ops.scales import PLAIN, ScaleOptions, allocate_source, inputs_of, turn_scales
from deep_comm.tier_parts import TierSlabLayout, tier_slab_layout
from deep_comm.topology import num_local_experts


class NewTierDispatch:
    """As ops.dispatch.NewDispatch: checked and planned when it is made; then ``send``; ``receive``,
    where the host waits for counts, unless there are num_worst_tokens; ``end``.
    """

    __slots__ = (
        "_alignment", "_counts", "_expand", "_expects_counts", "_idx", "_launch", "_layout",
        "_num_experts", "_num_topk", "_options", "_out", "_payload", "_plan", "_reserved",
        "_routing", "_scale_options", "_slab_of", "_source", "_weights", "_zero_padding",
        "_zero_tail", "ctx", "num_worst_tokens",
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
        self._options = options
        self._plan = plan_two_tiers(
            ctx,
            options,
            payload.row_bytes,
            payload.scale_row_bytes,
            self._num_topk,
        )
        self._slab_of = _slab_layouts(ctx, self._plan, self._num_experts, self._layout is None)
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
        self._routing = self._routing_in(None)
        self._routing.launch(
            ctx, launch, self._plan, payload, self._idx, self._weights, self._alignment
        )
        ctx.may_be_read = False  # by whatever is launched behind this: the rail peers have come
        num_forward = ctx.expected.forwarded(payload.num_tokens)
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
        counts = self._counts = counts_of(ctx, ctx.wait_tier_counts(self._expects_counts))
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
        self._move_at_last()

    def receive_unmoved(self, launch: Launch, unmoved: UnmovedTierRows) -> None:
        """``send`` and ``receive`` where a native step has done all but move the rows."""
        self._launch, self._source = launch, 0
        self._routing = self._routing_in(unmoved.slab)
        self._counts = unmoved.counts
        self._move_at_last()

    def _routing_in(self, slab: tuple[int, tuple[Any, ...]] | None) -> TierRouting:
        layout = self._slab_of(self._payload.num_tokens)
        return TierRouting(self.ctx, self._launch, layout, self._num_experts, self._layout, slab)

    def _move_at_last(self) -> None:
        """Rows that no early launch has moved, now that their number is known."""
        self._launch.follow_caller()
        self._out = self._allocate(self._counts.num_recv_tokens, self._counts.num_forward_tokens)
        self._move(self._out)

    def end(self) -> DispatchResult:
        """What follows the rows, and the end of the operation."""
        ctx, launch, out = self.ctx, self._launch, self._out
        routing, counts = self._routing, self._counts
        rows: RowTensors = out
        expansion: Expansion | None = None
        if self._expand:
            expansion = number_received(
                ctx,
                launch,
                self._plan,
                out,
                routing.num_received,
                num_local_experts(ctx.rank, self._num_experts, ctx.num_ranks),
                self._alignment,
                self.num_worst_tokens if counts is None else sum(counts.num_recv_tokens_per_expert),
            )
            rows = expand_received(
                ctx, launch, self._plan, self._payload, out, routing.num_received, expansion,
                self._zero_padding,
            )  # fmt: skip
        if self._scale_options.column_major:
            turn_scales(ctx, launch, self._plan, rows)
        inputs = [*inputs_of(self._payload), self._idx, self._weights]
        layout = self._layout
        if layout is not None:
            inputs += layout.num_tokens_per_rank, layout.num_tokens_per_expert
            inputs.append(layout.is_token_in_rank)
        event = launch.finish(inputs)
        handle = InternodeHandle.fresh(
            routing.fresh(ctx, out),
            rank=ctx.rank,
            num_experts=self._num_experts,
            num_topk=self._num_topk,
            num_recv_tokens=None if counts is None else counts.num_recv_tokens,
            max_num_tokens=None if counts is None else counts.max_num_tokens,
            members=ctx.members,
            num_returning_rows=None if counts is None else counts.num_returning_rows,
            expansion=expansion,
            home_stream=launch.home_stream,
        )
        per_expert = [] if counts is None else counts.num_recv_tokens_per_expert
        return rows.payload, rows.topk_idx, rows.topk_weights, per_expert, handle, event

    def remember(self) -> None:
        """The next call of this form takes one native step, if it can."""
        idx, out, form = self._idx, self._out, self._payload.form
        if self._scale_options is not PLAIN or idx is None or out.output_offset == 0:
            return
        ctx, plan, num_experts = self.ctx, self._plan, self._num_experts
        remember_new_tier_dispatch(
            ctx, self._options, form, idx,
            num_experts=num_experts,
            alignment=self._alignment,
            has_layout=self._layout is not None,
            is_expanded=False,  # rows are numbered and gathered behind the step
            num_local_blocks=plan.num_local_blocks,
            notify=notify_launcher(
                ctx, plan, form, self._num_topk, num_experts, self._alignment
            ),
            launch=dispatch_launcher(ctx, plan, form, self._num_topk, idx.element_size()),
            slab_of=self._slab_of,
        )  # fmt: skip

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
        routing, is_bounded = self._routing, self.num_worst_tokens > 0
        launch_dispatch(
            self.ctx,
            self._launch,
            self._plan,
            self._payload,
            self._idx,
            self._weights,
            routing.numbers,
            (routing.combine_start, routing.forward_places),
            is_bounded * (FILL_TAIL + ZERO_TAIL * self._zero_tail) + IS_EARLY * is_early,
            out,
            self._source,
        )


class UnmovedTierRows(NamedTuple):
    """What a native step leaves of a dispatch whose rows it could not move."""

    slab: tuple[int, tuple[Any, ...]]  # its address and what keeps it, arguments of Memory
    counts: Counts


def _slab_layouts(
    ctx: Context, plan: TwoTierPlan, num_experts: int, has_mask: bool
) -> Callable[[int], TierSlabLayout]:
    """By number of tokens. Native code holds it, and so it holds no Context."""
    experts = num_local_experts(ctx.rank, num_experts, ctx.num_ranks), num_experts
    sizes = ctx.topology.num_nodes, ctx.num_ranks, plan.num_channels, experts
    has_places = ctx.num_direct_bytes > 0

    def slab_of(num_tokens: int) -> TierSlabLayout:
        return tier_slab_layout(*sizes, num_tokens, has_places, has_mask)

    return slab_of
