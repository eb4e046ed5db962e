"""V2 of DeepEP's surface: ElasticBuffer and EPHandle over deep_comm.Buffer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import deep_comm
from deep_comm import log
from deep_comm.compat.elastic_calls import (
    DispatchResult,
    ElasticCalls,
    Payload,
    Routing,
    Rows,
    Timing,
)
from deep_comm.compat.elastic_refused import Refused
from deep_comm.compat.elastic_sizes import (
    get_logical_domain_size,
    get_physical_domain_size,
    logical_domain,
    shared_out,
    size_hint,
    topology_of,
)
from deep_comm.compat.ep_handle import EPHandle
from deep_comm.compat.runtime import Runtime
from deep_comm.context.stats import BufferStats
from deep_comm.errors import ArgumentError, UnsupportedError
from deep_comm.events import EventHandle, EventOverlap, unwrap
from deep_comm.ranks.topology import num_local_experts
from deep_comm.settings import checks, integers
from deep_comm.tuning import DEFAULT_NUM_SMS

__all__ = ["EPHandle", "ElasticBuffer", "get_logical_domain_size", "get_physical_domain_size"]

_OVERLAPPED_SMS, _ALONE_SMS = 24, 48
_DEFAULT_NUM_QPS = 24


class ElasticBuffer(ElasticCalls, Refused):
    """DeepEP V2's buffer over deep_comm: compact or expert-major rows, with or without CPU sync.

    R ranks, T tokens of this rank, M tokens that a rank may have, H hidden, K top-k, L local
    experts.

    Rows arrive sorted by (source rank, source token) always, whatever ``deterministic`` says.
    Expanded rows are grouped by local expert in that order. Dispatch sends a token to a rank once;
    expansion, and the sum of a token's expanded rows before they travel back, happen at the
    experts' rank. Over several nodes a token crosses once to each of them, whether
    ``allow_hybrid_mode`` or not: this only says whether the logical domain has two tiers or one.

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

        ``num_gpu_timeout_secs`` bounds every wait, of kernels and of the host.
        ``num_allocated_qps``: queues to each other node; 0: 24. ``sl_idx`` concerns networks that
        this version does not support. ``destroy()`` may always be called.
        """
        if num_cpu_bytes != 0:
            raise UnsupportedError(
                "num_cpu_bytes is memory for Engram, which is not offered: all of the buffer is "
                "on the device"
            )
        if num_bytes is None:
            num_bytes = self.get_buffer_size_hint(
                group, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch,
                allow_hybrid_mode, allow_multiple_reduction,
            )  # fmt: skip
        timeout_s = checks.timeout_s("num_gpu_timeout_secs", num_gpu_timeout_secs)
        topology = topology_of(group, timeout_s)
        num_nvl_bytes, num_rdma_bytes = shared_out(num_bytes, topology, hidden)
        num_allocated_qps = num_allocated_qps or _DEFAULT_NUM_QPS
        with log.used_by("deep_ep.ElasticBuffer"):
            self._buffer = deep_comm.Buffer(
                group,
                num_nvl_bytes,
                num_rdma_bytes,
                num_qps_per_rank=num_allocated_qps,
                explicitly_destroy=explicitly_destroy,
                timeout_s=timeout_s,
                device=device,
            )
        topology = self._buffer._context.topology
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
    def group(self) -> Any:
        """What the buffer was built with; None after destroy()."""
        return self._buffer.group

    @property
    def device(self) -> torch.device:
        return self._buffer.device

    @property
    def runtime(self) -> Runtime | None:
        return None if self._buffer.runtime is None else Runtime(self._buffer)

    def destroy(self) -> None:
        """Free this rank's resources. Idempotent; waits for no peer."""
        self._buffer.destroy()

    def stats(self) -> BufferStats:
        """How many calls had room in the receive region, and how many went through rings."""
        return self._buffer.stats()

    def reset(self) -> None:
        """Collective: make the buffer usable again after a PeerTimeout."""
        self._buffer.reset()

    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """What the current streams and this buffer's calls had before it ends, on all ranks, before
        what any rank's current stream has after it begins. Collective.

        It runs on the device; a CUDA graph may hold it. With ``with_cpu_sync`` the host waits for
        the device before and after it. The stream and the order of tiers are the engine's choice.
        """
        waits = with_cpu_sync and self.device.type == "cuda"
        if waits:
            torch.cuda.synchronize(self.device)
        self._buffer.barrier()
        if waits:
            torch.cuda.synchronize(self.device)
            self._buffer.check()

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
        """Bytes that take the rows of any routing in place, and those of the combine after it: R *
        M rows or, of expanded rows, 1.25 * K * M; the rows that return; and rings beside them.

        With fewer, rows without room come through the rings, with a PerformanceWarning (see
        stats); between nodes all rows of a call do, unless every rank has room for what comes to
        it and crosses.
        """
        if not callable(getattr(group, "size", None)):
            raise ArgumentError("group", type(group).__name__, "must be a torch.distributed group")
        return size_hint(group.size(), num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch)

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

        Measured, not derived: inside a node more than 24 SMs gain a few per cent
        (docs/performance.md), which is worth it only where no compute runs beside them.
        """
        context = self._buffer._context
        if self.device.type == "cpu":
            defaults = self._buffer._defaults
            return defaults.config_of_any_rows("dispatch", self._buffer.num_sms).num_sms
        wanted = _OVERLAPPED_SMS if self.prefer_overlap_with_compute else _ALONE_SMS
        return min(wanted, context.backend.max_sms or wanted)

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """``num_allocated_qps``: calls use all queues, of which there are none inside a node."""
        return self.num_allocated_qps

    def get_physical_domain_size(self) -> tuple[int, int]:
        """(nodes, ranks per node)."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """(scale-out ranks, scale-up ranks)."""
        return logical_domain(self._buffer._context.topology, self.allow_hybrid_mode)

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
    ) -> DispatchResult:
        """Send each token to the ranks of its experts. Collective.

        Args:
            x: [T, H] of any dtype; or (x, sf) with sf [T, S] of 4-byte elements, any strides.
            topk_idx: int64 or int32 [T, K], -1: no selection.
            topk_weights: float32 [T, K]; with a handle as well.
            cumulative_local_expert_recv_stats: int32 [L], += selections of each local expert.
            num_max_tokens_per_rank: M, equal on all ranks; default: the constructor's.
            expert_alignment: groups of expanded rows start at multiples of it; counts are rounded
                up.
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

        Without CPU sync N = R * M and P is what any routing fits in; rows past the real ones have
        index -1, and their payload is not written.

        Raises:
            ArgumentError, HandleMismatch: nothing was launched. Others as of
                deep_comm.Buffer.dispatch.
        """
        timing = _timing(
            previous_event, previous_event_before_epilogue, allocate_on_comm_stream,
            async_with_compute_stream,
        )  # fmt: skip
        if do_zero_padding and not do_expand:
            raise ArgumentError("do_zero_padding", True, "needs do_expand")
        rows = Rows(do_expand, do_zero_padding, use_tma_aligned_col_major_sf)
        if handle is not None:
            handle = _checked(handle)
            given = (
                ("topk_idx", topk_idx),
                ("cumulative_local_expert_recv_stats", cumulative_local_expert_recv_stats),
            )
            for name, value in given:
                if value is not None:
                    raise ArgumentError(name, None, "must be omitted with a handle")
            if do_cpu_sync:
                raise ArgumentError("do_cpu_sync", True, "must be False or None with a handle")
            handle.require(
                num_experts=num_experts,
                expert_alignment=expert_alignment,
                num_max_tokens_per_rank=num_max_tokens_per_rank,
            )
            return self._cached_dispatch(x, handle, topk_weights, rows, timing)
        if topk_idx is None:
            raise ArgumentError("topk_idx", None, "must be given without a handle")
        if num_experts is None:
            raise ArgumentError("num_experts", None, "must be given without a handle")
        num_max_tokens = self._num_max_tokens(num_max_tokens_per_rank, x)
        alignment = checks.expert_alignment(1 if expert_alignment is None else expert_alignment)
        integers.require("num_sms", num_sms, 0)
        if cumulative_local_expert_recv_stats is not None:
            num_experts = checks.num_experts(num_experts, self._buffer._context.num_max_experts)
            checks.tensor(
                "cumulative_local_expert_recv_stats", cumulative_local_expert_recv_stats,
                self.device, shape=(num_local_experts(self.rank_idx, num_experts, self.num_ranks),),
                dtypes=(torch.int32,), contiguous=False,
            )  # fmt: skip
        self._buffer.num_sms = num_sms or DEFAULT_NUM_SMS
        routing = Routing(
            topk_idx,
            topk_weights,
            num_experts,
            num_max_tokens,
            alignment,
            waits_for_counts=do_cpu_sync is None or do_cpu_sync,
            do_handle_copy=do_handle_copy,
        )
        return self._dispatch(x, routing, cumulative_local_expert_recv_stats, rows, timing)

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

        A token's sum starts with the biases, in float32, and takes the rank of each selection in
        turn, a rank of several selections at the last of them; it is rounded once. Over nodes the
        ranks of each node are summed and rounded first, ranks ascending, and the nodes follow in
        the same order. Without allow_multiple_reduction nothing is rounded before: expanded rows
        are added one by one, in the order of the selections; so are ranks over several nodes. It
        takes memory and traffic for a row per selection.

        Args:
            x: bfloat16 [N, H]. Expanded: [P, H], or as many rows as handle.recv_src_metadata names.
                The rows of one token are then summed first, in float32, selections ascending, and
                rounded once, unless allow_multiple_reduction is False.
            topk_weights: float32 [N, K], expanded [P]: comes back as [T, K].
            bias: bfloat16 [T, H] or a pair.
            num_sms: the handle's is used.

        Returns: combined_x [T, H]; combined_topk_weights float32 [T, K] or None; event.
        """
        timing = _timing(
            previous_event, previous_event_before_epilogue, allocate_on_comm_stream,
            async_with_compute_stream,
        )  # fmt: skip
        handle = _checked(handle)
        if not isinstance(x, Tensor) or x.dim() != 2 or not x.is_contiguous():
            given = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ArgumentError("x", given, "must be a contiguous tensor of two dimensions")
        if topk_weights is not None:
            shape = (x.shape[0],) if handle.do_expand else (x.shape[0], handle.topk_idx.shape[1])
            checks.tensor(
                "topk_weights", topk_weights, x.device, shape=shape, dtypes={torch.float32},
                contiguous=False,
            )  # fmt: skip
        return self._combine(x, handle, topk_weights, bias, timing)

    # ---- rules ---------------------------------------------------------------------------------

    def _num_max_tokens(self, given: int | None, x: Any) -> int:
        value = integers.require(
            "num_max_tokens_per_rank",
            self.num_max_tokens_per_rank if given is None else given,
            1,
            note=", here or in the constructor",
        )
        first = x[0] if isinstance(x, (tuple, list)) and x else x
        if isinstance(first, Tensor) and first.dim() > 0 and first.shape[0] > value:
            raise ArgumentError(
                "x", f"{first.shape[0]} tokens",
                f"must have at most num_max_tokens_per_rank ({value})",
            )  # fmt: skip
        return value


def _timing(
    previous: Any, before_epilogue: Any, allocate_on_comm_stream: bool, is_async: bool
) -> Timing:
    if previous is not None and not allocate_on_comm_stream:
        raise ArgumentError(
            "previous_event", None, "needs allocate_on_comm_stream=True in ElasticBuffer"
        )
    first, second = unwrap(previous), unwrap(before_epilogue)
    if second is not None:
        # Without the first the call runs after the current stream, and after the second.
        return Timing([first or EventHandle(), second], is_async)
    return Timing([] if first is None else [first], is_async)


def _checked(handle: Any) -> EPHandle:
    if not isinstance(handle, EPHandle):
        raise ArgumentError(
            "handle", type(handle).__name__, "must be what ElasticBuffer.dispatch returned"
        )
    return handle
