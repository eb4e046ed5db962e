"""What a Buffer owns: rendezvous, heap, engine, error record; and how it comes and goes."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from deep_comm import _core, absent, env, errors, tuning
from deep_comm import rail as rails
from deep_comm.backends import Backend, Heap, create_backend, resolve_device
from deep_comm.backends.base import EXCHANGE_API
from deep_comm.config import Config, RingPlan, plan_rings, require_config
from deep_comm.events import EventHandle, EventOverlap
from deep_comm.failures import Failures
from deep_comm.handle import Handle, KnownHandle
from deep_comm.ops import quick
from deep_comm.ops.early import EarlyLaunches, ExpectedRows
from deep_comm.rendezvous import Rendezvous
from deep_comm.settings import Settings
from deep_comm.topology import (
    Topology,
    discover,
    host_identity,
    memory_identity,
    requested_ranks_per_node,
    require_supported,
)
from deep_comm.tuning import DefaultConfig

if TYPE_CHECKING:
    from deep_comm._core import Engine
    from deep_comm.ops.steps import PendingDispatch
    from deep_comm.trace.rings import Rings


# Shapes and configs of calls whose rings are remembered; a program uses a handful.
_MAX_PLANS = 512


def _rounded(num_bytes: int) -> int:
    """Up to whole lines, as regions of the heap are."""
    return -(-num_bytes // 128) * 128


class Context:
    """One rank of one Buffer. Holds no reference to the Buffer, so that the Buffer's finalizer can
    hold one to it."""

    def __init__(self, group: Any, comm: Any, settings: Settings) -> None:
        """Collective over the group."""
        ranks_per_node = requested_ranks_per_node(settings.ranks_per_node)
        wanted_rail = rails.requested(settings.rail)
        device = resolve_device(settings.device)
        self.backend: Backend = create_backend(device)
        self.device = device
        self.rendezvous = Rendezvous(group, comm)
        self.rank = self.rendezvous.rank
        self.num_ranks = self.rendezvous.size
        self.num_nvl_bytes = settings.num_nvl_bytes
        self.num_qps = settings.num_qps
        self.num_max_experts = settings.num_max_experts
        self.is_open = False
        self.early_launches = EarlyLaunches()  # of dispatches between nodes
        self.pending: PendingDispatch | None = None  # sent, and not yet waited for
        self.owner = object()  # what handles remember this Buffer by, without keeping it alive
        self.absent: frozenset[int] = frozenset()  # ranks that the Buffer does without
        self.last_meeting = 0  # of those that go on without others: its number
        self._plans: dict[tuple[object, ...], RingPlan] = {}
        self.calls: dict[tuple[object, ...], Any] = {}  # what ops have planned, by their keys
        self.two_tier_plans: dict[tuple[object, ...], Any] = {}  # see ops/internode_plan.py
        with self.backend.device_scope():
            self.rendezvous.require_equal(
                {
                    "num_nvl_bytes": settings.num_nvl_bytes,
                    "num_direct_bytes": settings.num_direct_bytes,
                    "num_max_experts": settings.num_max_experts,
                    "num_rdma_bytes in low_latency_mode": settings.low_latency_bytes,
                    "enable_shrink": settings.enable_shrink,
                    "ranks_per_node": ranks_per_node,
                    "num_rdma_bytes": settings.num_rdma_bytes,
                    "num_qps_per_rank": settings.num_qps,
                    "rail": wanted_rail,
                    "device type": device.type,
                    "deep_comm version": settings.version,
                }
            )
            # The last one names the Buffer, as rank 0 says.
            identities = self.rendezvous.all_gather_object(
                (host_identity(), memory_identity(), uuid.uuid4().hex[:12])
            )
            hosts, memories, names = zip(*identities, strict=True)
            self.topology: Topology = discover(hosts, ranks_per_node)
            require_supported(self.topology)
            self.expected = ExpectedRows(self.num_ranks, self.topology.num_nodes)
            # What the host target needs to reach a rank is its memory.
            places = memories if device.type == "cpu" else hosts
            self.rail = rails.choose(wanted_rail, device.type, self.topology, places)
            self.members = self.makers = self.rendezvous.members
            # One rank's for all: hosts may have measured at other times, or not at all.
            self.tuned = self.rendezvous.all_gather_result(
                "read what was tuned", lambda: tuning.read(device, self.num_ranks)
            )[0]
            self._create(settings)
            self.trace_rings: Rings | None = None
            if settings.trace_calls > 0:
                try:
                    self._trace(settings.trace_calls, names[0])
                except BaseException:
                    self.close()
                    raise

    def _lay_out(self, settings: Settings) -> int:
        """Bytes of a heap: words, normal mode, low-latency mode, words and rings of the rail."""
        topology, num_max_experts = self.topology, self.num_max_experts
        is_internode = topology.num_nodes > 1
        self.workspace_bytes = _core.Engine.workspace_bytes(
            num_ranks=topology.ranks_per_node, num_max_experts=num_max_experts
        )
        self.low_latency_bytes = _rounded(settings.low_latency_bytes)
        self.num_rdma_bytes = settings.num_rdma_bytes if is_internode else 0
        self.low_latency_end = self.workspace_bytes + _rounded(self.num_nvl_bytes)
        self.low_latency_end += self.low_latency_bytes
        if not is_internode:
            return self.low_latency_end
        if self.low_latency_bytes > 0:
            self.low_latency_end += _core.Engine.low_latency_rail_workspace_bytes(
                num_ranks=self.num_ranks, num_max_experts=num_max_experts
            )
        rail_words = _core.Engine.rail_workspace_bytes(
            num_nodes=topology.num_nodes,
            ranks_per_node=topology.ranks_per_node,
            num_max_experts=num_max_experts,
        )
        return self.low_latency_end + rail_words + _rounded(self.num_rdma_bytes)

    def _create(self, settings: Settings) -> None:
        topology = self.topology
        is_internode = topology.num_nodes > 1
        self.enable_shrink = settings.enable_shrink
        heap_bytes = self._lay_out(settings)
        self.heap: Heap = self.backend.create_heap(
            self.rendezvous, heap_bytes, topology, self.rail, settings.num_qps
        )
        # Where the last combine between nodes staged: the rail may read sums there when the kernel
        # has ended, until the rail peers have come to a later call.
        self.staged = range(0)
        # Whether the rail reads so late, and there may be such sums: local kernels in front of a
        # dispatch must not write to the region then.
        self.reads_late = self.may_be_read = False
        engines: list[Engine] = []

        def create_engine() -> None:
            timeout_ns = int(settings.timeout_s * 1e9)
            engines.append(
                self.backend.create_engine(
                    self.rendezvous, self.topology, self.heap, self.num_max_experts, timeout_ns
                )
            )
            if is_internode:
                peers = [*topology.rail_members(self.rank)]
                if self.low_latency_bytes > 0:  # whose rows go straight to every rank
                    peers += range(self.num_ranks)
                self.reads_late = self.heap.rail_reads_late(peers)
                engines[0].enable_internode(
                    node=topology.node(self.rank),
                    num_nodes=topology.num_nodes,
                    num_qps=settings.num_qps,
                    num_bytes=heap_bytes - self.low_latency_end,
                    **self.heap.rail_arguments(peers),
                )
            if self.low_latency_bytes > 0:
                engines[0].enable_low_latency(
                    num_bytes=self.low_latency_bytes,
                    can_shrink=settings.enable_shrink,
                    begins_early=env.EARLY_LAUNCHES.get(),
                )

        try:
            # The exchange is also the barrier before the first kernel: every heap is mapped.
            self.rendezvous.all_gather_result("create its engine", create_engine)
        except BaseException:
            for engine in engines:
                engine.close()
            self.heap.close()
            raise
        self.engine: Engine = engines[0]
        from deep_comm.region import Region  # native: loaded no earlier than the backend's module

        end = self.engine.data_offset + self.engine.data_bytes
        direct_bytes = self.num_direct_bytes = settings.direct_bytes()
        self.region = Region(
            end - direct_bytes,
            end,
            self.backend.streams,
            self.backend.framework,
        )
        self.num_ring_bytes = self.num_nvl_bytes - direct_bytes
        self.failures = Failures(self.engine, self.backend, self.low_latency_bytes > 0)
        self.native_calls = self._bind_calls()
        self.get_dispatch_layout = self.native_calls.get_dispatch_layout
        # For the host's hot path: see the classes they belong to.
        self.launch = self.backend.launch
        self.take = self.region.taker()
        engine = self.engine
        self.count_layout = engine.plan_internode_layout() if is_internode else engine.plan_layout()
        self.wait_counts = engine.counts_waiter()
        self.wait_tier_counts = engine.tier_counts_waiter()
        self._has_failed: Sequence[int] = self.engine.error_flag()
        self.quick = quick.normal_of(self)
        self.quick_layout = quick.layout_of(self)
        self.is_open = True

    def _bind_calls(self) -> _core.BufferCalls:
        topology = self.topology
        return _core.BufferCalls(
            engine=self.engine.calls,
            order=self.backend.order,
            region=self.region,
            device=self.device,
            exchange_api=EXCHANGE_API,
            heap_base=self.heap.base,
            heap_memory=self.heap.memory(),
            poisons=env.POISON.get(),
            rank=self.rank,
            num_ranks=self.num_ranks,
            num_nodes=topology.num_nodes,
            ranks_per_node=topology.ranks_per_node,
            num_max_experts=self.num_max_experts,
            num_nvl_bytes=self.num_nvl_bytes,
            num_ring_bytes=self.num_ring_bytes,
            num_rdma_bytes=self.num_rdma_bytes,
            max_sms=self.backend.max_sms,
            raise_recorded=self.failures.raise_recorded,
            event_overlap=EventOverlap,
            event_of=EventHandle.of,
        )

    def _trace(self, num_calls: int, name: str) -> None:
        from deep_comm.trace.rings import Rings  # loaded where it is used

        # The host target has one clock; a GPU's is its own.
        where = "" if self.device.type == "cpu" else f" {self.device} of rank {self.rank}"
        self.trace_rings = Rings(
            self.device, num_calls, self.rank, self.num_ranks, name,
            host_identity() + where, self.failures.synchronize,
        )  # fmt: skip
        self.failures.trace_rings = self.trace_rings
        self.engine.set_trace(self.trace_rings.address, self.trace_rings.num_calls)

    def plan(
        self,
        config: Config | None,
        default: Config | DefaultConfig | None,
        row_bytes: int,
        scale_row_bytes: int,
        num_topk: int,
        num_channels: int | None = None,
        expand: bool = False,
    ) -> RingPlan:
        """Rings for one call; raises BufferTooSmall or ArgumentError.
        ``default``: without a config.

        Worked out once for equal arguments: a Buffer's memory does not change.
        """
        if expand:
            scale_row_bytes += self.engine.place_bytes  # travels with each row, as scales do
        if config is None or type(config) is Config:
            key = (config, default, row_bytes, scale_row_bytes, num_topk, num_channels)
            known = self._plans.get(key)
            if known is None:
                known = self._plan(*key)
                if len(self._plans) == _MAX_PLANS:
                    self._plans.clear()
                self._plans[key] = known
            return known
        return self._plan(config, default, row_bytes, scale_row_bytes, num_topk, num_channels)

    def _plan(
        self,
        config: Config | None,
        default: Config | DefaultConfig | None,
        row_bytes: int,
        scale_row_bytes: int,
        num_topk: int,
        num_channels: int | None,
    ) -> RingPlan:
        require_config(config)

        def ring_bytes(channels: int, slots: int) -> int:
            return _core.Engine.ring_bytes(
                num_ranks=self.num_ranks,
                num_channels=channels,
                num_slots=slots,
                row_bytes=row_bytes,
                scale_row_bytes=scale_row_bytes,
                num_topk=num_topk,
            )

        names_sms = not isinstance(default, DefaultConfig)
        if isinstance(default, DefaultConfig):
            default = default(row_bytes + scale_row_bytes)
        chosen = config if config is not None else default
        assert chosen is not None
        plan = plan_rings(
            config,
            chosen,
            num_channels=num_channels,
            max_sms=self.backend.max_sms,
            num_nvl_bytes=self.num_nvl_bytes,
            num_ring_bytes=self.num_ring_bytes,
            ring_bytes=ring_bytes,
        )
        max_sms = self.backend.max_sms
        if names_sms or max_sms is None:
            return plan
        # A few SMs fill the links, but not the memory of a GPU: docs/design/0036.
        return replace(plan, num_local_blocks=max_sms)

    def address(self, tensor: Tensor | None) -> int:
        """Of a tensor, for the engine: 0 means "not given", which an empty tensor is not.

        An empty tensor has no address of its own; it gets one that nobody will follow.
        """
        if tensor is None:
            return 0
        return tensor.data_ptr() or self.heap.base

    def known_handle(self, handle: Handle | Sequence[Tensor]) -> KnownHandle:
        """The handle as calls use it. Raises ArgumentError; HandleMismatch: of another group."""
        if type(handle) is Handle:
            known = handle.known_to(self.owner)
            if known is not None:
                return known
        checked = Handle.of(handle)
        checked.require_group(self.rank, self.num_ranks, self.makers, self.device)
        absent.require_present(self, checked)
        return checked.remember(self.owner, self.heap.base)

    def is_sound(self) -> bool:
        """The Buffer lives, no kernel has left a record, and no dispatch is pending."""
        return self._has_failed[0] == 0 and self.pending is None

    def begin(self) -> None:
        """Before every operation: the Buffer lives and no kernel has failed. Operations run one
        behind the other, so that one whose counts are still awaited ends now.

        A bad expert index found by get_dispatch_layout is left to notify_dispatch, which tells the
        peers as well; raising here, or not, would depend on when the kernel ran.
        """
        if self.pending is not None:
            self.pending.settle()
        if self._has_failed[0] != 0:
            self.require_open()
            record = self.engine.poll_error()
            if record is not None and record.kind != "expert_index":
                self.failures.raise_record(record)

    def end(self) -> None:
        """After an engine call: where kernels have ended by now, raise what they recorded."""
        if self.backend.is_synchronous:
            self.check()

    def check(self) -> None:
        """Raise what a kernel recorded, if any has. Does not wait."""
        self.require_open()
        record = self.engine.poll_error()
        if record is not None:
            self.failures.raise_record(record)

    def require_open(self) -> None:
        if not self.is_open:
            raise errors.BufferDestroyed("the Buffer was used after destroy()")

    def reset(self, without: Iterable[int] = ()) -> None:
        """Collective; see Buffer.reset."""
        self.require_open()
        named = absent.checked(without, self.rank, self.num_ranks)
        if not named:
            self._reset(self.engine.reset)
            self.last_meeting = 0
            self._set_absent(named)
            return
        if self.topology.num_nodes > 1:
            raise errors.UnsupportedError(
                "reset(without=...) serves groups inside one node; between nodes only low-latency "
                "calls go on without ranks (enable_shrink), and reset() needs all ranks"
            )
        with self.backend.device_scope():
            self._end_calls()
            try:
                absent.go_on(self, self.absent | named)
            finally:
                self.early_launches = EarlyLaunches()
                self._set_absent(self.absent)

    def _set_absent(self, ranks: frozenset[int]) -> None:
        """Handles are then those of dispatches with these ranks absent."""
        makers = absent.makers(self.members, ranks)
        if makers != self.makers:
            self.makers, self.owner = makers, object()
        self.absent = ranks
        self.native_calls.set_absent(sorted(ranks))

    def reset_low_latency(self) -> None:
        """Collective; see Buffer.low_latency_clean_mask_buffer."""
        self.require_open()
        if self.absent:
            raise errors.UnsupportedError(
                f"ranks {sorted(self.absent)} are absent since reset(without=...); reset() of all "
                "ranks takes them back"
            )
        self._reset(self.engine.reset_low_latency)

    def _end_calls(self) -> None:
        self.synchronize()
        self._forget_pending(
            errors.ArgumentError("dispatch", None, "must be received before reset()")
        )

    def _reset(self, reset: Callable[[], None]) -> None:
        with self.backend.device_scope():
            self._end_calls()
            self.engine.quiet_rail()
            self.rendezvous.barrier()  # nobody's kernels run any more, nothing is on its way
            reset()
            if self.trace_rings is not None:
                self.trace_rings.reset()
            self.early_launches = EarlyLaunches()  # ranks may have seen different outcomes
            self.rendezvous.barrier()  # nobody launches before all words are at rest

    def synchronize(self) -> None:
        """Wait for this rank's kernels."""
        self.failures.synchronize()

    def _forget_pending(self, error: Exception) -> None:
        """After all kernels have ended."""
        if self.pending is not None:
            self.pending.forget(error)

    def close(self) -> None:
        """Free what this rank owns. Waits for its own kernels, which are bounded; for no peer."""
        if not self.is_open:
            return
        self.is_open = False
        self._has_failed = (1,)  # the engine's word goes with it
        with self.backend.device_scope(), contextlib.ExitStack() as steps:
            # Last in, first out; each runs even if an earlier one fails.
            steps.callback(self.rendezvous.release)
            steps.callback(self.heap.close)
            steps.callback(self.engine.close)
            destroyed = "the Buffer was destroyed before its dispatch had been received"
            steps.callback(self._forget_pending, errors.BufferDestroyed(destroyed))
            if self.trace_rings is not None:
                steps.callback(self.trace_rings.leave)
            steps.callback(self.synchronize)
