"""Buffer: the engine's face. Dispatch and combine over one group of ranks."""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import math
import os
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deep_comm import _core, log
from deep_comm import config as configs
from deep_comm._version import __version__
from deep_comm.backends import resolve_device
from deep_comm.backends.architectures import runs_on
from deep_comm.config import Config
from deep_comm.context import Context
from deep_comm.context.owner import ContextOwner
from deep_comm.context.shape import (
    MemoryEstimate,
    Mode,
    MoEShape,
    estimate_memory,
    preset_decode_tokens,
    require_mode,
)
from deep_comm.context.stats import BufferStats
from deep_comm.errors import ArgumentError, UnsupportedError
from deep_comm.events import EventHandle, EventOverlap
from deep_comm.internode import InternodeCalls
from deep_comm.low_latency import LowLatencyCalls
from deep_comm.normal import NormalCalls
from deep_comm.ranks.rendezvous import Rendezvous
from deep_comm.settings import env, integers
from deep_comm.settings.buffer import Settings
from deep_comm.tuning import Defaults

if TYPE_CHECKING:
    from deep_comm._core import Engine
    from deep_comm.trace import Recording

__all__ = ["Buffer"]


class Buffer(ContextOwner, InternodeCalls, LowLatencyCalls):
    """Communication buffers of one rank, and the operations that use them.

    R ranks, T tokens of this rank, H hidden, K top-k, E experts, L local experts, N received rows.
    Ranks hold contiguous experts. If E is not a multiple of R, the first E % R ranks hold one more.

    **Collective.** Operations that move data are collective: every rank of the group makes the same
    calls in the same order.

    **Streams.** On CUDA devices calls run on the current stream. With ``previous_event`` or
    ``async_finish`` they run on the Buffer's own stream: they start after ``previous_event`` if
    given, otherwise after the current stream. Without ``async_finish`` the current stream waits for
    them; with it they return an event. Calls from several streams run one after the other. On the
    host target a call has ended when it returns.

    **Threads.** One thread at a time may call a Buffer. A call that begins during another thread's
    raises UnsupportedError.

    Attributes:
        rank: this rank.
        group_size: R.
        group: what the Buffer was built with; None after destroy().
        num_nvl_bytes, num_rdma_bytes: as given, in bytes.
        memory: MemoryEstimate of a Buffer that for_shape has built; otherwise None.
        low_latency_mode, explicitly_destroy, enable_shrink: as given.
        device: where all tensors are.
        runtime: the native engine; None after destroy().

    Examples:
        >>> shape = dict(hidden=H, num_experts=E, num_topk=K, max_tokens=T)
        >>> with deep_comm.Buffer.for_shape(group, **shape, device="cpu") as buffer:
        ...     sent = buffer.dispatch(
        ...         x, topk_idx=topk_idx, topk_weights=topk_weights, num_experts=E)
        ...     y = buffer.combine(sent.recv_x, sent.handle).combined_x
    """

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
        trace: int | None = None,
    ) -> None:
        """Allocate memory and find the peers. Collective over the group.

        Args:
            group: a torch.distributed group of any backend, a ThreadGroup, a SimulatedGroup, or
                None.
            num_nvl_bytes: bytes on every rank for normal mode: rings, and from 128 MiB on a receive
                region. See Config.get_nvl_buffer_size_hint.
            num_rdma_bytes: bytes on every rank for low-latency calls, if low_latency_mode; and for
                what crosses between nodes, which gets as much again. See
                get_low_latency_rdma_size_hint and docs/guide/nodes.md. Inside a node without
                low_latency_mode nothing is allocated.
            low_latency_mode: allocate num_rdma_bytes for low-latency calls.
            enable_shrink: low-latency calls leave out a rank that stays silent for timeout_s,
                instead of raising PeerTimeout; see low_latency_query_mask_buffer. Needs
                low_latency_mode. Works between nodes too.
            num_qps_per_rank: queues to each other node; has no effect inside one node.
            allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric: taken for DeepEP's callers;
                they concern transports between nodes that this version does not have.
            explicitly_destroy: taken for DeepEP's callers; destroy() may always be called.
            comm: an mpi4py communicator instead of a group.
            device: "cpu" for the host target, or a CUDA device. Default: the current CUDA device if
                there is one.
            ranks_per_node: overrides what host names say: logical nodes of so many ranks.
            timeout_s: seconds that a kernel waits for a peer. Default: DEEP_COMM_TIMEOUT_S.
            num_max_experts: the largest E that calls may use, at most 57 344. Low-latency calls
                inside a node count experts twice and take fewer, about 28 000; the error of a call
                with more says how many.
            num_direct_bytes: bytes of num_nvl_bytes that are receive region. Outputs of dispatch
                are allocated there while there is room, and peers write them in place. Outputs
                without room are ordinary tensors, filled through rings. Default:
                DEEP_COMM_NUM_DIRECT_BYTES, else all but 64 MiB from 128 MiB on, else none.
            rail: what joins the nodes of a group of several: "nvshmem" (CUDA devices; the ranks are
                then the process's NVSHMEM job), "software" (CUDA devices, logical nodes of one
                host), "simulated" (host target). Default: DEEP_COMM_RAIL, else nvshmem between
                hosts and the other one inside a host.
            trace: the number of last kernels of which every block's steps are kept, at most 4096,
                in 640 KiB of device memory each. Default: DEEP_COMM_TRACE, else 0: none. See
                deep_comm.trace. Ranks may give different numbers.

        Raises:
            ArgumentError, UnsupportedError: on this rank, before anything is exchanged.
            AllocationError: on a rank without room; PeerLost on the others.
            ConfigMismatch, TopologyError: on all ranks.
            PeerLost: a rank that is named has failed, or has not come here within timeout_s (at
                least 30 s; groups of torch.distributed, communicators of MPI).

        Warns if several processes of the group have the same GPU.
        """
        if enable_shrink and not low_latency_mode:
            raise ArgumentError("enable_shrink", True, "needs low_latency_mode")
        integers.require("num_rdma_bytes", num_rdma_bytes, 0, integers.MOST_BYTES)
        if low_latency_mode and num_rdma_bytes == 0:
            rule = "must be get_low_latency_rdma_size_hint(...), or larger, with low_latency_mode"
            raise ArgumentError("num_rdma_bytes", 0, rule)
        integers.require("num_qps_per_rank", num_qps_per_rank, 1, integers.LARGEST)
        env.require_valid()
        if env.NUM_SMS.is_set():
            integers.require(env.NUM_SMS.name, env.NUM_SMS.get(), 1, _core.max_channels)
        if num_direct_bytes is None and env.NUM_DIRECT_BYTES.is_set():
            integers.require("num_nvl_bytes", num_nvl_bytes, 0, integers.MOST_BYTES)
            num_direct_bytes = integers.require(
                env.NUM_DIRECT_BYTES.name, env.NUM_DIRECT_BYTES.get(), 0, num_nvl_bytes,
                note=" (num_nvl_bytes)",
            )  # fmt: skip
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
            trace_calls=env.TRACE.get() if trace is None else trace,
        )
        log.set_up()
        self._own(Context(group, comm, settings))
        self._enable_low_latency()
        self.rank = self._context.rank
        self.group = group if group is not None else comm
        self.group_size = self._context.num_ranks
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self.memory: MemoryEstimate | None = None
        self.device = self._context.device
        self._defaults = Defaults(
            self.device,
            self._context.tuned,
            self._context.num_ranks,
            self._context.backend.max_sms,
            is_internode=self._context.topology.num_nodes > 1,
        )
        if log.logger.isEnabledFor(logging.INFO):  # text: a record must not keep the Buffer
            log.logger.info(_described(self))
        log.show_calls(self, self.rank, _SHOWN_CALLS, functools.partial(_stats_of, self._context))
        if self._context.sharing_ranks:
            warnings.warn(
                f"ranks {', '.join(map(str, self._context.sharing_ranks))} of this Buffer share a "
                f"device ({self.device} on rank {self.rank}), where their kernels run in turns: "
                "call torch.cuda.set_device(local_rank) before the Buffer is built, or pass "
                "device=, unless that is meant",
                stacklevel=2,
            )

    @classmethod
    def for_shape(
        cls,
        group: Any,
        *,
        hidden: int,
        num_experts: int,
        num_topk: int,
        max_tokens: int,
        decode_tokens: int | None = None,
        mode: Mode = "auto",
        dtype: torch.dtype = torch.bfloat16,
        fp8: bool = False,
        comm: Any = None,
        device: torch.device | str | int | None = None,
        ranks_per_node: int | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Buffer:
        """Build a Buffer that is large enough for calls of this shape. Collective over the group.

        Rows of prefill calls have room in the receive region under uniform routing, and a quarter
        more. Inside a node so have those of a second call, while the first one's rows are held.
        ``print(buffer.memory)`` says what was taken for what.

        Args:
            group, comm, device, ranks_per_node, timeout_s: as of the constructor.
            hidden: H.
            num_experts: E.
            num_topk: K.
            max_tokens: the most tokens that a rank may have in a call.
            decode_tokens: M, the most of a low-latency call; at most max_tokens. Default:
                DEEP_COMM_DECODE_TOKENS, else 128.
            mode: "prefill" for normal calls, "decode" for low-latency ones, "auto" for both.
                Low-latency calls need bfloat16.
            dtype: of tokens and results.
            fp8: dispatch sends float8_e4m3 with a float32 scale for 128 columns.
            options: what else the constructor takes and the shape does not decide, such as
                enable_shrink, trace or num_qps_per_rank.

        Raises:
            ArgumentError: a size is out of range, or there is no such option; on this rank.
            AllocationError, ConfigMismatch, PeerLost, TopologyError: as of the constructor.

        Examples:
            >>> shape = dict(hidden=H, num_experts=E, num_topk=K, max_tokens=T)
            >>> with deep_comm.Buffer.for_shape(group, **shape, device="cpu") as buffer:
            ...     text = str(buffer.memory)
        """
        if decode_tokens is None:
            decode_tokens = preset_decode_tokens(max_tokens)
        shape = MoEShape(hidden, num_experts, num_topk, max_tokens, decode_tokens, dtype, fp8)
        require_mode(mode, shape)
        for name in options:
            _require_option(name)
        if options.get("enable_shrink") and mode == "prefill":
            raise ArgumentError(
                "enable_shrink", True, 'needs low-latency calls, which mode "prefill" lacks'
            )
        env.require_valid()
        device = resolve_device(device)
        rendezvous = Rendezvous(group, comm).meet(timeout_s)
        num_nodes = rendezvous.topology(ranks_per_node).num_nodes
        memory = estimate_memory(shape, rendezvous.size, mode, device.type, num_nodes)
        buffer = cls(
            group,
            memory.num_nvl_bytes,
            max(memory.low_latency_region, memory.rail),
            low_latency_mode=memory.low_latency_region > 0,
            comm=comm,
            device=device,
            ranks_per_node=ranks_per_node,
            timeout_s=timeout_s,
            num_max_experts=num_experts,
            # Also of for_shape the variable is to have its say: others build through it.
            num_direct_bytes=None if env.NUM_DIRECT_BYTES.is_set() else memory.receive_region,
            **options,
        )
        buffer.memory = memory
        return buffer

    def __repr__(self) -> str:
        sizes = f"{self.num_nvl_bytes} + {self.num_rdma_bytes} bytes"
        state = "" if self._context.is_open else ", destroyed"
        return f"<Buffer: rank {self.rank} of {self.group_size}, {self.device}, {sizes}{state}>"

    # ---- life cycle ----------------------------------------------------------------------------

    @property
    def runtime(self) -> Engine | None:
        """The native engine; None after destroy()."""
        return self._context.engine if self._context.is_open else None

    def _release_group(self) -> None:
        super()._release_group()
        self.group = None

    def reset(self, *, without: Iterable[int] = ()) -> None:
        """Make the Buffer usable again after a PeerTimeout. Collective.

        Forgets what kernels recorded. All ranks call it when none will launch on this Buffer before
        it returns. Handles of earlier dispatches stay valid if those dispatches succeeded.

        ``without`` names ranks that have ended or hang, to go on without them inside one node. Then
        only the other ranks call it, all with the same ranks. Until a reset() of all ranks takes
        them back:

        * Nothing is sent to the absent ranks or awaited from them. They count as ranks without
          tokens.
        * Selections of their experts count as -1: such a token is not in that rank, nobody counts
          it there, and combine adds what the others return.
        * Handles of earlier dispatches are refused (handles given as tensors if they hold rows of
          an absent rank; the host waits for the device to see this).
        * CUDA graphs captured before end with PeerTimeout: capture them again.
        * Low-latency calls leave out the same ranks if enable_shrink is on, and are refused
          otherwise.
        * Absent ranks of an earlier reset stay absent.

        An absent rank that lives gets MaskedOut in its next call. It must not be in the middle of a
        kernel when the others come here: what that kernel still writes may land in outputs of the
        others' next calls. End its process first if you can.

        Args:
            without: ranks, at most all but this one. Empty: none is absent any more.

        Raises:
            ArgumentError: ``without`` names this rank, or a number that is no rank.
            UnsupportedError: with ``without`` in a group of several nodes.
            PeerLost: without ``without``: a rank does not come. The Buffer needs another reset.
            ConfigMismatch: the ranks name different ranks. The Buffer needs another reset.
            PeerTimeout: a rank that is not named has not come within 4 times timeout_s. Name it as
                well, on all remaining ranks. The Buffer needs another reset.
            MaskedOut: the others go on without this rank. The Buffer needs another reset.

        Examples:
            >>> try:
            ...     recv_x, *_, handle, event = buffer.dispatch(
            ...         x, topk_idx=topk_idx, topk_weights=topk_weights, num_experts=E)
            ... except deep_comm.PeerTimeout as error:
            ...     buffer.reset(without=[error.peer])  # if that rank is the one that is gone
        """
        self._context.reset(without)
        log.logger.info("%s is reset; absent ranks: %s", repr(self), sorted(self._context.absent))

    def stats(self) -> BufferStats:
        """Return how many calls had room in the receive region, and how many went through rings.

        Examples:
            >>> if buffer.stats().dispatch_rings > 0:
            ...     print("more num_nvl_bytes:", buffer.stats().missing_bytes)
        """
        return _stats_of(self._context)

    def trace(self) -> Recording:
        """Return what the blocks of this rank noted in the last calls; see deep_comm.trace.

        Waits for this rank's kernels.

        Raises:
            UnsupportedError: tracing is off.

        Examples:
            >>> with deep_comm.Buffer(group, 1 << 20, device="cpu", trace=16) as traced:
            ...     recording = traced.trace()
        """
        self._context.require_open()
        if self._context.trace_rings is None:
            raise UnsupportedError("tracing is off: Buffer(trace=16), or DEEP_COMM_TRACE=16")
        return self._context.trace_rings.read()

    # ---- statics -------------------------------------------------------------------------------

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return True if this build has kernels for compute capability 9.0.

        Examples:
            >>> has_kernels = deep_comm.Buffer.is_sm90_compiled()
        """
        try:
            from deep_comm import _cuda
        except ImportError:  # built without nvcc
            return False
        return runs_on(_cuda.architectures, 9, 0)

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set the SMs of calls without a Config from now on, for all Buffers. Equal on all ranks.

        Calls of the host target keep one block: a program names a number that suits GPUs. There a
        Config or DEEP_COMM_NUM_SMS gives them more.

        Raises:
            ArgumentError: not an integer of at least 1.

        Examples:
            >>> deep_comm.Buffer.set_num_sms(24)
        """
        Buffer.num_sms = integers.require("new_num_sms", new_num_sms, 1)

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event at this point of the current stream.

        Examples:
            >>> layout = buffer.get_dispatch_layout(
            ...     topk_idx, E, previous_event=deep_comm.Buffer.capture(), async_finish=True)
        """
        return EventOverlap(EventHandle())

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        """Return the recommended Config of dispatch in a group of ``num_ranks`` ranks.

        SMs are those of set_num_sms. Rings are as DeepEP's. Sizes that DeepEP does not have take
        the rings of the next smaller size.

        Examples:
            >>> config = deep_comm.Buffer.get_dispatch_config(num_ranks=8)
        """
        return configs.recommended_dispatch_config(num_ranks, cls.num_sms)

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> Config:
        """Return the recommended Config of combine, likewise.

        Examples:
            >>> config = deep_comm.Buffer.get_combine_config(num_ranks=8)
        """
        return configs.recommended_combine_config(num_ranks, cls.num_sms)

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Return the Buffer's own stream, on which asynchronous calls run.

        Raises:
            UnsupportedError: on the host target.

        Examples:
            >>> if buffer.device.type == "cuda":
            ...     stream = buffer.get_comm_stream()
        """
        self._context.require_open()
        return self._context.backend.comm_stream()

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: Sequence[int] | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> Tensor:
        """Return this rank's ring space, or its low-latency region, as a tensor.

        The ring space is to look at. The low-latency region may also be zeroed between calls. To
        use it for something else, call clean_low_latency_buffer afterwards: that is collective once
        the region was asked for, so ask for it on all ranks. Between nodes write there only after a
        barrier of the ranks, because the network may still read rows.

        Args:
            dtype: of the elements.
            size: shape of the result. Default: everything from ``offset`` on, flat.
            offset: in elements.
            use_rdma_buffer: the low-latency region instead of the ring space.

        Returns:
            A view of the Buffer's memory, of ``dtype``. Valid until destroy().

        Raises:
            ArgumentError: it would reach past the end.
            UnsupportedError: there is no low-latency region.

        Examples:
            >>> rings = buffer.get_local_buffer_tensor(torch.uint8)
        """
        self._context.require_open()
        if not isinstance(dtype, torch.dtype):
            raise ArgumentError("dtype", repr(dtype), "must be a torch.dtype")
        if use_rdma_buffer and not self.low_latency_mode:
            raise UnsupportedError("use_rdma_buffer needs low_latency_mode")
        num_elements = (
            self._context.low_latency_bytes if use_rdma_buffer else self.num_nvl_bytes
        ) // dtype.itemsize
        integers.require("offset", offset, 0, num_elements)
        extents = [num_elements - offset] if size is None else size
        if not isinstance(extents, Sequence) or not all(type(each) is int for each in extents):
            raise ArgumentError("size", repr(size), "must be a sequence of integers")
        if min(extents, default=0) < 0 or offset + math.prod(extents) > num_elements:
            rule = f"must fit in the {num_elements - offset} elements from offset on"
            raise ArgumentError("size", list(extents), rule)
        begin = self._context.workspace_bytes
        if use_rdma_buffer:
            self._low_latency_region.is_lent = True
            begin = self._context.low_latency_begin
        return self._context.heap.view(begin + offset * dtype.itemsize, extents, dtype)


_SHOWN_CALLS = (
    "get_dispatch_layout", "dispatch", "combine", "internode_dispatch", "internode_combine",
    "low_latency_dispatch", "low_latency_combine", "barrier",
)  # fmt: skip


def _stats_of(context: Context) -> BufferStats:
    return BufferStats.of(context.native_calls, context.num_direct_bytes)


def _described(buffer: Buffer) -> str:
    context, mib = buffer._context, 1 << 20
    topology, nodes = context.topology, "one node"
    if topology.num_nodes > 1:
        nodes = f"{topology.num_nodes} nodes of {topology.ranks_per_node}, rail {context.rail}"
    kinds = ["normal"] if buffer.num_nvl_bytes else []
    kinds += ["low-latency"] if buffer.low_latency_mode else []
    calls = " and ".join(kinds) or "no"
    user = f" for {log.user()}" if log.user() else ""
    return (
        f"{buffer!r} of deep_comm {__version__} is built{user}: {nodes}; {calls} calls; "
        f"{context.heap.num_bytes / mib:.1f} MiB, of which normal mode "
        f"{buffer.num_nvl_bytes / mib:.1f} (receive region {context.num_direct_bytes / mib:.1f}), "
        f"low latency {context.low_latency_bytes / mib:.1f}, between nodes "
        f"{context.num_rdma_bytes / mib:.1f}; from {os.path.dirname(__file__)}"
    )


_DECIDED = ("num_nvl_bytes", "num_rdma_bytes", "low_latency_mode", "num_max_experts",
            "num_direct_bytes")  # fmt: skip
_OPTIONS = tuple(inspect.signature(Buffer.__init__).parameters)[2:]  # without self and group


def _require_option(name: str) -> None:
    """Of for_shape, before ranks meet: one that fails alone would let the others wait."""
    if name in _DECIDED:
        raise ArgumentError(name, None, "follows from the shape; the constructor takes it")
    if name not in _OPTIONS:
        nearest = difflib.get_close_matches(name, _OPTIONS, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise ArgumentError(name, None, f"is no option of Buffer{hint}")


# Python's own errors, of a misspelt keyword for one, name the class that callers know.
for _class in (NormalCalls, InternodeCalls, LowLatencyCalls):
    for _name, _function in vars(_class).items():
        if inspect.isfunction(_function):
            _function.__qualname__ = f"Buffer.{_name}"
