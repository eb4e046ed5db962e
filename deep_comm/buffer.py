"""Buffer: the engine's face. Dispatch and combine over one group of ranks."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deep_comm import config as configs
from deep_comm import env
from deep_comm._version import __version__
from deep_comm.config import Config
from deep_comm.context import Context, Settings
from deep_comm.errors import ArgumentError, UnsupportedError
from deep_comm.events import EventHandle, EventOverlap
from deep_comm.handle import Handle
from deep_comm.ops.call import StreamOptions
from deep_comm.ops.combine import combine
from deep_comm.ops.dispatch import DispatchResult, cached_dispatch, dispatch
from deep_comm.ops.layout import get_dispatch_layout
from deep_comm.ops.scales import PLAIN, ScaleOptions
from deep_comm.internode_buffer import InternodeCalls
from deep_comm.internode_handle import InternodeHandle
from deep_comm.low_latency_buffer import LowLatencyCalls
from deep_comm.low_latency_state import LowLatencyState
from deep_comm.tuning import DefaultConfig

if TYPE_CHECKING:
    from deep_comm._core import Engine


class _DefaultNumSms(int):
    """Tells "nobody has chosen" from the same number chosen."""


DEFAULT_NUM_SMS = _DefaultNumSms(20)
RECOMMENDED = {
    "dispatch": configs.recommended_dispatch_config,
    "combine": configs.recommended_combine_config,
}


_living: weakref.WeakSet[Buffer] = weakref.WeakSet()


@atexit.register
def _release_groups() -> None:
    for buffer in list(_living):
        buffer._release_group()


class Buffer(InternodeCalls, LowLatencyCalls):
    """Communication buffers of one rank, and the operations that use them.

    R ranks, T tokens of this rank, H hidden, K top-k, E experts, L local experts, N received rows.
    Ranks hold contiguous experts; if E is not a multiple of R, the first E % R ranks hold one more.

    Operations that move data are collective: every rank of the group makes the same calls in the
    same order. On CUDA devices they run on the current stream; with ``previous_event``, behind which
    alone they are then, or ``async_finish`` on the Buffer's own. Without ``async_finish`` the current
    stream waits for them; with it they return an event. Calls from several streams run one behind
    the other. On the host target they have ended when the call returns.

    Attributes:
        rank, group_size: this rank and R.
        group: what the Buffer was built with; None after destroy().
        num_nvl_bytes, num_rdma_bytes: as given.
        low_latency_mode, explicitly_destroy, enable_shrink: as given.
        device: where all tensors live.
        runtime: the native engine; None after destroy().
    """

    num_sms: int = DEFAULT_NUM_SMS
    """SMs of the recommended configs; see set_num_sms. Until it is set, calls without a Config get as many as
    was measured to be best, or a model says (docs/guide/sms.md)."""

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        device: torch.device | str | int | None = None,
        ranks_per_node: int | None = None,
        timeout_s: float | None = None,
        num_max_experts: int = 16384,
        num_direct_bytes: int | None = None,
        rail: str | None = None,
    ) -> None:
        """Allocate and find the peers. Collective over the group.

        Args:
            group: a torch.distributed group of any backend, a ThreadGroup, a SimulatedGroup; or
                None.
            num_nvl_bytes: bytes of ring space in every rank; see Config.get_nvl_buffer_size_hint.
            num_rdma_bytes: for low-latency calls, if low_latency_mode; else for rings between nodes,
                and nothing is allocated inside one node.
            low_latency_mode: allocate num_rdma_bytes for low-latency calls as well; see
                get_low_latency_rdma_size_hint.
            enable_shrink: low-latency calls do without a rank that stays silent for timeout_s, instead
                of raising PeerTimeout; see low_latency_query_mask_buffer. Needs low_latency_mode.
            num_qps_per_rank: queues to each other node; nothing to do inside one node.
            allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric: concern transports between
                nodes that this version has not.
            explicitly_destroy: kept for callers that pass it; destroy() may always be called.
            comm: an mpi4py communicator instead of a group.
            device: "cpu" for the host target, or a CUDA device; default: CUDA when available.
            ranks_per_node: overrides what host names say.
            timeout_s: how long a kernel waits for a peer; default: DEEP_COMM_TIMEOUT_S.
            num_max_experts: the largest E that calls may use.
            num_direct_bytes: the part of num_nvl_bytes that is receive region: outputs of dispatch are
                allocated there while there is room, and peers write them in place, without rings.
                Default: all but 64 MiB from 128 MiB on, else none. Outputs without room there are
                ordinary tensors, filled through the rings.
            rail: what joins the nodes of a group of several: "nvshmem" (CUDA devices; the ranks are then
                the process's NVSHMEM job), "software" (CUDA devices, logical nodes of one host),
                "simulated" (host target). Default: DEEP_COMM_RAIL, else nvshmem between hosts and the
                other one inside a host.

        Raises:
            ArgumentError, UnsupportedError: on this rank, before anything is exchanged.
            ConfigMismatch, TopologyError, PeerLost: on all ranks.
        """
        if enable_shrink and not low_latency_mode:
            raise ArgumentError("enable_shrink", True, "needs low_latency_mode")
        if not isinstance(num_rdma_bytes, int) or num_rdma_bytes < 0:
            raise ArgumentError("num_rdma_bytes", num_rdma_bytes, "must not be negative")
        if not isinstance(num_qps_per_rank, int) or num_qps_per_rank < 1:
            raise ArgumentError("num_qps_per_rank", num_qps_per_rank, "must be at least 1")
        settings = Settings(
            num_nvl_bytes=num_nvl_bytes,
            num_direct_bytes=num_direct_bytes,
            num_max_experts=num_max_experts,
            ranks_per_node=ranks_per_node,
            device=device,
            timeout_s=env.TIMEOUT_S.get() if timeout_s is None else timeout_s,
            version=__version__,
            low_latency_bytes=num_rdma_bytes if low_latency_mode else 0,
            enable_shrink=bool(enable_shrink),
            num_rdma_bytes=num_rdma_bytes,
            num_qps=num_qps_per_rank,
            rail=rail,
        )
        self._context = Context(group, comm, settings)
        self._is_internode = self._context.topology.num_nodes > 1
        self._low_latency = LowLatencyState(self._context)
        self._finalizer = weakref.finalize(self, self._context.close)
        # At exit the process gives back everything at once, and the CUDA driver may be gone.
        self._finalizer.atexit = False
        self.rank = self._context.rank
        self.group = group if group is not None else comm
        _living.add(self)
        self.group_size = self._context.num_ranks
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self.device = self._context.device
        self._env_num_sms = env.NUM_SMS.get()
        self._has_defaults = self._env_num_sms is None and (
            self.device.type != "cpu" or bool(self._context.tuned)
        )
        self._defaults = {
            operation: DefaultConfig(
                operation,
                recommended,
                self._context.tuned,
                self.group_size,
                self._context.backend.max_sms,
            )
            for operation, recommended in RECOMMENDED.items()
        }

    # ---- life cycle ----------------------------------------------------------------------------

    @property
    def runtime(self) -> Engine | None:
        return self._context.engine if self._context.is_open else None

    def destroy(self) -> None:
        """Free this rank's resources. Idempotent.

        Waits for this rank's own kernels, never for a peer. The last reference to a Buffer does the
        same when it goes.
        """
        self._finalizer()
        self._release_group()

    def _release_group(self) -> None:
        """So that destroy_process_group, or the end of the program, really ends the group.

        Threads of a gloo group take the GIL to free tensors of their last collective; if that
        happens while the interpreter is torn down, CPython ends the thread inside a C++ destructor,
        and the process aborts. A group that nobody holds is ended before.
        """
        self._context.rendezvous.release()
        self.group = None

    def reset(self) -> None:
        """Make the Buffer usable again after a PeerTimeout, and forget what kernels recorded.

        Collective: all ranks call it when none will launch on this Buffer before it returns.
        Handles of earlier dispatches stay valid if those dispatches succeeded.
        """
        self._context.reset()
        self._low_latency.reset()

    def check(self) -> None:
        """Raise what a kernel of this rank recorded, if any has failed. Does not wait.

        On CUDA devices failures of asynchronous kernels surface here, or in the next call.
        """
        self._context.check()

    def __enter__(self) -> Buffer:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.destroy()

    # ---- statics -------------------------------------------------------------------------------

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Does this build hold kernels for compute capability 9.0?"""
        try:
            from deep_comm import _cuda
        except ImportError:  # built without nvcc
            return False
        return "90" in _cuda.architectures

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """SMs of the recommended configs from now on, for all Buffers: at least 1."""
        if new_num_sms < 1:
            raise ArgumentError("new_num_sms", new_num_sms, "must be at least 1")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event at this point of the current stream."""
        return EventOverlap(EventHandle())

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        """The recommended Config of dispatch."""
        return configs.recommended_dispatch_config(num_ranks, cls.num_sms)

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> Config:
        """The recommended Config of combine."""
        return configs.recommended_combine_config(num_ranks, cls.num_sms)

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The Buffer's own stream, of asynchronous calls. Raises UnsupportedError on the host target."""
        self._context.require_open()
        return self._context.backend.comm_stream()

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: Sequence[int] | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> Tensor:
        """This rank's ring space, or its low-latency region, as a tensor: to look at it, and to
        zero the latter between calls.

        Args:
            dtype: of the elements.
            size: shape of the result; default: everything from ``offset`` on, flat.
            offset: in elements.
        """
        self._context.require_open()
        if use_rdma_buffer and not self.low_latency_mode:
            raise UnsupportedError("use_rdma_buffer needs low_latency_mode")
        num_elements = (
            self._context.low_latency_bytes if use_rdma_buffer else self.num_nvl_bytes
        ) // dtype.itemsize
        shape = torch.Size([num_elements - offset] if size is None else size)
        if offset < 0 or offset > num_elements:
            raise ArgumentError("offset", offset, f"must be 0 to {num_elements} elements")
        if offset + shape.numel() > num_elements:
            rule = f"must fit in the {num_elements - offset} elements from offset on"
            raise ArgumentError("size", list(shape), rule)
        begin = self._context.workspace_bytes
        if use_rdma_buffer:
            begin = self._context.low_latency_end - self._context.low_latency_bytes
        memory = self._context.heap.view(
            begin + offset * dtype.itemsize,
            shape.numel() * dtype.itemsize,
        )
        return memory.view(dtype).view(shape)

    # ---- operations ----------------------------------------------------------------------------

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

        Returns:
            num_tokens_per_rank: int32 [R], a token counts once per rank.
            num_tokens_per_rdma_rank: int32 [nodes], a token counts once per node; None inside one
                node.
            num_tokens_per_expert: int32 [E], every selection counts.
            is_token_in_rank: bool [T, R].
            event.

        Raises:
            ExpertIndexError: an index out of range; on CUDA devices dispatch raises it, on all
                ranks.
        """
        streams = StreamOptions.checked(previous_event, async_finish, allocate_on_comm_stream)
        layout, event = get_dispatch_layout(self._context, topk_idx, num_experts, streams)
        per_rank, per_expert = layout.num_tokens_per_rank, layout.num_tokens_per_expert
        per_node = layout.num_tokens_per_node
        return per_rank, per_node, per_expert, layout.is_token_in_rank, event

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
                With topk_idx and num_experts they may be left away together.
            num_tokens_per_rdma_rank: only checked: the other three say it all.
            topk_idx: int64 or int32 [T, K]; travels with the tokens.
            topk_weights: float32 [T, K]; travels with topk_idx.
            expert_alignment: the returned counts are rounded up to multiples of it.
            num_worst_tokens: if positive, N is this number and the host waits for nothing. Rows
                past the received ones have index -1 and weight 0; their payload is not written. How
                many came is in the handle, on the device: num_recv_tokens_tensor [1],
                num_recv_tokens_per_rank [R], num_recv_tokens_per_expert [L].
            zero_tail: write zeros there, and to the scales.
            config: rings and SMs; default: the recommended ones, shrunk to num_nvl_bytes.
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
            event.

        Raises:
            ArgumentError, BufferTooSmall, HandleMismatch: nothing was launched.
            ConfigMismatch, ExpertIndexError: on all ranks; the Buffer stays usable.
            CapacityError: more rows than num_worst_tokens arrived on this rank.
            PeerTimeout: a peer stayed silent; reset() makes the Buffer usable again.
        """
        if self._is_internode:
            if expand or zero_padding or use_fp8 or column_major_scales:
                name = "expand" if expand or zero_padding else "use_fp8"
                raise UnsupportedError(f"{name} is not in this version between nodes")
            return super().internode_dispatch(
                x,
                handle,
                num_tokens_per_rank,
                num_tokens_per_rdma_rank,
                is_token_in_rank,
                num_tokens_per_expert,
                topk_idx,
                topk_weights,
                expert_alignment,
                num_worst_tokens,
                config,
                previous_event,
                async_finish,
                allocate_on_comm_stream,
                num_experts=num_experts,
                zero_tail=zero_tail,
            )
        streams = StreamOptions.checked(previous_event, async_finish, allocate_on_comm_stream)
        default = None if config is not None else self._default_for_rows("dispatch")
        scale_options = PLAIN
        if use_fp8 or round_scale or use_ue8m0 or column_major_scales:
            scale_options = ScaleOptions(use_fp8, round_scale, use_ue8m0, column_major_scales)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                name = "topk_weights" if topk_idx is None else "topk_idx"
                raise ArgumentError(name, None, "must be left away with a handle")
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
        return dispatch(
            self._context,
            x,
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
            scale_options=scale_options,
            config=config,
            default=default,
            streams=streams,
        )

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
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Send rows back to their source and sum those of each token. Collective.

        The sum runs in float32 over the ranks that got the token, ascending, then over the biases,
        and is rounded once (between nodes also once a node, see InternodeCalls): it does not
        depend on ``config``. A token that went nowhere gives its
        bias, or zeros. Any number of combines may use one handle.

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

        Returns:
            combined_x: [T, H] of the dtype of x.
            combined_topk_weights: float32 [T, K], or None.
            event.

        Raises:
            ArgumentError, BufferTooSmall, HandleMismatch: nothing was launched.
            ConfigMismatch, PeerTimeout: as dispatch.
        """
        if self._is_internode:
            if apply_weights:
                raise UnsupportedError("apply_weights is not in this version between nodes")
            return super().internode_combine(
                x,
                handle,
                topk_weights,
                bias,
                config,
                previous_event,
                async_finish,
                allocate_on_comm_stream,
            )
        return combine(
            self._context,
            x,
            handle,
            topk_weights=topk_weights,
            bias=bias,
            apply_weights=apply_weights,
            config=config,
            default=None if config is not None else self._default_for_rows("combine"),
            streams=StreamOptions.checked(previous_event, async_finish, allocate_on_comm_stream),
        )

    def _default_config(self, recommended: configs.Recommend) -> Config:
        """Where the rows are not known."""
        num_sms = self._env_num_sms
        if self.device.type == "cpu":
            return configs.host_default(num_sms)
        max_sms = self._context.backend.max_sms
        if num_sms is None:
            wanted = self.num_sms  # of this Buffer, of its class, or of all
            num_sms = wanted if max_sms is None else min(wanted, max_sms)
        # Groups of several nodes may have any size.
        return recommended(configs.known_size(self.group_size), num_sms)

    def _default_for_rows(self, operation: str) -> Config | DefaultConfig:
        """For "dispatch" or "combine" inside a node: docs/guide/sms.md."""
        if self._has_defaults and self.num_sms is DEFAULT_NUM_SMS:
            return self._defaults[operation]
        return self._default_config(RECOMMENDED[operation])
