"""dispatch: notify the peers, learn how many rows come, allocate, move. And its cached form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from deep_comm import checks
from deep_comm.backends import Launch
from deep_comm.checks import Payload
from deep_comm.config import Config, require_config
from deep_comm.context import Context
from deep_comm.events import EventOverlap
from deep_comm.expansion import Expansion
from deep_comm.handle import Handle
from deep_comm.handle_parts import Slab
from deep_comm.handle_parts import slab_layout as slab_layout_of
from deep_comm.ops.call import StreamOptions
from deep_comm.ops.expand import (
    Numbering,
    cached_arguments,
    expand_rows,
    require_expanded,
)
from deep_comm.ops.new_routing import checked_new_routing
from deep_comm.ops.notify import (
    NO_EXPANSION,
    NOWHERE,
    Counts,
    Notified,
    Place,
    counts_of,
    launch_notify,
)
from deep_comm.ops.outputs import (
    Outputs,
    Reservation,
    allocate,
    allocate_cached,
    outputs_anywhere,
    outputs_in,
    reserve,
    reserve_most,
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
from deep_comm.ops.quick import remember_dispatch, remember_new_dispatch
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


class NewDispatch:
    """A dispatch with new routing: checked and planned when it is made; then ``send``; ``receive``,
    where the host waits for counts; ``end``.

    With num_worst_tokens there is nothing to wait for, and no ``receive``.
    """

    __slots__ = (
        "_alignment",
        "_idx",
        "_launch",
        "_layout",
        "_max_num_tokens",
        "_named",
        "_notified",
        "_num_experts",
        "_num_recv_tokens",
        "_num_rows",
        "_num_topk",
        "_numbering",
        "_expansion",
        "_out",
        "_payload",
        "_per_expert",
        "_places",
        "_plan",
        "_reserved",
        "_row_idx",
        "_row_weights",
        "_scale_options",
        "_slab_layout",
        "_source",
        "_weights",
        "_zero_padding",
        "_zero_tail",
        "ctx",
        "num_worst_tokens",
    )

    def __init__(
        self,
        ctx: Context,
        x: Any,
        scale_options: ScaleOptions,
        *,
        config: Config | None,
        default: Config | DefaultConfig | None,
        **given: Any,
    ) -> None:
        """``given``: as checked_new_routing has it."""
        routing = checked_new_routing(ctx, x, scale_options, **given)
        payload, idx, weights, layout, num_experts = routing
        expert_alignment, expand = given["expert_alignment"], given["expand"]
        if expand:  # counts that contradict the choices would put rows past their groups
            layout = None
        num_topk, topk_idx_bytes = (0, 0) if idx is None else (idx.shape[1], idx.element_size())
        key = (
            config, default, payload.form, num_topk, topk_idx_bytes, num_experts, expert_alignment,
            layout is None, expand,
        )  # fmt: skip
        if config is not None and type(config) is not Config:
            require_config(config)  # or it might be no key
        self._plan: DispatchPlan = ctx.calls.get(key) or plan_new(ctx, key, *key)
        self._slab_layout = slab_layout_of(
            ctx.num_ranks, self._plan.rings.num_channels,
            num_local_experts(ctx.rank, num_experts, ctx.num_ranks), payload.num_tokens,
            layout is None,
        )  # fmt: skip
        self.ctx, self._payload, self._layout = ctx, payload, layout
        self._idx, self._weights = idx, weights
        self._named = config, default
        self._num_experts, self._alignment = num_experts, expert_alignment
        self.num_worst_tokens, self._zero_tail = given["num_worst_tokens"], given["zero_tail"]
        self._zero_padding, self._scale_options = given["zero_padding"], scale_options
        self._num_topk = num_topk
        # Of a received token, and of the shape that outputs have.
        self._places, self._row_idx, self._row_weights = 0, idx, weights
        if expand:
            assert idx is not None
            self._places, self._row_idx = num_topk, idx[:, :1]
            self._row_weights = None if weights is None else weights[:, :1]
        self._numbering: Numbering | None = None
        self._expansion: Expansion | None = None
        self._num_recv_tokens: int | None = None
        self._max_num_tokens: int | None = None
        self._per_expert: list[int] = []

    def send(self, launch: Launch) -> None:
        """Counts, and rows if they can already move: they may before this host knows how many they
        are (docs/design/0009).
        """
        ctx, payload, num_rows = self.ctx, self._payload, self.num_worst_tokens
        row_idx, places, slab_bytes = self._row_idx, self._places, self._slab_layout.num_bytes
        self._launch = launch
        self._source = 0
        if self._scale_options is not PLAIN:
            self._source = allocate_source(ctx, launch, payload)
        if places > 0:
            assert self._idx is not None
            self._numbering = Numbering(ctx, None, self._num_experts, self._idx, launch)
        if num_rows > 0:
            self._num_rows = num_rows
            reserved = reserve(ctx, launch, payload, row_idx, num_rows, slab_bytes, places)
            row_weights = self._row_weights
            if reserved is None:
                out = outputs_anywhere(ctx, launch, payload, row_idx, row_weights, num_rows, places)
            else:
                out = outputs_in(ctx, reserved, payload, row_idx, row_weights, num_rows, places)
            self._out = out
            self._notify(reserved, False)
            self._move(out, num_rows, FILL_TAIL | (ZERO_TAIL if self._zero_tail else 0))
            return
        choices = ctx.expected.choices(payload.num_tokens)
        if places > 0:
            choices = ctx.expected.expanded_choices(
                payload.num_tokens, places, self._num_experts, self._alignment
            )
        reserved = reserve_most(ctx, launch, payload, row_idx, choices, slab_bytes, places)
        self._reserved = reserved
        self._notify(reserved, True)
        if reserved is not None:
            self._move(Outputs.blank(ctx, reserved), reserved.num_rows, IS_SPECULATIVE)

    def receive(self) -> None:
        """Waits until the counts have come; tensors of so many rows."""
        ctx, reserved = self.ctx, self._reserved
        self._reserved = None
        counts = counts_of(ctx, ctx.wait_counts())
        self._learn(counts)
        if counts.is_direct:
            assert reserved is not None
            self._out = outputs_in(ctx, reserved, self._payload, *self._rows_come())
            return
        if reserved is not None:  # some rank has no room for so many; all launch again
            reserved.keep_slab()
            del reserved
        self._move_at_last()

    def receive_unmoved(self, launch: Launch, unmoved: UnmovedRows) -> None:
        """``send`` and ``receive`` where a native step has done all but move the rows."""
        self._launch = launch
        self._source = allocate_source(self.ctx, launch, self._payload)
        if unmoved.numbering is not None:
            assert self._idx is not None
            self._numbering = Numbering(
                self.ctx, unmoved.numbering, self._num_experts, self._idx, launch
            )
        self._notified = Notified(
            self.ctx, launch, self._slab_layout, self._num_experts, self._layout, unmoved.slab
        )
        self._learn(unmoved.counts)
        self._move_at_last()

    def _learn(self, counts: Counts) -> None:
        expected, num_rows = self.ctx.expected, counts.num_recv_tokens
        self._num_recv_tokens = num_rows
        self._max_num_tokens = counts.max_num_tokens
        self._per_expert = counts.num_recv_tokens_per_expert
        if self._numbering is None:
            expected.learn(num_rows, counts.max_num_tokens)
        else:
            num_rows = sum(self._per_expert)
            expected.learn_expanded(num_rows, counts.max_num_tokens)
        self._num_rows = num_rows

    def _rows_come(self) -> tuple[Tensor | None, Tensor | None, int, int]:
        return self._row_idx, self._row_weights, self._num_rows, self._places

    def _move_at_last(self) -> None:
        """Rows that no early launch has moved, now that their number is known."""
        ctx, launch = self.ctx, self._launch
        launch.follow_caller()
        self._out = allocate(ctx, launch, self._payload, *self._rows_come())
        self._move(self._out, self._num_rows)

    def end(self) -> DispatchResult:
        """What follows the rows, and the end of the operation."""
        ctx, launch, rings, out = self.ctx, self._launch, self._plan.rings, self._out
        if self._numbering is not None:
            num_tokens = self._num_recv_tokens
            self._expansion = self._numbering.expansion(
                out, self._num_rows, self._num_rows if num_tokens is None else num_tokens,
                self._alignment,
            )  # fmt: skip
            expand_rows(
                ctx, launch, rings, self._payload, self._expansion, self._notified.slab.address,
                out, zero_padding=self._zero_padding, fill_handle=num_tokens is None,
            )  # fmt: skip
        if self._scale_options.column_major:
            turn_scales(ctx, launch, rings, out)
        inputs = [self._payload.x, self._payload.scales, self._idx, self._weights]
        if self._scale_options is not PLAIN:
            inputs += inputs_of(self._payload)
        layout = self._layout
        if layout is not None:
            inputs += layout.num_tokens_per_expert, layout.is_token_in_rank
        event = launch.finish(inputs)
        notified = self._notified
        handle = Handle.fresh(
            ctx.owner, notified.slab, notified.storage, notified.mask, out.src_rows, out.src_idx,
            notified.routing,
            rank=ctx.rank,
            num_experts=self._num_experts,
            num_topk=self._num_topk,
            num_recv_tokens=self._num_recv_tokens,
            max_num_tokens=self._max_num_tokens,
            members=ctx.makers,
            has_default_sms=self._named[0] is None and isinstance(self._named[1], DefaultConfig),
            home_stream=launch.home_stream,
            expansion=self._expansion,
        )  # fmt: skip
        return out.payload, out.topk_idx, out.topk_weights, self._per_expert, handle, event

    def remember(self) -> None:
        """The next call of this form takes one native step, if it can."""
        if self._scale_options.cast >= 0 and self._idx is not None and self._out.output_offset != 0:
            config, default = self._named
            remember_new_dispatch(
                self.ctx, config, default, self._plan, self._payload.form, self._idx,
                num_experts=self._num_experts,
                alignment=self._alignment,
                has_layout=self._layout is not None,
                is_expanded=self._numbering is not None,
            )  # fmt: skip

    def _notify(self, reserved: Reservation | None, is_exact: bool) -> None:
        ctx, launch, numbering = self.ctx, self._launch, self._numbering
        if reserved is None:
            slab, place = None, NOWHERE
        else:
            slab = reserved.slab(ctx, self._slab_layout)
            place = Place(reserved.block.offset, reserved.src_offset, reserved.num_rows, is_exact)
        self._notified = Notified(
            ctx, launch, self._slab_layout, self._num_experts, self._layout, slab
        )
        launch_notify(
            ctx, launch, self._plan, self._payload, self._idx, self._weights, self._notified,
            self._layout, place,
            NO_EXPANSION if numbering is None else numbering.notify_arguments(),
        )  # fmt: skip
        if numbering is not None:
            assert self._idx is not None
            numbering.launch(ctx, launch, self._plan.rings, self._idx, self._num_experts)

    def _move(self, out: Outputs, num_rows: int, flags: int = 0) -> None:
        ctx, numbering, notified = self.ctx, self._numbering, self._notified
        _launch_dispatch(
            ctx, self._launch, self._plan, notified.routing, self._payload, self._idx,
            self._weights, num_rows, flags | FOLLOWS_NOTIFY, out,
            notified.recv_channel_prefix_matrix,
            NO_EXPANSION if numbering is None else numbering.dispatch_arguments(out),
            self._source,
        )  # fmt: skip


class UnmovedRows(NamedTuple):
    """What a native step leaves of a dispatch whose rows it could not move."""

    slab: Slab
    counts: Counts
    numbering: Tensor | None  # storage of a Numbering, of an expanded dispatch


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
    if scale_options.cast >= 0 and streams.is_quick and out.output_offset != 0:
        remember_dispatch(ctx, config, default, known, plan, form)
    return out.payload, None, None, None, None, event
