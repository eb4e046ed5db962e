"""The host target: kernels on the SIMT executor, heaps in shared or plain memory, no streams."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from deep_comm import _core
from deep_comm.backends import in_process
from deep_comm.backends.base import EXCHANGE_API, Heap, TensorsEventMaker
from deep_comm.errors import UnsupportedError
from deep_comm.ranks.rendezvous import Rendezvous
from deep_comm.ranks.topology import Topology
from deep_comm.settings import env

_HOST = torch.device("cpu")


class _HostHeap(Heap):
    """What both kinds of heap have in common."""

    device = _HOST

    def rail_arguments(self, peers: Sequence[int]) -> dict[str, Any]:
        return {
            "rail_bases": [self.peer_bases[peer] for peer in peers],
            "is_near": bool(env.RAIL_NEAR.get()),
        }

    def stores_reach(self, peers: Sequence[int]) -> bool:
        return bool(env.RAIL_NEAR.get())


class _ThreadHeap(_HostHeap):
    """Ranks are threads: every rank holds every rank's block."""

    def __init__(self, rendezvous: Rendezvous, num_bytes: int) -> None:
        def allocate() -> int:
            return in_process.allocated(num_bytes, lambda: _core.allocate(num_bytes))

        blocks = in_process.exchange(
            rendezvous, lambda: in_process.Block(allocate(), num_bytes, _core.free)
        )
        self.num_bytes = num_bytes
        self.peer_bases = [block.address for block in blocks]
        self.base = self.peer_bases[rendezvous.rank]
        self._rank = rendezvous.rank
        self._blocks = blocks

    def memory(self) -> object:
        return self._blocks[self._rank]

    def close(self) -> None:
        self._blocks = []


class _SegmentHeap(_HostHeap):
    """Ranks are processes: POSIX shared memory, its names gone before the first kernel runs."""

    def __init__(self, rendezvous: Rendezvous, num_bytes: int) -> None:
        _core.remove_stale_segments()
        self.num_bytes = num_bytes
        self._rank = rendezvous.rank
        self._segments: list[_core.Segment] = []
        own: list[_core.Segment] = []

        def create() -> str:
            own.append(in_process.allocated(num_bytes, lambda: _core.Segment.create(num_bytes)))
            return own[0].name

        def attach() -> None:
            for rank, name in enumerate(names):
                is_own = rank == rendezvous.rank
                self._segments.append(own[0] if is_own else _core.Segment.attach(name, num_bytes))

        try:
            names = rendezvous.all_gather_result("create its shared memory segment", create)
            rendezvous.all_gather_result("attach to its peers' segments", attach)
        except BaseException:
            self.close()
            raise
        finally:
            # All have attached, or the Buffer is not to be: either way nobody needs the name.
            for segment in own:
                segment.unlink()
        self.peer_bases = [segment.address for segment in self._segments]
        self.base = self.peer_bases[rendezvous.rank]

    def memory(self) -> object:
        return self._segments[self._rank]

    def close(self) -> None:
        for rank, segment in enumerate(self._segments):
            if rank != self._rank:
                segment.close()
        # Views may still use this rank's own segment, which unmaps itself with the last reference.
        self._segments = []


class CpuBackend:
    device = _HOST
    unique_device: str | None = None
    is_synchronous = True
    max_sms: int | None = None

    def __init__(self) -> None:
        self.streams = _core.streams()
        self.framework: _core.Framework = _core.TorchFramework(
            device=self.device, comm_stream=None, exchange_api=EXCHANGE_API, current_stream=None
        )
        self.order = _core.StreamOrder(self.streams, self.framework, 0)
        self.tensors_event: TensorsEventMaker | None = None

    def create_heap(
        self,
        rendezvous: Rendezvous,
        num_bytes: int,
        topology: Topology,
        rail: str | None,
        num_qps: int,
        multicast: bool,
    ) -> Heap:
        kind = _ThreadHeap if rendezvous.in_process else _SegmentHeap
        heap = kind(rendezvous, num_bytes)
        if multicast:
            heap.multicast_base = heap.base  # kernels go from rank to rank themselves
        return heap

    def create_engine(self, rendezvous: Rendezvous, **arguments: Any) -> _core.Engine:
        machine_rank = rendezvous.machine_rank if rendezvous.machine_rank >= 0 else rendezvous.rank
        return _core.Engine(device=machine_rank, simulation=rendezvous.simulation, **arguments)

    def comm_stream(self) -> torch.cuda.Stream:
        raise UnsupportedError("the host target has no streams")

    def mark(self) -> None:
        return None

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        return None

    def device_scope(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()
