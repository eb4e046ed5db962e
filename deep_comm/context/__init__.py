"""What a Buffer owns: rendezvous, heap, engine, error record; and how it comes and goes."""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from deep_comm import _core, errors, tuning
from deep_comm.backends import Backend, Heap, create_backend, resolve_device
from deep_comm.backends.base import EXCHANGE_API
from deep_comm.context import absent, stats
from deep_comm.context.absent import Absence
from deep_comm.context.failures import Failures
from deep_comm.events import EventHandle, EventOverlap
from deep_comm.handle import Handle, InternodeHandle
from deep_comm.log import logger
from deep_comm.ranks import rail as rails
from deep_comm.ranks.rendezvous import Rendezvous
from deep_comm.ranks.topology import (
    Topology,
    discover,
    host_identity,
    memory_identity,
    requested_ranks_per_node,
    require_supported,
    sharing_ranks,
)
from deep_comm.settings import env, integers
from deep_comm.settings.buffer import Settings

if TYPE_CHECKING:
    from deep_comm._core import Engine
    from deep_comm.trace.rings import Rings


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
        # The environment speaks of the machine, of which a group may be a part.
        if settings.ranks_per_node is not None and settings.ranks_per_node > self.num_ranks:
            raise errors.ArgumentError(
                "ranks_per_node",
                settings.ranks_per_node,
                f"must be at most the {self.num_ranks} ranks of the group",
            )
        self.rendezvous.meet(settings.timeout_s)
        self.num_nvl_bytes = settings.num_nvl_bytes
        self.num_qps = settings.num_qps
        self.num_max_experts = settings.num_max_experts
        self.is_open = False
        self._absence = Absence(self.backend)
        # Of low-latency calls; LowLatencyRegion sets it.
        self.forget_hooks: Callable[..., None] = lambda was_destroyed: None
        with self.backend.device_scope():
            self.rendezvous.require_equal(
                {
                    **settings.agreed,
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
                (
                    host_identity(), memory_identity(), self.backend.unique_device,
                    uuid.uuid4().hex[:12],
                )
            )  # fmt: skip
            hosts, memories, devices, names = zip(*identities, strict=True)
            # Threads that share a device have been given it.
            self.sharing_ranks = (
                [] if self.rendezvous.in_process else sharing_ranks(devices, self.rank)
            )
            self.topology: Topology = discover(hosts, ranks_per_node)
            require_supported(self.topology)
            # What the host target needs to reach a rank is its memory.
            places = memories if device.type == "cpu" else hosts
            self.rail = rails.choose(wanted_rail, device.type, self.topology, places)
            self.members = self.membership = self.rendezvous.members
            self.trace_rings: Rings | None = None

            def prepare() -> list[tuning.Entry]:
                if settings.trace_calls > 0:  # a rank without room must not build alone
                    self.trace_rings = self._rings(settings.trace_calls, names[0])
                return tuning.read(device, self.num_ranks)

            # One rank's for all: hosts may have measured at other times, or not at all.
            self.tuned = self.rendezvous.all_gather_result(
                "read what was tuned and make its trace", prepare
            )[0]
            self._create(settings)
            if self.trace_rings is not None:
                self.failures.trace_rings = self.trace_rings
                self.engine.set_trace(self.trace_rings.address, self.trace_rings.num_calls)

    def _lay_out(self, settings: Settings) -> int:
        """Bytes of a heap: words, normal mode, low-latency mode, words and rings of the rail."""
        topology, num_max_experts = self.topology, self.num_max_experts
        is_internode = topology.num_nodes > 1
        self.workspace_bytes = _core.Engine.workspace_bytes(
            num_ranks=topology.ranks_per_node, num_max_experts=num_max_experts
        )
        self.low_latency_bytes = integers.round_up(settings.low_latency_bytes)
        self.num_rdma_bytes = settings.num_rdma_bytes if is_internode else 0
        self.low_latency_end = self.workspace_bytes + integers.round_up(self.num_nvl_bytes)
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
        return self.low_latency_end + rail_words + integers.round_up(self.num_rdma_bytes)

    @property
    def low_latency_begin(self) -> int:
        """Where the region of low-latency calls begins in the heap: behind words that some have."""
        return self.low_latency_end - self.low_latency_bytes

    def _create(self, settings: Settings) -> None:
        topology = self.topology
        is_internode = topology.num_nodes > 1
        self.enable_shrink = settings.enable_shrink
        heap_bytes = self._lay_out(settings)
        self.heap: Heap = self.backend.create_heap(
            self.rendezvous, heap_bytes, topology, self.rail, settings.num_qps,
            settings.multicast and self.num_ranks > 1,
        )  # fmt: skip
        rail_peers: list[int] = []
        if is_internode:
            rail_peers = [*topology.rail_members(self.rank)]
            if self.low_latency_bytes > 0:  # whose rows go straight to every rank
                rail_peers += range(self.num_ranks)
        are_all_near = False
        engines: list[Engine] = []

        def create_engine() -> None:
            node_members = topology.node_members(self.rank)
            engine = self.backend.create_engine(
                self.rendezvous,
                rank=topology.local_rank(self.rank),
                num_ranks=topology.ranks_per_node,
                peer_bases=[self.heap.peer_bases[rank] for rank in node_members],
                heap_bytes=self.heap.num_bytes,
                num_max_experts=self.num_max_experts,
                timeout_ns=int(settings.timeout_s * 1e9),
                begins_early=env.EARLY_LAUNCHES.get(),
            )
            engines.append(engine)
            if is_internode:
                engine.enable_internode(
                    node=topology.node(self.rank),
                    num_nodes=topology.num_nodes,
                    num_qps=settings.num_qps,
                    num_bytes=heap_bytes - self.low_latency_end,
                    are_all_near=are_all_near,
                    **self.heap.rail_arguments(rail_peers),
                )
            if self.low_latency_bytes > 0:
                engine.enable_low_latency(
                    num_bytes=self.low_latency_bytes, can_shrink=settings.enable_shrink
                )

        try:
            if is_internode:  # agreed, since it decides where rows lie
                stores_reach = self.heap.stores_reach(rail_peers)
                are_all_near = all(self.rendezvous.all_gather_object(stores_reach))
            # The exchange is also the barrier before the first kernel: every heap is mapped.
            self.rendezvous.all_gather_result("create its engine", create_engine)
        except BaseException:
            for engine in engines:
                engine.close()
            self.heap.close()
            raise
        self.engine: Engine = engines[0]
        end = self.engine.data_offset + self.engine.data_bytes
        direct_bytes = self.num_direct_bytes = settings.direct_bytes()
        self.region = _core.Region(
            end - direct_bytes, end, self.backend.streams, self.backend.framework
        )
        self.num_ring_bytes = self.num_nvl_bytes - direct_bytes
        has_unordered = self.low_latency_bytes > 0 or settings.has_words
        self.failures = Failures(self.engine, self.backend, has_unordered)
        self.native_calls = self._bind_calls(is_internode and not are_all_near)
        self.native_calls.set_members(list(self.membership))
        if settings.num_direct_bytes != 0:  # nobody asked for rings
            self.native_calls.warn_without_room(
                functools.partial(stats.warn_without_room, self.num_nvl_bytes, direct_bytes)
            )
        self.get_dispatch_layout = self.native_calls.get_dispatch_layout
        self.dispatch = self.native_calls.dispatch
        self.combine = self.native_calls.combine
        self.barrier = self.native_calls.barrier
        self.is_open = True

    def _bind_calls(self, rail_reads_late: bool) -> _core.BufferCalls:
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
            rail_reads_late=rail_reads_late,
            raise_recorded=self.failures.raise_recorded,
            event_overlap=EventOverlap,
            event_of=EventHandle.of,
            handle_class=Handle,
            tier_handle_class=InternodeHandle,
            require_present=self._absence.require_present,
        )

    def _rings(self, num_calls: int, name: str) -> Rings:
        from deep_comm.trace.rings import Rings  # loaded where it is used

        # The host target has one clock; a GPU's is its own.
        where = "" if self.device.type == "cpu" else f" {self.device} of rank {self.rank}"
        try:
            return Rings(
                self.device, num_calls, self.rank, self.num_ranks, name,
                host_identity() + where, self.synchronize,
            )  # fmt: skip
        except torch.OutOfMemoryError as error:
            raise errors.AllocationError(_core.trace_bytes(num_calls), f"trace: {error}") from error

    def check(self) -> None:
        """Raise what a kernel recorded, if any has. Does not wait."""
        self.require_open()
        self.native_calls.require_no_call()  # whose record it would take
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
            self._absence.end()
            self._tell_absent()
            return
        if self.topology.num_nodes > 1:
            raise errors.UnsupportedError(
                "reset(without=...) serves groups inside one node; between nodes only low-latency "
                "calls go on without ranks (enable_shrink), and reset() needs all ranks"
            )
        with self._without_calls():
            try:
                self._absence.go_on(self.engine, self.absent | named)
            finally:
                self._tell_absent()

    @property
    def absent(self) -> frozenset[int]:
        """Ranks that the Buffer does without."""
        return self._absence.ranks

    def _tell_absent(self) -> None:
        """Handles are then those of dispatches with these ranks absent."""
        membership = absent.membership(self.members, self.absent)
        if membership != self.membership:
            self.membership = membership
            self.native_calls.set_members(list(membership))
        self.native_calls.set_absent(sorted(self.absent))

    def reset_low_latency(self) -> None:
        """Collective; see Buffer.low_latency_clean_mask_buffer."""
        self.require_open()
        if self.absent:
            raise errors.UnsupportedError(
                f"ranks {sorted(self.absent)} are absent since reset(without=...); reset() of all "
                "ranks takes them back"
            )
        self._reset(self.engine.reset_low_latency)

    @contextlib.contextmanager
    def _without_calls(self) -> Iterator[None]:
        """None is pending, and none begins in it."""
        self.native_calls.begin_reset()
        try:
            with self.backend.device_scope():
                self.synchronize()
                self.native_calls.end_calls(was_destroyed=False)
                self.forget_hooks(was_destroyed=False)
                try:
                    yield
                except BaseException:
                    # Words of some ranks may be at rest: no call until a reset has ended on all.
                    self.engine.note_interrupt()
                    raise
        finally:
            self.native_calls.end_reset()

    def _reset(self, reset: Callable[[], None]) -> None:
        with self._without_calls():
            self.engine.quiet_rail()
            self.rendezvous.barrier()  # nobody's kernels run any more, nothing is on its way
            reset()
            if self.trace_rings is not None:
                self.trace_rings.reset()
            self.rendezvous.barrier()  # nobody launches before all words are at rest

    def synchronize(self) -> None:
        """Wait for this rank's kernels."""
        self.failures.synchronize()

    def _leave_trace(self, trace_rings: Rings) -> None:
        """What it is left for may be an error, which must not be hidden."""
        try:
            trace_rings.leave()
        except OSError as failure:
            logger.warning("the trace of rank %d is not written: %s", self.rank, failure)

    def close(self) -> None:
        """Free what this rank owns. Waits for its own kernels, which are bounded; for no peer."""
        if not self.is_open:
            return
        self.is_open = False
        self.native_calls.close(may_be_in_use=True)
        with self.backend.device_scope(), contextlib.ExitStack() as steps:
            # Last in, first out; each runs even if an earlier one fails.
            steps.callback(self.rendezvous.release)
            steps.callback(self.heap.close)
            steps.callback(self.engine.close)
            steps.callback(self.native_calls.end_calls, was_destroyed=True)
            steps.callback(self.forget_hooks, was_destroyed=True)
            if self.trace_rings is not None:
                steps.callback(self._leave_trace, self.trace_rings)
            steps.callback(self._drain)

    def _drain(self) -> None:
        """Wait for this rank's kernels before their memory is freed, whatever interrupts it."""
        try:
            self.synchronize()
        except BaseException:
            with contextlib.suppress(BaseException):
                self.engine.note_interrupt()  # kernels give up
                self.synchronize()
            raise
