"""The methods of Buffer that move rows: dispatch and combine as training and prefill want them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from deep_comm.config import Config
from deep_comm.defaults import DefaultConfigs
from deep_comm.errors import ArgumentError
from deep_comm.events import EventOverlap
from deep_comm.handle import Handle
from deep_comm.internode_handle import InternodeHandle
from deep_comm.ops import internode, internode_combine
from deep_comm.ops.call import SYNCHRONOUS, StreamOptions
from deep_comm.ops.combine import combine
from deep_comm.ops.dispatch import (
    DispatchResult,
    NewDispatch,
    UnmovedRows,
    cached_dispatch,
)
from deep_comm.ops.internode_dispatch import NewTierDispatch, UnmovedTierRows
from deep_comm.ops.layout import get_dispatch_layout
from deep_comm.ops.quick_new import begin_quick, expanded_arguments, send_new
from deep_comm.ops.quick_new_tiers import expand_sent, send_new_tiers
from deep_comm.ops.scales import PLAIN, ScaleOptions, options_of
from deep_comm.ops.steps import PendingDispatch, begin_dispatch, dispatch, dispatch_unmoved
from deep_comm.tuning import DefaultConfig


class NormalCalls(DefaultConfigs):
    """Dispatch and combine for any number of tokens, inside a node or between nodes.

    R ranks, T tokens of this rank, H hidden, K top-k, E experts, L local experts, N received rows.
    """

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Count the tokens that go to each rank and expert. Local: no peer takes part.

        Args:
            topk_idx: int64 or int32 [T, K], global expert indices, -1: no selection. An expert may
                stand in a row twice.
            num_experts: E.
            previous_event, async_finish, allocate_on_comm_stream: as of dispatch.

        Returns:
            num_tokens_per_rank: int32 [R], a token counts once per rank.
            num_tokens_per_rdma_rank: int32 [nodes], a token counts once per node; None inside one
                node.
            num_tokens_per_expert: int32 [E], every selection counts.
            is_token_in_rank: bool [T, R].
            event: EventOverlap; empty without async_finish.

        Raises:
            ArgumentError: nothing was launched.
            ExpertIndexError: an index out of range; on CUDA devices dispatch raises it, on all
                ranks.
        """
        ctx, event = self._context, None
        if previous_event is not None or async_finish or allocate_on_comm_stream:
            streams = StreamOptions.checked(previous_event, async_finish, allocate_on_comm_stream)
            event = streams.previous_event
        if ctx.pending is not None:
            ctx.pending.settle()
        made: tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap] = ctx.get_dispatch_layout(
            topk_idx, num_experts, event, async_finish, allocate_on_comm_stream
        )
        return made

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        handle: Handle | InternodeHandle | Sequence[Tensor] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        *,
        num_experts: int | None = None,
        zero_tail: bool = False,
        expand: bool = False,
        zero_padding: bool = False,
        use_fp8: bool = False,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        column_major_scales: bool = False,
    ) -> DispatchResult:
        """Send each token to the ranks of its experts. Collective.

        Args:
            x: [T, H] of any dtype, contiguous, rows a multiple of 16 bytes; or (x, scales) with
                scales [T, S] of 1, 2, 4 or 8 bytes each, any strides. T may differ between ranks
                and be 0.
            handle: of an earlier dispatch: repeat its routing with this x (cached dispatch). The
                layout and top-k arguments are then left away.
            num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert: from get_dispatch_layout.
                With topk_idx and num_experts they may be left away together. Tokens go where
                is_token_in_rank says; num_tokens_per_expert makes the returned counts. With expand
                inside a node both are made anew of topk_idx; between nodes counts that
                are too small end with CapacityError.
            num_tokens_per_rank, num_tokens_per_rdma_rank: only their form is checked: the mask says
                it all.
            topk_idx: int64 or int32 [T, K]; travels with the tokens. On all ranks, or on none.
            topk_weights: float32 [T, K]; travels with topk_idx, likewise.
            expert_alignment: the returned counts are rounded up to multiples of it.
            num_worst_tokens: if positive, N is this number and the host waits for nothing. Rows
                past the received ones have index -1 and weight 0; their payload is not written. How
                many came is in the handle, on the device: num_recv_tokens_tensor [1],
                num_recv_tokens_per_rank [R], num_recv_tokens_per_expert [L].
            zero_tail: write zeros there, and to the scales.
            config: rings and SMs; default: the recommended ones, shrunk to num_nvl_bytes.
            previous_event: run behind this event alone, not behind the current stream.
            async_finish: run on the Buffer's own stream and return an event to wait for.
            allocate_on_comm_stream: outputs are that stream's; needs the two before.
            num_experts: E, with topk_idx instead of the three of the layout.
            expand: rows grouped by local expert instead, one for each selection, for grouped GEMMs:
                recv_x [M, H] (scales [M, S]), recv_topk_idx [M] the local expert of a row,
                recv_topk_weights [M] its weight, -1 and 0 where a row belongs to no token.
                ``handle.expansion`` says which rows are whose; groups start at multiples of
                expert_alignment, which must be equal on all ranks. Needs topk_idx. M is the sum of
                the returned counts, or num_worst_tokens, which must leave room for the padding too.
                A handle remembers it: cached dispatches and combines with it are expanded.
            zero_padding: with expand, rows of no token are zeros; otherwise they are not written.
            use_fp8: x is bfloat16 [T, H], H a multiple of 128, and travels as e4m3 with a float32
                scale for 128 columns, largest magnitude / 448, at least 1e-4 / 448: recv_x is a
                pair as if the caller had quantised x. Rows are cast once, by their sender.
            round_scale: with use_fp8, scales are rounded up to powers of two.
            use_ue8m0: with round_scale, scales are exponent bytes, four in an int32 [N, ceil(S/4)].
            column_major_scales: scales of 4 bytes, quantised here or given, come back stored column
                by column, each column at a multiple of 16 bytes (one more pass over the scales).

        Returns:
            recv_x: [N, H], sorted by (source rank, source token); with scales (recv_x, [N, S]).
            recv_topk_idx: [N, K], local expert indices, -1 where the expert is on another rank; or
                None.
            recv_topk_weights: float32 [N, K], 0 where the index is -1; or None.
            num_recv_tokens_per_expert_list: L ints; [] with num_worst_tokens; None if cached.
            handle: for combine and cached dispatch; None if cached.
            event: EventOverlap; empty without async_finish.

        Raises:
            ArgumentError, BufferTooSmall, HandleMismatch: nothing was launched.
            ConfigMismatch, ExpertIndexError: on all ranks; the Buffer stays usable.
            CapacityError: more rows than num_worst_tokens arrived on this rank.
            PeerTimeout: a peer stayed silent; reset() makes the Buffer usable again.
            MaskedOut: the other ranks go on without this one (``reset(without=...)``).
            CallInterrupted: an earlier call was; reset() makes the Buffer usable again.
        """
        streams = SYNCHRONOUS
        if previous_event is not None or async_finish or allocate_on_comm_stream:
            streams = StreamOptions.checked(previous_event, async_finish, allocate_on_comm_stream)
        if handle is not None and (topk_idx is not None or topk_weights is not None):
            name = "topk_weights" if topk_idx is None else "topk_idx"
            raise ArgumentError(name, None, "must be left away with a handle")
        default = self._default("dispatch", config)
        unmoved: UnmovedRows | UnmovedTierRows | None = None
        scale_options = PLAIN
        if use_fp8 or round_scale or use_ue8m0 or column_major_scales:
            scale_options = options_of(use_fp8, round_scale, use_ue8m0, column_major_scales)
        cast = scale_options.cast
        is_plain = cast == 0 or (cast > 0 and not self._is_internode)
        if streams.is_quick and is_plain and (config is None or type(config) is Config):
            if type(handle) is Handle or type(handle) is InternodeHandle:
                received = None
                if handle.expansion is not None or not (expand or zero_padding):
                    received = self._quick_dispatch(
                        x, handle, config, default, streams, zero_padding, cast
                    )
                if received is not None:
                    return received
            elif handle is None:
                made = self._quick_new_dispatch(
                    streams, num_tokens_per_rdma_rank, x, topk_idx, topk_weights,
                    num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank, num_experts,
                    num_worst_tokens, expert_alignment, zero_tail, config, default, expand,
                    zero_padding, cast,
                )  # fmt: skip
                if isinstance(made, (UnmovedRows, UnmovedTierRows)):
                    unmoved = made
                elif made is not None:
                    return made
        given = dict(
            num_tokens_per_rank=num_tokens_per_rank,
            is_token_in_rank=is_token_in_rank,
            num_tokens_per_expert=num_tokens_per_expert,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_experts=num_experts,
            expert_alignment=expert_alignment,
            num_worst_tokens=num_worst_tokens,
            zero_tail=zero_tail,
            expand=expand,
            zero_padding=zero_padding,
        )
        if handle is not None:
            if self._is_internode:
                return internode.cached_internode_dispatch(
                    self._context,
                    x,
                    handle,
                    expand=expand,
                    zero_padding=zero_padding,
                    scale_options=scale_options,
                    options=self._options_between_nodes("dispatch", config, streams),
                )
            return cached_dispatch(
                self._context,
                x,
                handle,
                expand=expand,
                zero_padding=zero_padding,
                scale_options=scale_options,
                config=config,
                default=default,
                streams=streams,
            )
        call = self._new_dispatch(
            x, scale_options, config, default, streams, given, num_tokens_per_rdma_rank
        )
        if unmoved is not None:
            return dispatch_unmoved(call, unmoved, streams)
        return dispatch(call, streams)

    def _new_dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        scale_options: ScaleOptions,
        config: Config | None,
        default: Config | DefaultConfig | None,
        streams: StreamOptions,
        given: dict[str, Any],
        num_tokens_per_rdma_rank: Tensor | None,
    ) -> NewDispatch | NewTierDispatch:
        """The steps of a dispatch with new routing, inside a node or between nodes."""
        if self._is_internode:
            options = self._options_between_nodes("dispatch", config, streams)
            return NewTierDispatch(
                self._context,
                x,
                scale_options,
                num_tokens_per_rdma_rank=num_tokens_per_rdma_rank,
                options=options,
                **given,
            )
        return NewDispatch(self._context, x, scale_options, config=config, default=default, **given)

    def _begin_expanded_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        *,
        num_experts: int,
        expert_alignment: int,
        zero_padding: bool,
        use_fp8: bool,
    ) -> PendingDispatch:
        """dispatch with expand and async_finish, for the layer: returns before the host knows how
        many rows come. Collective."""
        given = expanded_arguments(
            topk_idx, topk_weights, num_experts, 0, expert_alignment, zero_padding
        )
        scale_options = options_of(use_fp8, False, False, False)
        streams = StreamOptions(None, True, False)
        default = self._default("dispatch", None)
        pending = begin_quick(
            self._context, streams, x, topk_idx, topk_weights, scale_options, default, given
        )
        if pending is not None:
            return pending
        call = self._new_dispatch(x, scale_options, None, default, streams, given, None)
        return begin_dispatch(call, streams)

    def combine(
        self,
        x: Tensor,
        handle: Handle | InternodeHandle | Sequence[Tensor],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        *,
        apply_weights: bool = False,
    ) -> tuple[Tensor, Tensor | Any, EventOverlap]:
        """Send rows back to their source and sum those of each token. Collective.

        The sum runs in float32 over the ranks that got the token, ascending, then over the biases,
        and is rounded once (between nodes also once a node, see InternodeCalls): it does not
        depend on ``config``. A token that went nowhere gives its bias, or zeros. Any number of
        combines may use one handle.

        Args:
            x: bfloat16, float16 or float32 [N, H], contiguous, rows a multiple of 16 bytes.
            handle: of the dispatch that returned N rows.
            topk_weights: float32 [N, K], summed alike.
            bias: [T, H] of the dtype of x, or a pair of such.
            apply_weights: with the handle of an expanded dispatch, whose x is [M, H] and
                topk_weights [M]: multiply rows with their weights, instead of sending these back.
                Either way each rank first adds a token's rows there, in float32, selections
                ascending, products rounded before they are added, the sum rounded to the dtype of x
                once; that row travels, and the sum over ranks is as above.
            config: of as many SMs as the dispatch had. Default: as many, and for few rows more
                where nobody has named a number (docs/guide/sms.md).
            previous_event, async_finish, allocate_on_comm_stream: as of dispatch.

        Returns:
            combined_x: [T, H] of the dtype of x.
            combined_topk_weights: float32 [T, K], or None.
            event: EventOverlap; empty without async_finish.

        Raises:
            ArgumentError, BufferTooSmall, HandleMismatch: nothing was launched.
            ConfigMismatch, PeerTimeout, MaskedOut: as dispatch.
        """
        streams = SYNCHRONOUS
        if previous_event is not None or async_finish or allocate_on_comm_stream:
            streams = StreamOptions.checked(previous_event, async_finish, allocate_on_comm_stream)
        default = self._default("combine", config)
        if (
            streams.is_quick
            and (type(handle) is Handle or type(handle) is InternodeHandle)
            and (config is None or type(config) is Config)
            and bias is None
        ):
            sums = self._quick_combine(
                x, topk_weights, handle, config, default, streams, apply_weights
            )
            if sums is not None:
                if self._is_internode:  # and it may have staged
                    self._context.may_be_read = self._context.reads_late
                return sums
        if self._is_internode:
            options = self._options_between_nodes("combine", config, streams)
            return internode_combine.internode_combine(
                self._context,
                x,
                handle,
                topk_weights=topk_weights,
                bias=bias,
                apply_weights=apply_weights,
                options=options,
            )
        return combine(
            self._context,
            x,
            handle,
            topk_weights=topk_weights,
            bias=bias,
            apply_weights=apply_weights,
            config=config,
            default=default,
            streams=streams,
        )

    # Calls in one native step, or None: see ops/quick.py.

    def _quick_dispatch(
        self,
        x: Any,
        handle: Handle | InternodeHandle,
        config: Config | None,
        default: Any,
        streams: StreamOptions,
        zero_padding: Any,
        cast: int,
    ) -> Any:
        ctx = self._context
        if streams.asynchronous is None:
            return ctx.quick.dispatch_along(ctx, handle, x, config, default, zero_padding, cast)
        known = handle.known_to(ctx.owner)
        if known is None or not ctx.is_sound():
            return None
        rows = ctx.quick.dispatch(
            x, known.numbers, known.home_stream, config, default, streams.asynchronous,
            zero_padding, cast,
        )  # fmt: skip
        if rows is None:
            return None
        ctx.end()
        return rows, None, None, None, None, streams.quick_end(ctx, known)

    def _quick_new_dispatch(
        self, streams: StreamOptions, num_tokens_per_rdma_rank: Any, *given: Any
    ) -> DispatchResult | UnmovedRows | UnmovedTierRows | None:
        """``given``: as send_new has it."""
        ctx = self._context
        if not self._is_internode:
            sent = send_new(ctx, streams, *given)
            return None if sent is None else sent.receive()
        rows = send_new_tiers(ctx, streams, num_tokens_per_rdma_rank, *given)
        if rows is None:
            return None
        received = rows.receive()
        if not given[12] or isinstance(received, UnmovedTierRows):
            return received
        return expand_sent(
            ctx,
            self._options_between_nodes("dispatch", given[10], streams),
            received,
            num_worst_tokens=given[7],
            expert_alignment=given[8],
            zero_padding=given[13],
        )

    def _quick_combine(
        self,
        x: Any,
        topk_weights: Any,
        handle: Handle | InternodeHandle,
        config: Config | None,
        default: Any,
        streams: StreamOptions,
        apply_weights: Any,
    ) -> tuple[Tensor, Tensor | Any, EventOverlap] | None:
        ctx = self._context
        if streams.asynchronous is None:
            made: tuple[Tensor, Tensor | Any, EventOverlap] | None = ctx.quick.combine_along(
                ctx, handle, x, topk_weights, config, default, apply_weights
            )
            return made
        known = handle.known_to(ctx.owner)
        if known is None or not ctx.is_sound():
            return None
        sums = ctx.quick.combine(
            x, topk_weights, known.numbers, known.home_stream, config, default,
            streams.asynchronous, apply_weights,
        )  # fmt: skip
        if sums is None:
            return None
        ctx.end()
        return sums[0], sums[1], streams.quick_end(ctx, known)
