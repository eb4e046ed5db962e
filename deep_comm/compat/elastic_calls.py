"""ElasticBuffer's calls over deep_comm.Buffer's: what is the engine's, and what torch adds to
it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import deep_comm
from deep_comm.compat.ep_handle import AnyHandle, EPHandle
from deep_comm.compat.expand import (
    Expansion,
    num_rows_bound,
    reduce,
    reduce_weights,
    rows_in_order,
)
from deep_comm.compat.section import Section
from deep_comm.errors import ArgumentError, HandleMismatch
from deep_comm.events import EventHandle, EventOverlap
from deep_comm.ranks.topology import num_local_experts
from deep_comm.settings import checks, integers

Payload = Tensor | tuple[Tensor, Tensor]
DispatchResult = tuple[Payload, Tensor | None, Tensor | None, EPHandle, EventOverlap]
_Run = Callable[..., tuple[Any, ...]]  # options of Buffer.dispatch -> DispatchResult

_SCALE_ROW_ALIGNMENT = 4
_FLOATS_OF_ROW_ALIGNMENT = 4  # 16 bytes


@dataclass(frozen=True)
class Timing:
    """After what a call runs, and who waits for it."""

    events: list[EventHandle]
    is_async: bool

    def as_options(self) -> dict[str, Any]:
        """By the names of deep_comm.Buffer's calls, which take one event."""
        return {
            "previous_event": EventOverlap(self.events[0]) if self.events else None,
            "async_finish": self.is_async,
            "allocate_on_comm_stream": bool(self.events) and self.is_async,
        }


@dataclass(frozen=True)
class Rows:
    """How received rows are to lie."""

    do_expand: bool
    do_zero_padding: bool
    column_major_scales: bool


@dataclass(frozen=True)
class Routing:
    """What a dispatch without a handle is given beside its rows."""

    topk_idx: Tensor
    topk_weights: Tensor | None
    num_experts: int
    num_max_tokens_per_rank: int
    expert_alignment: int
    waits_for_counts: bool
    do_handle_copy: bool


class ElasticCalls:
    """dispatch and combine behind their checks."""

    _buffer: deep_comm.Buffer
    rank_idx: int
    num_ranks: int
    num_scaleup_ranks: int
    num_rdma_ranks: int
    allow_hybrid_mode: bool
    allow_multiple_reduction: bool

    def _dispatch(
        self, x: Payload, routing: Routing, stats: Tensor | None, rows: Rows, timing: Timing
    ) -> DispatchResult:
        num_worst_tokens = 0
        if not routing.waits_for_counts:
            num_worst_tokens = routing.num_max_tokens_per_rank * self.num_ranks
            if rows.do_expand:
                context = self._buffer._context  # the engine looks at them later
                checks.num_experts(routing.num_experts, context.num_max_experts)
                checks.tensor(
                    "topk_idx", routing.topk_idx, context.device, shape=[None, None],
                    contiguous=False,
                )  # fmt: skip
                num_worst_tokens = num_rows_bound(
                    num_worst_tokens,
                    routing.topk_idx.shape[1],
                    num_local_experts(self.rank_idx, routing.num_experts, self.num_ranks),
                    routing.expert_alignment,
                )

        def run(**options: Any) -> tuple[Any, ...]:
            recv, recv_idx, recv_weights, counts, native, event = self._buffer.dispatch(
                x,
                topk_idx=routing.topk_idx,
                topk_weights=routing.topk_weights,
                num_experts=routing.num_experts,
                num_worst_tokens=num_worst_tokens,
                # Counts as they are, unless rows lie by them: the handle has both.
                expert_alignment=routing.expert_alignment if rows.do_expand else 1,
                expand=rows.do_expand,
                zero_padding=rows.do_expand and rows.do_zero_padding,
                **options,
            )
            assert native is not None and recv_idx is not None
            topk_idx = routing.topk_idx
            made = EPHandle(
                native,
                self.rank_idx,
                recv_idx,
                topk_idx.clone() if routing.do_handle_copy else topk_idx,
                counts=counts if routing.waits_for_counts else None,
                do_expand=rows.do_expand,
                num_experts=routing.num_experts,
                expert_alignment=routing.expert_alignment,
                num_max_tokens_per_rank=routing.num_max_tokens_per_rank,
                num_scaleup_ranks=self.num_scaleup_ranks,
            )
            return recv, recv_idx, recv_weights, made, event

        inputs = tensors(x, routing.topk_idx, routing.topk_weights)
        return self._run_dispatch(run, inputs, stats, rows, timing)

    def _cached_dispatch(
        self, x: Payload, handle: EPHandle, topk_weights: Tensor | None, rows: Rows, timing: Timing
    ) -> DispatchResult:
        handle = handle.with_expand(rows.do_expand)
        if topk_weights is not None:
            first = x[0] if isinstance(x, (tuple, list)) and x else x
            num_tokens = first.shape[0] if isinstance(first, Tensor) and first.dim() else None
            checks.tensor(
                "topk_weights", topk_weights, self._buffer.device, shape=[num_tokens, None],
                dtypes={torch.float32},
            )  # fmt: skip
            num_topk = handle.topk_idx.shape[1]
            if topk_weights.shape[1] != num_topk:
                raise HandleMismatch(
                    "topk_weights", list(topk_weights.shape),
                    f"must have the handle's {num_topk} columns",
                )  # fmt: skip

        def run(**options: Any) -> tuple[Any, ...]:
            if handle.is_expanded_by_engine:
                options.update(expand=True, zero_padding=rows.do_zero_padding)
            recv, _, _, _, _, event = self._buffer.dispatch(x, handle=handle.native, **options)
            recv_weights = None
            if topk_weights is not None:
                recv_weights = self._cached_weights(topk_weights, handle)
            # Made where it is asked for: an expanded dispatch has no use for it.
            recv_idx = None if rows.do_expand else handle.recv_topk_idx
            return recv, recv_idx, recv_weights, handle, event

        is_made_by_torch = not rows.do_expand and handle.compact is not handle._native
        return self._run_dispatch(
            run,
            tensors(x, topk_weights),
            None,
            rows,
            timing,
            in_section=topk_weights is not None or is_made_by_torch,
            by_torch=rows.do_expand and not handle.is_expanded_by_engine,
        )

    def _cached_weights(self, topk_weights: Tensor, handle: EPHandle) -> Tensor:
        """Weights take the way of the rows: as rows, filled up to what a row must be a multiple
        of."""
        num_tokens, num_topk = topk_weights.shape
        rows = topk_weights.new_zeros(
            num_tokens, integers.round_up(num_topk, _FLOATS_OF_ROW_ALIGNMENT)
        )
        rows[:, :num_topk] = topk_weights
        received = self._buffer.dispatch(rows, handle=handle.compact)[0]
        assert isinstance(received, Tensor)
        weights = torch.where(handle.is_selected_here, received[:, :num_topk], 0.0)
        if not handle.is_expanded_by_engine:
            return weights
        return Expansion(handle.dispatched_slots, handle.num_expanded_tokens).weights(weights)

    def _run_dispatch(
        self,
        run: _Run,
        inputs: list[Tensor],
        stats: Tensor | None,
        rows: Rows,
        timing: Timing,
        in_section: bool = False,
        by_torch: bool = False,
    ) -> DispatchResult:
        """``run`` alone if nothing is to be done to its results, else both in one section.

        ``by_torch``: rows come once, with a handle of a compact dispatch, and are expanded here.
        """
        is_capturing = self._is_capturing()
        if not (
            by_torch or rows.column_major_scales or in_section or len(timing.events) > 1
        ) and not (timing.is_async and (is_capturing or stats is not None)):
            recv, recv_idx, recv_weights, handle, event = run(**timing.as_options())
            if stats is not None:
                stats += handle.num_unaligned_recv_tokens_per_expert
            if is_capturing:
                handle.materialise()
            return recv, None if rows.do_expand else recv_idx, recv_weights, handle, event

        section = Section(self._buffer, timing.events, timing.is_async)
        with section:
            recv, recv_idx, recv_weights, handle, _ = run()
            if stats is not None:
                stats += handle.num_unaligned_recv_tokens_per_expert
            made = handle.materialise() if is_capturing else []
            recv_x, recv_sf = recv if isinstance(recv, tuple) else (recv, None)
            if by_torch:
                expansion = Expansion(handle.dispatched_slots, handle.num_expanded_tokens)
                recv_x = expansion.rows(recv_x, rows.do_zero_padding)
                if recv_sf is not None:
                    recv_sf = expansion.rows(recv_sf, rows.do_zero_padding)
                if recv_weights is not None:
                    recv_weights = expansion.weights(recv_weights)
            if recv_sf is not None and rows.column_major_scales:
                recv_sf = _column_major(recv_sf)
        outputs = [recv_x, recv_sf, recv_weights, *made, *handle.tensors()]
        event = section.finish([*inputs, *([] if stats is None else [stats])], outputs)
        recv = recv_x if recv_sf is None else (recv_x, recv_sf)
        return recv, None if rows.do_expand else recv_idx, recv_weights, handle, event

    def _combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None,
        bias: Tensor | tuple[Tensor, Tensor] | None,
        timing: Timing,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        num_cut = max(handle.num_cut_rows, 0)
        if handle.do_expand or x.shape[0] != handle.num_recv_tokens - num_cut:
            num_cut = 0
        is_plain = not handle.do_expand and topk_weights is None and num_cut == 0
        is_engines = handle.is_expanded_by_engine and not handle.is_metadata_lent
        by_selection = handle.do_expand and not self.allow_multiple_reduction
        is_added_once = by_selection or (
            self.num_rdma_ranks > 1
            and not (self.allow_multiple_reduction and self.allow_hybrid_mode)
        )
        # One rank has no order, and sums of two that start from nothing have none either.
        order = handle.topk_idx if self.num_ranks > (2 if bias is None else 1) else None
        if not is_added_once and (is_plain or is_engines) and len(timing.events) < 2:
            return self._buffer.combine(
                x, handle.native, topk_weights, bias, topk_idx=order, **timing.as_options()
            )
        num_rows = handle.num_expanded_tokens
        if handle.do_expand and not handle.is_metadata_lent and x.shape[0] != num_rows:
            raise HandleMismatch(
                "handle", f"{num_rows} expanded rows",
                f"must be of a dispatch that returned as many rows as x has ({x.shape[0]})",
            )  # fmt: skip
        biases = tensors(bias)
        if is_added_once:  # else the engine looks at them
            if isinstance(bias, (tuple, list)) and len(bias) != 2:
                raise ArgumentError(
                    "bias", f"{len(bias)} items", "must be a tensor or a pair of tensors"
                )
            shape = (handle.topk_idx.shape[0], x.shape[1])
            for one in biases:
                checks.tensor("bias", one, x.device, shape=shape, dtypes={x.dtype})
        inputs = [*tensors(x, topk_weights), *biases]
        section = Section(self._buffer, timing.events, timing.is_async)
        with section:
            if num_cut > 0:
                x = torch.nn.functional.pad(x, (0, 0, 0, num_cut))
                if topk_weights is not None:
                    topk_weights = torch.nn.functional.pad(topk_weights, (0, 0, 0, num_cut))
            if is_added_once:
                combined_x, combined_weights = self._add_once(
                    x, topk_weights, biases, handle, by_selection
                )
            else:
                rows, weights, native = self._rows_for_combine(x, topk_weights, handle)
                combined_x, combined_weights, _ = self._buffer.combine(
                    rows, native, weights, bias, topk_idx=order
                )
        event = section.finish([*inputs, *handle.tensors()], [combined_x, combined_weights])
        return combined_x, combined_weights, event

    def _rows_for_combine(
        self, x: Tensor, topk_weights: Tensor | None, handle: EPHandle
    ) -> tuple[Tensor, Tensor | None, AnyHandle]:
        """x, weights and handle as the engine takes them."""
        if handle.is_expanded_by_engine:
            return x, topk_weights, handle.rewritten(x.shape[0])
        if handle.do_expand:
            rows = reduce(x, handle.slots)
            if topk_weights is not None:
                topk_weights = reduce_weights(topk_weights, handle.slots)
            return rows, topk_weights, handle.compact
        if topk_weights is not None:
            # A selection's weight comes from the rank of its expert alone.
            topk_weights = torch.where(handle.is_selected_here, topk_weights, 0.0)
        return x, topk_weights, handle.compact

    def _add_once(
        self,
        x: Tensor,
        topk_weights: Tensor | None,
        biases: list[Tensor],
        handle: EPHandle,
        by_selection: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Every row goes home by itself, and the token's rank adds them in one sum."""
        route = handle.route(self._buffer, by_selection, self._is_capturing())
        if by_selection:
            slots, num_rows = handle.slots, route.num_recv_rows
            arrived = handle.is_selected_here
            x = rows_in_order(x, slots, arrived, num_rows)
            if topk_weights is not None:
                topk_weights = rows_in_order(topk_weights.view(-1, 1), slots, arrived, num_rows)
        elif handle.do_expand:
            x = reduce(x, handle.slots)
            if topk_weights is not None:
                topk_weights = reduce_weights(topk_weights, handle.slots)
        elif topk_weights is not None:
            topk_weights = torch.where(handle.is_selected_here, topk_weights, 0.0)
        rows, weights, _ = self._buffer.combine(x, route, topk_weights)
        num_tokens, num_topk = handle.topk_idx.shape
        # Tokens of the route that went nowhere have returned zeros.
        every = torch.arange(num_tokens * num_topk, device=rows.device).view(num_tokens, num_topk)
        combined_x = reduce(rows, every, biases)
        if weights is not None:
            # A selection's weight has come from one rank.
            weights = weights.view(num_tokens, num_topk, weights.shape[1])
            weights = weights.squeeze(2) if by_selection else weights.sum(1)
        return combined_x, weights

    def _is_capturing(self) -> bool:
        return self._buffer.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def tensors(*values: Any) -> list[Tensor]:
    """The tensors among ``values`` and in pairs of them."""
    found: list[Tensor] = []
    for value in values:
        parts: Sequence[Any] = value if isinstance(value, (tuple, list)) else (value,)
        found += [part for part in parts if isinstance(part, Tensor)]
    return found


def _column_major(sf: Tensor) -> Tensor:
    """[rows, S] with strides (1, rows rounded up to 4)."""
    num_rows, num_columns = sf.shape
    storage = sf.new_empty(num_columns, integers.round_up(num_rows, _SCALE_ROW_ALIGNMENT))
    out = storage.t()[:num_rows]
    out.copy_(sf)
    return out
