"""NVSHMEM: the job that this process takes part in, and heaps in its symmetric memory.

A process has one NVSHMEM job for its whole life: the ranks of the first Buffer that needs one, or
what the program has started itself. Allocating there is collective over the job, and so is giving
back; a Buffer that goes therefore only puts its memory aside, for the next one of these ranks.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deep_comm.backends import in_process
from deep_comm.backends.base import Heap
from deep_comm.errors import AllocationError, TopologyError, UnsupportedError
from deep_comm.ranks.rendezvous import Rendezvous
from deep_comm.ranks.topology import Topology, host_identity
from deep_comm.settings import env

_log = logging.getLogger("deep_comm.rail")
_lock = threading.Lock()

INSTALL = "pip install nvidia-nvshmem-cu13==3.4.5 nvshmem4py-cu13 (the version that torch pins)"


def load() -> Any:
    """The native module. Raises UnsupportedError that says what to install."""
    if importlib.util.find_spec("deep_comm._nvshmem") is None:
        raise UnsupportedError(
            "this build of deep_comm has no NVSHMEM module, so rail='nvshmem' cannot be; "
            f"{INSTALL}, then install deep_comm again where nvcc is on PATH"
        )
    if importlib.util.find_spec("nvshmem") is None:
        raise UnsupportedError(f"rail='nvshmem' needs the Python package nvshmem4py; {INSTALL}")
    try:
        from nvshmem import core  # noqa: F401 - loads the host library

        from deep_comm import _nvshmem
    except Exception as error:
        raise UnsupportedError(f"NVSHMEM cannot be loaded ({error}); {INSTALL}") from error
    return _nvshmem


def settings(num_qps: int, heap_bytes: int, spans_hosts: bool) -> dict[str, str]:
    """What NVSHMEM is started with, unless the user's environment says otherwise."""
    wanted = {
        # Multicast objects are a resource of the whole host, and nothing here uses them.
        "NVSHMEM_DISABLE_NVLS": "1",
        # Teams cost device memory; there is one.
        "NVSHMEM_MAX_TEAMS": "7",
        # Read only where memory cannot be mapped on demand.
        "NVSHMEM_SYMMETRIC_SIZE": str(max(1 << 30, heap_bytes + (256 << 20))),
    }
    if not spans_hosts:
        wanted["NVSHMEM_REMOTE_TRANSPORT"] = "none"  # saves looking for NICs
        return wanted
    wanted |= {
        "NVSHMEM_IB_ENABLE_IBGDA": "1",
        # A queue pair serves a block at a time: as many as channels post at once.
        "NVSHMEM_IBGDA_NUM_RC_PER_PE": str(num_qps),
        "NVSHMEM_IBGDA_RC_MAP_BY": "cta",
        # Above what the rings of a channel can have under way.
        "NVSHMEM_QP_DEPTH": "1024",
    }
    return wanted


class Job:
    """One of a process; see the module's docstring."""

    def __init__(self, module: Any, name: bytes | None) -> None:
        self.module = module
        self.name = name  # None: started by the program itself
        self.pe, self.num_pes = module.place()
        self._aside: dict[int, tuple[int, int]] = {}  # number -> address, bytes
        self._num_allocated = 0
        self._queues: dict[int, int] = {}

    def queues(self, num_qps: int) -> int:
        """Address of ``num_qps`` handles, or 0. Collective at the first call with that number."""
        if num_qps not in self._queues:
            self._queues[num_qps] = self.module.queues(num_qps)
        return self._queues[num_qps]

    def allocate(self, rendezvous: Rendezvous, num_bytes: int) -> in_process.Block:
        """Zeroed memory at one symmetric place on all ranks, which are all PEs. Collective."""
        self.module.settle()  # what an earlier Buffer has put there
        aside = rendezvous.all_gather_object(dict(self._aside))
        common = sorted(set.intersection(*(set(blocks) for blocks in aside)))
        # All blocks of a number have one size.
        fitting = [number for number in common if self._aside[number][1] >= num_bytes]
        number = min(fitting, key=lambda which: (self._aside[which][1], which), default=None)
        if number is None:
            for unused in common:
                self.module.release(self._aside.pop(unused)[0])
            self._num_allocated += 1
            number = self._num_allocated
            address, size = self.module.allocate(num_bytes), num_bytes
        else:
            address, size = self._aside.pop(number)

        def clear() -> None:
            if address == 0:
                raise AllocationError(num_bytes, "NVSHMEM has no room (see NVSHMEM_SYMMETRIC_SIZE)")
            self.module.clear(address, num_bytes)

        rendezvous.all_gather_result("clear its part of the symmetric heap", clear)
        taken: int = number

        def put_aside(block_address: int) -> None:
            self._aside[taken] = (block_address, size)

        return in_process.Block(address, num_bytes, put_aside)


_job: Job | None = None


@dataclass(frozen=True)
class _State:
    """What a rank knows of NVSHMEM before a Buffer is built."""

    is_up: bool
    name: bytes | None = None
    pe: int = -1
    num_pes: int = 0


def _state(module: Any) -> _State:
    if not module.is_up():
        return _State(False)
    pe, num_pes = module.place()
    return _State(True, None if _job is None else _job.name, pe, num_pes)


def require_one_job(states: Sequence[_State]) -> None:
    """Raise TopologyError unless NVSHMEM runs on all of these ranks and on no others."""
    ranks = list(range(len(states)))
    without = [rank for rank in ranks if not states[rank].is_up]
    rule = "a process has one NVSHMEM job, and Buffers over it are of exactly its ranks"
    if without:
        raise TopologyError(
            f"NVSHMEM runs already on some ranks of the group, but not on {without}; {rule}"
        )
    names = {state.name for state in states}
    pes = sorted(state.pe for state in states)
    if len(names) > 1 or pes != ranks or {state.num_pes for state in states} != {len(states)}:
        sizes = sorted({state.num_pes for state in states})
        raise TopologyError(
            f"the group of {len(states)} ranks is not the NVSHMEM job that its processes take part "
            f"in (of {' or '.join(map(str, sizes))} ranks); {rule}"
        )


def _start(
    rendezvous: Rendezvous, device: int, num_qps: int, heap_bytes: int, spans_hosts: bool
) -> bytes:
    """Start the job over the group's ranks. Collective. Returns its name."""
    import numpy
    from cuda.core import Device
    from nvshmem import core

    wanted = settings(num_qps, heap_bytes, spans_hosts)
    for name, value, is_users in env.set_foreign_defaults(wanted):
        _log.debug("%s=%s%s", name, value, " (the environment's)" if is_users else "")

    def make_id() -> bytes | None:
        if rendezvous.rank != 0:
            return None
        return bytes(core.get_unique_id()._data.view(numpy.uint8))

    job_id = rendezvous.all_gather_result("make NVSHMEM's unique id", make_id)[0]
    assert job_id is not None

    def start() -> None:
        unique_id = core.get_unique_id(empty=True)
        unique_id._data.view(numpy.uint8)[:] = numpy.frombuffer(job_id, numpy.uint8)
        place = Device(device)
        place.set_current()
        core.init(
            device=place, uid=unique_id, rank=rendezvous.rank, nranks=rendezvous.size,
            initializer_method="uid",
        )  # fmt: skip

    rendezvous.all_gather_result("start NVSHMEM", start)
    return job_id


def join(
    rendezvous: Rendezvous, device: int, num_qps: int, heap_bytes: int, hosts: Sequence[str]
) -> Job:
    """The job of the group's ranks, started if there is none. Collective."""
    global _job
    if rendezvous.in_process:
        raise UnsupportedError("rail='nvshmem' needs a process a rank; these are threads of one")
    rendezvous.all_gather_result("load NVSHMEM", lambda: load() and None)
    module = load()
    with _lock:
        states = rendezvous.all_gather_object(_state(module))
        name: bytes | None = None
        if any(state.is_up for state in states):
            require_one_job(states)
        else:
            name = _start(rendezvous, device, num_qps, heap_bytes, len(set(hosts)) > 1)
        if _job is None:
            rendezvous.all_gather_result("attach to NVSHMEM", module.attach)
            _job = Job(module, name)
            _log.debug("NVSHMEM %s: PE %d of %d", module.version, _job.pe, _job.num_pes)
        else:
            rendezvous.all_gather_result("attach to NVSHMEM", lambda: None)
        return _job


class NvshmemHeap(Heap):
    """A segment in the symmetric heap: peers of this node over NVLink, others over the rail."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        device: int,
        num_bytes: int,
        topology: Topology,
        num_qps: int,
    ) -> None:
        hosts = rendezvous.all_gather_object(host_identity())
        self.device = torch.device("cuda", device)
        self._rank = rendezvous.rank
        self._topology = topology
        self._job = join(rendezvous, device, num_qps, num_bytes, hosts)
        self._qps = self._job.queues(num_qps)
        self._pes = rendezvous.all_gather_object(self._job.pe)
        self._block: in_process.Block | None = self._job.allocate(rendezvous, num_bytes)
        self.num_bytes = num_bytes
        self.base: int = self._block.address
        # 0: only NVSHMEM reaches it.
        self.peer_bases: Sequence[int] = [
            self.base if rank == self._rank else self._job.module.peer_address(self.base, pe)
            for rank, pe in enumerate(self._pes)
        ]

        def require_node() -> None:
            for peer in topology.node_members(self._rank):
                if self.peer_bases[peer] == 0:
                    raise TopologyError(
                        f"rank {self._rank} does not reach rank {peer} of its node over NVLink"
                    )

        try:
            rendezvous.all_gather_result("reach its node's heaps", require_node)
        except BaseException:
            self.close()
            raise

    def rail_arguments(self, peers: Sequence[int]) -> dict[str, Any]:
        return {
            "rail_bases": [self.peer_bases[peer] if self._is_near(peer) else 0 for peer in peers],
            "rail_pes": [self._pes[peer] for peer in peers],
            "rail_kernels": self._job.module.kernels(),
            "rail_base": self.base,
            "rail_qps": self._qps,
        }

    def stores_reach(self, peers: Sequence[int]) -> bool:
        return all(self._is_near(peer) for peer in peers)

    def _is_near(self, rank: int) -> bool:
        """Whether what this rank sends to that one is stored there."""
        if env.RAIL_NEAR.get() is False:
            return False
        # Stores reach all of a node: low-latency mode sends to each rank there, or to one that
        # hands on; of some and some it would be both.
        return all(self.peer_bases[member] != 0 for member in self._topology.node_members(rank))

    def memory(self) -> object:
        return self._block

    def close(self) -> None:
        self._block = None  # put aside when the last view has gone
