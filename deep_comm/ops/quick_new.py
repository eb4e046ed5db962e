"""A dispatch with new routing in one native step, up to where the host waits; and the rest."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deep_comm.context import Context
from deep_comm.expansion import Expansion
from deep_comm.handle import Handle
from deep_comm.handle_parts import Memory, PlacedRows, Slab
from deep_comm.ops.call import StreamOptions
from deep_comm.ops.dispatch import DispatchResult, NewDispatch, UnmovedRows
from deep_comm.ops.expand import numbered_expansion
from deep_comm.ops.notify import counts_of
from deep_comm.ops.scales import ScaleOptions
from deep_comm.ops.steps import PendingDispatch, dispatch_unmoved
from deep_comm.tuning import DefaultConfig


class SentRows:
    """Of the one step. Its handle is made while the device counts."""

    __slots__ = (
        "_address", "_ctx", "_event", "_expansion", "_handle", "_layout", "_memory", "_num_topk",
        "_num_worst_tokens", "_receive", "_storage", "_streams",
    )  # fmt: skip

    def __init__(
        self,
        ctx: Context,
        streams: StreamOptions,
        made: tuple[Any, ...],
        is_token_in_rank: Tensor | None,
        num_worst_tokens: int,
        expert_alignment: int,
        has_default_sms: bool,
    ) -> None:
        """``made``: what the step returned."""
        layout, address, block, routing, home_stream, num_topk, numbered, receive = made
        heap = ctx.heap
        memory = heap.place, heap.memory(), block
        expansion: Expansion | None = None
        self._storage: Tensor | None = None
        if numbered is not None:
            self._storage, offsets, counts = numbered
            expansion = numbered_expansion(
                ctx.num_ranks, self._storage, offsets, counts, routing[0], layout.num_tokens,
                num_topk, expert_alignment,
            )  # fmt: skip
        self._handle = Handle.fresh_in_region(
            ctx.owner, layout, address, is_token_in_rank, routing, num_worst_tokens, memory,
            rank=ctx.rank,
            num_experts=routing[0],
            num_topk=num_topk,
            members=ctx.makers,
            has_default_sms=has_default_sms,
            home_stream=home_stream,
            expansion=expansion,
        )  # fmt: skip
        self._ctx, self._streams, self._memory, self._receive = ctx, streams, memory, receive
        self._layout, self._address, self._num_topk = layout, address, num_topk
        self._num_worst_tokens, self._expansion = num_worst_tokens, expansion
        # Expanded rows are complete behind the host's wait.
        self._event = streams.quick_end(ctx) if expansion is None else None

    def receive(self) -> DispatchResult | UnmovedRows:
        """Once. The host waits for the counts, unless there is a bound."""
        ctx, handle, expansion = self._ctx, self._handle, self._expansion
        rows, recv_idx, recv_weights, waited, num_rows, recv_rows, native = self._receive(
            ctx.owner, handle.has_default_sms
        )
        if rows is None:
            slab = Slab(self._layout, self._address, Memory(*self._memory))
            return UnmovedRows(slab, counts_of(ctx, waited), self._storage)
        handle.remember_native(native)
        per_expert: list[int] = []
        num_tokens = self._num_worst_tokens
        if waited is not None:
            num_tokens, max_num_tokens, _, per_expert = waited
            handle.complete(num_tokens, max_num_tokens)
            if expansion is None:
                ctx.expected.learn(num_tokens, max_num_tokens)
            else:
                ctx.expected.learn_expanded(num_rows, max_num_tokens)
        event = self._event
        if expansion is not None:
            places = PlacedRows(recv_rows, num_tokens, self._num_topk, self._memory)
            expansion.complete(num_rows, places)
            event = self._streams.quick_end(ctx)
        ctx.end()
        assert event is not None
        return rows, recv_idx, recv_weights, per_expert, handle, event


def send_new(ctx: Context, streams: StreamOptions, *given: Any) -> SentRows | None:
    """``given``: x, topk_idx, topk_weights, num_tokens_per_rank, num_tokens_per_expert,
    is_token_in_rank, num_experts, num_worst_tokens, expert_alignment, zero_tail, the Config or
    None, the default, expand, zero_padding, ScaleOptions.cast. None: nothing has happened; between
    nodes see send_new_tiers.
    """
    if ctx.quick.is_internode or not ctx.is_sound():
        return None
    made = ctx.quick.new_dispatch(*given[:12], streams.asynchronous, *given[12:])
    if made is None:
        return None
    has_default_sms = given[10] is None and isinstance(given[11], DefaultConfig)
    mask = None if given[12] else given[5]  # expanded: the engine's own, as in NewDispatch
    return SentRows(ctx, streams, made, mask, given[7], given[8], has_default_sms)


def expanded_arguments(
    topk_idx: Any,
    topk_weights: Any,
    num_experts: int,
    num_worst_tokens: int,
    expert_alignment: int,
    zero_padding: bool,
) -> dict[str, Any]:
    """Of NewDispatch, as the layer wants it."""
    return dict(
        num_tokens_per_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        num_experts=num_experts,
        expert_alignment=expert_alignment,
        num_worst_tokens=num_worst_tokens,
        zero_tail=False,
        expand=True,
        zero_padding=zero_padding,
    )


def begin_quick(
    ctx: Context,
    streams: StreamOptions,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    scale_options: ScaleOptions,
    default: Any,
    given: dict[str, Any],
) -> PendingDispatch | None:
    """Without num_worst_tokens, asynchronous, up to where the host would wait. ``given``: as
    NewDispatch has it; no layout. None: nothing has happened."""
    sent = send_new(
        ctx, streams, x, topk_idx, topk_weights, None, None, None, given["num_experts"], 0,
        given["expert_alignment"], False, None, default, given["expand"], given["zero_padding"],
        scale_options.cast,
    )  # fmt: skip
    if sent is None:
        return None

    def finish() -> DispatchResult:
        with ctx.backend.device_scope():
            received = sent.receive()
        if isinstance(received, UnmovedRows):
            call = NewDispatch(ctx, x, scale_options, config=None, default=default, **given)
            return dispatch_unmoved(call, received, streams)
        return received

    return PendingDispatch(ctx, finish)
