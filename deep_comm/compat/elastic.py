"""V2 of DeepEP's surface: ElasticBuffer and EPHandle over deep_comm.Buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import deep_comm
from deep_comm.buffer import DEFAULT_NUM_SMS
from deep_comm.compat.elastic_refused import Refused
from deep_comm.compat.ep_handle import EPHandle
from deep_comm.compat.expand import Expansion, num_rows_bound, reduce, reduce_weights
from deep_comm.compat.runtime import Runtime
from deep_comm.compat.section import Section
from deep_comm.errors import ArgumentError, HandleMismatch, UnsupportedError
from deep_comm.events import EventHandle, EventOverlap, unwrap
from deep_comm.handle import Handle
from deep_comm.rendezvous import Rendezvous
from deep_comm.topology import (
    discover,
    host_identity,
    num_local_experts,
    requested_ranks_per_node,
)

Payload = Tensor | tuple[Tensor, Tensor]

_SIZE_ALIGNMENT = 2 << 20
_RING_BYTES = 64 << 20  # what deep_comm.Buffer keeps for rings beside its receive region
_ROW_BYTES = 16
_OVERLAPPED_SMS, _ALONE_SMS = 24, 48
_SF_ALIGNMENT = 4


def _align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def get_physical_domain_size(group: Any) -> tuple[int, int]:
    """(nodes, ranks per node) of ``group``. Collective."""
    hosts = Rendezvous(group).all_gather_object(host_identity())
    topology = discover(hosts, requested_ranks_per_node(None))
    return topology.num_nodes, topology.ranks_per_node


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """(scale-out ranks, scale-up ranks) of ``group``: two tiers in hybrid mode, else one. Collective."""
    num_nodes, ranks_per_node = get_physical_domain_size(group)
    return (num_nodes, ranks_per_node) if allow_hybrid_mode else (1, num_nodes * ranks_per_node)


class ElasticBuffer(Refused):
    """DeepEP V2's buffer over deep_comm: compact or expert-major rows, with or without CPU sync.

    R ranks, T tokens of this rank, M tokens a rank may have, H hidden, K top-k, L local experts.

    Rows arrive sorted by (source rank, source token) always, whatever ``deterministic`` says. Expanded
    rows are grouped by local expert in that order. Dispatch sends a token to a rank once; expansion, and
    the sum of a token's expanded rows before they travel back, happen at the experts' rank.

    Attributes: ``group``, ``rank_idx``, ``num_ranks``, ``num_bytes``, ``num_max_tokens_per_rank``,
    ``num_scaleout_ranks``, ``num_scaleup_ranks``, ``scaleout_rank_idx``, ``scaleup_rank_idx``,
    ``num_rdma_ranks``, ``num_nvlink_ranks``, and the flags as given.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
        *,
        device: torch.device | str | int | None = None,
    ) -> None:
        """Collective. Sized by ``num_bytes``, or from the MoE's settings.

        ``num_gpu_timeout_secs`` bounds every wait, of kernels and of the host. ``sl_idx`` and
        ``num_allocated_qps`` concern transports between nodes. ``destroy()`` may always be called.
        """
        if num_cpu_bytes != 0:
            raise UnsupportedError(
                "num_cpu_bytes is memory for Engram, which is not offered: all of the buffer is on the "
                "device"
            )
        if num_bytes is None:
            num_bytes = self.get_buffer_size_hint(
                group, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch,
                allow_hybrid_mode, allow_multiple_reduction,
            )  # fmt: skip
        self._buffer = deep_comm.Buffer(
            group,
            num_bytes,
            explicitly_destroy=explicitly_destroy,
            timeout_s=float(num_gpu_timeout_secs),
            device=device,
        )
        topology = self._buffer._context.topology
        if topology.num_nodes > 1:
            self._buffer.destroy()
            raise UnsupportedError(
                f"ElasticBuffer over {topology.num_nodes} nodes is not in this version: it serves groups "
                "inside a node"
            )
        self.group = group
        self.rank_idx = self._buffer.rank
        self.num_ranks = self._buffer.group_size
        self.num_bytes = num_bytes
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.deterministic = deterministic
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.num_allocated_qps = num_allocated_qps
        self.explicitly_destroy = explicitly_destroy
        self.nccl_comm_handle = None
        self.num_rdma_ranks, self.num_nvlink_ranks = topology.num_nodes, topology.ranks_per_node
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(
            self.rank_idx, self.num_scaleup_ranks
        )

    # ---- life cycle ----------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self._buffer.device

    @property
    def runtime(self) -> Runtime | None:
        return None if self._buffer.runtime is None else Runtime(self._buffer)

    def destroy(self) -> None:
        """Free this rank's resources. Idempotent; waits for no peer."""
        self._buffer.destroy()

    def reset(self) -> None:
        """Collective: make the buffer usable again after a PeerTimeout."""
        self._buffer.reset()

    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """Returns when every rank has called it and has done its earlier work on the stream.

        The host waits, whatever ``with_cpu_sync`` says, so that it cannot stand in a CUDA graph.
        """
        context = self._buffer._context
        context.require_open()
        if self.device.type == "cuda":
            stream = self.get_comm_stream() if use_comm_stream else torch.cuda.current_stream()
            stream.synchronize()
        context.rendezvous.barrier()

    # ---- sizes and resources -------------------------------------------------------------------

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes that take the rows of any routing in place: R * M rows, and rings beside them.

        With fewer, rows without room come through the rings.
        """
        for name, value in (
            ("num_max_tokens_per_rank", num_max_tokens_per_rank), ("hidden", hidden)
        ):  # fmt: skip
            if value < 1:
                raise ArgumentError(name, value, "must be at least 1 (or give num_bytes)")
        row_bytes = (
            hidden + _align(-(-hidden // 128) * 4, _ROW_BYTES) if use_fp8_dispatch else 2 * hidden
        )
        per_row = row_bytes + 12 * num_topk + 4
        return _align(
            group.size() * num_max_tokens_per_rank * per_row + _RING_BYTES, _SIZE_ALIGNMENT
        )

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """SMs worth giving to dispatch and combine: at least 1.

        Measured, not derived: inside a node more than 24 SMs gain a few per cent (docs/performance.md),
        which is worth it only where no compute runs beside them.
        """
        context = self._buffer._context
        default = self._buffer._default_config(deep_comm.config.recommended_dispatch_config)
        if self.device.type == "cpu":
            return default.num_sms
        wanted = _OVERLAPPED_SMS if self.prefer_overlap_with_compute else _ALONE_SMS
        return min(wanted, context.backend.max_sms or wanted)

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """At least one, as callers expect; transports inside a node have none."""
        return max(self.num_allocated_qps, 1)

    def get_physical_domain_size(self) -> tuple[int, int]:
        """(nodes, ranks per node)."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """(scale-out ranks, scale-up ranks)."""
        if self.allow_hybrid_mode:
            return self.num_rdma_ranks, self.num_nvlink_ranks
        return 1, self.num_ranks

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream that everything runs on. Raises UnsupportedError on the host target."""
        return self._buffer.get_comm_stream()

    @staticmethod
    def capture() -> EventHandle:
        """An event at this point of the current stream: bare, unlike Buffer.capture()'s."""
        return EventHandle()

    # ---- dispatch ------------------------------------------------------------------------------

    def dispatch(
        self,
        x: Payload,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Payload, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Send each token to the ranks of its experts. Collective.

        Args:
            x: [T, H] of any dtype; or (x, sf) with sf [T, S] of 4-byte elements, any strides.
            topk_idx: int64 or int32 [T, K], -1: no selection.
            topk_weights: float32 [T, K]; with a handle as well.
            cumulative_local_expert_recv_stats: int32 [L], += selections of each local expert.
            num_max_tokens_per_rank: M, equal on all ranks; default: the constructor's.
            expert_alignment: groups of expanded rows start at multiples of it; counts are rounded up.
            num_sms: 0: the engine chooses, see docs/guide/sms.md. With a handle it is the handle's.
            previous_event: run after it instead of after the current stream; needs
                allocate_on_comm_stream.
            previous_event_before_epilogue: also run after this one.
            handle: repeat its routing with this x.
            do_cpu_sync: wait for the counts, so that outputs are as long as need be. Default: True
                without a handle.
            do_expand: one row per token and local expert, grouped by expert.
            do_zero_padding: rows between the groups are zero; else they hold anything.
            use_tma_aligned_col_major_sf: received scales have strides (1, rows rounded up to 4).

        Returns:
            recv_x: [N, H] or [P, H] expanded; with sf a pair.
            recv_topk_idx: [N, K], local expert or -1; None expanded.
            recv_topk_weights: float32 [N, K], 0 where the index is -1; [P] expanded; or None.
            handle: the one given, if its rows are the same; else a new one.
            event: to wait for; its ``event`` is None unless asynchronous.

        Without CPU sync N = R * M and P is what any routing fits in; rows past the real ones have index
        -1, and their payload is not written.
        """
        events = self._events(
            previous_event, previous_event_before_epilogue, allocate_on_comm_stream
        )
        if handle is not None:
            return self._cached_dispatch(
                x, handle, topk_idx, topk_weights, cumulative_local_expert_recv_stats,
                num_experts, num_max_tokens_per_rank, expert_alignment, do_cpu_sync, do_expand,
                do_zero_padding, use_tma_aligned_col_major_sf, events, async_with_compute_stream,
            )  # fmt: skip
        if topk_idx is None:
            raise ArgumentError("topk_idx", None, "must be given without a handle")
        if num_experts is None:
            raise ArgumentError("num_experts", None, "must be given without a handle")
        num_max_tokens = self._num_max_tokens(num_max_tokens_per_rank, x)
        alignment = 1 if expert_alignment is None else expert_alignment
        if not isinstance(alignment, int) or alignment < 1:
            raise ArgumentError("expert_alignment", alignment, "must be an integer of at least 1")
        if num_sms < 0:
            raise ArgumentError("num_sms", num_sms, "must not be negative")
        syncs = do_cpu_sync is None or do_cpu_sync
        num_worst_tokens = 0 if syncs else num_max_tokens * self.num_ranks
        if do_expand and not syncs:
            num_local = num_local_experts(self.rank_idx, num_experts, self.num_ranks)
            num_worst_tokens = num_rows_bound(
                num_worst_tokens, topk_idx.shape[1], num_local, alignment
            )
        self._buffer.num_sms = num_sms or DEFAULT_NUM_SMS

        def run(**options: Any) -> tuple[Any, ...]:
            recv, recv_idx, recv_weights, counts, native, event = self._buffer.dispatch(
                x,
                topk_idx=topk_idx,
                topk_weights=topk_weights,
                num_experts=num_experts,
                num_worst_tokens=num_worst_tokens,
                # Counts as they are, unless rows lie by them: the handle has both.
                expert_alignment=alignment if do_expand else 1,
                expand=do_expand,
                zero_padding=do_zero_padding and do_expand,
                **options,
            )
            assert native is not None and recv_idx is not None
            made = EPHandle(
                native,
                self.rank_idx,
                recv_idx,
                topk_idx.clone() if do_handle_copy else topk_idx,
                counts=counts if syncs else None,
                do_expand=do_expand,
                num_experts=num_experts,
                expert_alignment=alignment,
                num_max_tokens_per_rank=num_max_tokens,
            )
            return recv, recv_idx, recv_weights, made, event

        inputs = _tensors(x, topk_idx, topk_weights)
        return self._run_dispatch(
            run, inputs, cumulative_local_expert_recv_stats, do_expand, do_zero_padding,
            use_tma_aligned_col_major_sf, events, async_with_compute_stream,
        )  # fmt: skip

    def _cached_dispatch(
        self,
        x: Payload,
        handle: EPHandle,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        stats: Tensor | None,
        num_experts: int | None,
        num_max_tokens_per_rank: int | None,
        expert_alignment: int | None,
        do_cpu_sync: bool | None,
        do_expand: bool,
        do_zero_padding: bool,
        col_major_sf: bool,
        events: list[EventHandle],
        is_async: bool,
    ) -> tuple[Payload, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        handle = _checked(handle)
        if topk_idx is not None:
            raise ArgumentError("topk_idx", None, "must be left away with a handle")
        if stats is not None:
            name = "cumulative_local_expert_recv_stats"
            raise ArgumentError(name, None, "must be left away with a handle")
        if do_cpu_sync:
            raise ArgumentError("do_cpu_sync", True, "must be False or None with a handle")
        for name, value in (
            ("num_experts", num_experts),
            ("expert_alignment", expert_alignment),
            ("num_max_tokens_per_rank", num_max_tokens_per_rank),
        ):
            if value is not None and value != getattr(handle, name):
                raise HandleMismatch(
                    name, value, f"must be that of the handle ({getattr(handle, name)})"
                )
        handle = handle.with_expand(do_expand)

        def run(**options: Any) -> tuple[Any, ...]:
            if handle.is_expanded_by_engine:
                options.update(expand=True, zero_padding=do_zero_padding)
            recv, _, _, _, _, event = self._buffer.dispatch(x, handle=handle.native, **options)
            recv_weights = None
            if topk_weights is not None:
                recv_weights = self._cached_weights(topk_weights, handle)
            # Made where it is asked for: an expanded dispatch has no use for it.
            recv_idx = None if do_expand else handle.recv_topk_idx
            return recv, recv_idx, recv_weights, handle, event

        is_made_by_torch = not do_expand and handle.compact is not handle._native
        return self._run_dispatch(
            run, _tensors(x, topk_weights), None, do_expand, do_zero_padding, col_major_sf, events,
            is_async, in_section=topk_weights is not None or is_made_by_torch,
            by_torch=do_expand and not handle.is_expanded_by_engine,
        )  # fmt: skip

    def _cached_weights(self, topk_weights: Tensor, handle: EPHandle) -> Tensor:
        """Weights take the way of the rows: as rows, filled up to what a row must be a multiple of."""
        num_tokens, num_topk = topk_weights.shape
        if topk_weights.dtype != torch.float32:
            raise ArgumentError("topk_weights", topk_weights.dtype, "must have dtype torch.float32")
        if num_topk != handle.recv_topk_idx.shape[1]:
            raise HandleMismatch(
                "topk_weights", list(topk_weights.shape),
                f"must have the handle's {handle.recv_topk_idx.shape[1]} columns",
            )  # fmt: skip
        rows = topk_weights.new_zeros(num_tokens, _align(num_topk, _ROW_BYTES // 4))
        rows[:, :num_topk] = topk_weights
        received = self._buffer.dispatch(rows, handle=handle.compact)[0]
        assert isinstance(received, Tensor)
        weights = torch.where(handle.is_selected_here, received[:, :num_topk], 0.0)
        if not handle.is_expanded_by_engine:
            return weights
        return Expansion(handle.slots, handle.num_expanded_tokens).weights(weights)

    def _run_dispatch(
        self,
        run: Any,
        inputs: list[Tensor],
        stats: Tensor | None,
        do_expand: bool,
        do_zero_padding: bool,
        col_major_sf: bool,
        events: list[EventHandle],
        is_async: bool,
        in_section: bool = False,
        by_torch: bool = False,
    ) -> tuple[Payload, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """``run`` alone if nothing is to be done to its results, else both in one section.

        ``by_torch``: rows come once and are expanded here, which only a handle of a compact dispatch
        needs.
        """
        is_capturing = self._is_capturing()
        if not (by_torch or col_major_sf or in_section or len(events) > 1) and not (
            is_async and (is_capturing or stats is not None)
        ):
            recv, recv_idx, recv_weights, handle, event = run(
                previous_event=events[0] if events else None,
                async_finish=is_async,
                allocate_on_comm_stream=bool(events) and is_async,
            )
            if stats is not None:
                stats += handle.num_unaligned_recv_tokens_per_expert
            if is_capturing:
                handle.materialise()
            return recv, None if do_expand else recv_idx, recv_weights, handle, event

        section = Section(self._buffer, events, is_async)
        with section:
            recv, recv_idx, recv_weights, handle, _ = run()
            if stats is not None:
                stats += handle.num_unaligned_recv_tokens_per_expert
            made = handle.materialise() if is_capturing else []
            recv_x, recv_sf = recv if isinstance(recv, tuple) else (recv, None)
            if by_torch:
                expansion = Expansion(handle.slots, handle.num_expanded_tokens)
                recv_x = expansion.rows(recv_x, do_zero_padding)
                if recv_sf is not None:
                    recv_sf = expansion.rows(recv_sf, do_zero_padding)
                if recv_weights is not None:
                    recv_weights = expansion.weights(recv_weights)
            if recv_sf is not None and col_major_sf:
                recv_sf = _col_major(recv_sf)
        outputs = [recv_x, recv_sf, recv_weights, *made, *handle.tensors()]
        event = section.finish([*inputs, *([] if stats is None else [stats])], outputs)
        recv = recv_x if recv_sf is None else (recv_x, recv_sf)
        return recv, None if do_expand else recv_idx, recv_weights, handle, event

    # ---- combine -------------------------------------------------------------------------------

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Send rows back to their tokens and sum them. Collective.

        Args:
            x: bfloat16 [N, H]. Expanded: [P, H], or as many rows as handle.recv_src_metadata names. The
                rows of one token are then summed first, in float32, selections ascending, and rounded
                once; sums of ranks follow in float32, ranks ascending, and are rounded once.
            topk_weights: float32 [N, K], expanded [P]: comes back as [T, K].
            bias: bfloat16 [T, H] or a pair.
            num_sms: the handle's is used.

        Returns: combined_x [T, H]; combined_topk_weights float32 [T, K] or None; event.
        """
        events = self._events(
            previous_event, previous_event_before_epilogue, allocate_on_comm_stream
        )
        handle = _checked(handle)
        is_async = async_with_compute_stream
        if not isinstance(x, Tensor) or x.dim() != 2 or not x.is_contiguous():
            given = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ArgumentError("x", given, "must be a contiguous tensor of two dimensions")
        if topk_weights is not None:
            shape = (x.shape[0],) if handle.do_expand else (x.shape[0], handle.topk_idx.shape[1])
            if tuple(topk_weights.shape) != shape or topk_weights.dtype != torch.float32:
                raise ArgumentError(
                    "topk_weights", f"{topk_weights.dtype} {list(topk_weights.shape)}",
                    f"must be float32 of shape {list(shape)}",
                )  # fmt: skip
        is_plain = not handle.do_expand and topk_weights is None
        is_engines = handle.is_expanded_by_engine and not handle.is_metadata_lent
        if (is_plain or is_engines) and len(events) < 2:
            return self._buffer.combine(
                x,
                handle.native,
                topk_weights,
                bias,
                previous_event=EventOverlap(events[0]) if events else None,
                async_finish=is_async,
                allocate_on_comm_stream=bool(events) and is_async,
            )
        section = Section(self._buffer, events, is_async)
        with section:
            rows, weights, native = self._rows_for_combine(x, topk_weights, handle)
            combined_x, combined_weights, _ = self._buffer.combine(rows, native, weights, bias)
        inputs = _tensors(x, topk_weights, *(bias if isinstance(bias, (tuple, list)) else (bias,)))
        inputs += handle.tensors()
        return combined_x, combined_weights, section.finish(inputs, [combined_x, combined_weights])

    def _rows_for_combine(
        self, x: Tensor, topk_weights: Tensor | None, handle: EPHandle
    ) -> tuple[Tensor, Tensor | None, Handle]:
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

    # ---- rules ---------------------------------------------------------------------------------

    @staticmethod
    def _events(
        previous: Any, before_epilogue: Any, allocate_on_comm_stream: bool
    ) -> list[EventHandle]:
        if previous is not None and not allocate_on_comm_stream:
            raise ArgumentError(
                "previous_event", None, "needs allocate_on_comm_stream=True in ElasticBuffer"
            )
        given = (unwrap(previous), unwrap(before_epilogue))
        return [event for event in given if event is not None]

    def _num_max_tokens(self, given: int | None, x: Any) -> int:
        value = self.num_max_tokens_per_rank if given is None else given
        if not isinstance(value, int) or value < 1:
            raise ArgumentError(
                "num_max_tokens_per_rank", value, "must be at least 1, here or in the constructor"
            )
        first = x[0] if isinstance(x, (tuple, list)) and x else x
        if isinstance(first, Tensor) and first.shape[0] > value:
            raise ArgumentError(
                "x", f"{first.shape[0]} tokens",
                f"must have at most num_max_tokens_per_rank ({value})",
            )  # fmt: skip
        return value

    def _is_capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _checked(handle: Any) -> EPHandle:
    if not isinstance(handle, EPHandle):
        raise ArgumentError(
            "handle", type(handle).__name__, "must be what ElasticBuffer.dispatch returned"
        )
    return handle


def _tensors(*values: Any) -> list[Tensor]:
    """The tensors among ``values`` and in pairs of them."""
    found: list[Tensor] = []
    for value in values:
        parts: Sequence[Any] = value if isinstance(value, (tuple, list)) else (value,)
        found += [part for part in parts if isinstance(part, Tensor)]
    return found


def _col_major(sf: Tensor) -> Tensor:
    """[rows, S] with strides (1, rows rounded up to 4)."""
    num_rows, num_columns = sf.shape
    storage = sf.new_empty(num_columns, _align(num_rows, _SF_ALIGNMENT))
    out = storage.t()[:num_rows]
    out.copy_(sf)
    return out
