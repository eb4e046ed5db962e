"""The GPU target: CUDA IPC heaps, and one high-priority communication stream per Buffer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from deep_comm import _core, _cuda
from deep_comm.backends import in_process
from deep_comm.backends.architectures import runs_on
from deep_comm.backends.base import EXCHANGE_API, Heap, TensorsEventMaker
from deep_comm.backends.cuda_streams import current_raw_stream, make_framework, streams_of
from deep_comm.errors import TopologyError, UnsupportedError
from deep_comm.events import TensorsEvent
from deep_comm.ranks.rail import NVSHMEM
from deep_comm.ranks.rendezvous import Rendezvous
from deep_comm.ranks.topology import Topology, process_identity
from deep_comm.settings import env

# The engine of either target has the same methods; their types are written down once.
_Engine = cast("type[_core.Engine]", _cuda.Engine)


class _CudaHeap(Heap):
    """cudaMalloc memory that peers reach over NVLink.

    Peers in other processes open it by its IPC handle; peers that are threads of this process use
    the address itself.
    """

    def __init__(self, rendezvous: Rendezvous, device: int, num_bytes: int) -> None:
        self.device = torch.device("cuda", device)
        self._device = device
        self._rank = rendezvous.rank
        self._opened: list[int] = []
        self._blocks: dict[int, in_process.Block] = {}
        self.num_bytes = num_bytes
        bases: list[int] = []

        def create() -> tuple[str, int, int, bytes]:
            def free(address: int) -> None:
                _cuda.free(device, address)

            address = in_process.allocated(num_bytes, lambda: _cuda.allocate(device, num_bytes))
            block = in_process.Block(address, num_bytes, free)
            self._blocks[self._rank] = block
            in_process.register(block)
            handle = b"" if rendezvous.in_process else _cuda.ipc_handle(block.address)
            return process_identity(), device, block.address, handle

        def attach() -> None:
            own = process_identity()
            for rank, (process, peer_device, address, handle) in enumerate(described):
                bases.append(
                    self._attach_local(rank, peer_device, address)
                    if process == own
                    else self._attach_process(handle)
                )

        try:
            described = rendezvous.all_gather_result("allocate its heap", create)
            rendezvous.all_gather_result("reach its peers' heaps", attach)
        except BaseException:
            self.close()
            raise
        self.peer_bases: Sequence[int] = bases
        self.base = bases[self._rank]

    def _attach_local(self, rank: int, peer_device: int, address: int) -> int:
        if peer_device != self._device:
            if not _cuda.can_access_peer(self._device, peer_device):
                raise TopologyError(
                    f"cuda:{self._device} cannot reach cuda:{peer_device} (rank {rank})"
                )
            _cuda.enable_peer_access(self._device, peer_device)
        self._blocks[rank] = in_process.find(address)
        return address

    def _attach_process(self, handle: bytes) -> int:
        address = _cuda.ipc_open(self._device, handle)
        self._opened.append(address)
        return address

    def memory(self) -> object:
        return self._blocks[self._rank]

    def rail_arguments(self, peers: Sequence[int]) -> dict[str, Any]:
        return {
            "rail_bases": [self.peer_bases[peer] for peer in peers],
            "nic_bytes_per_s": (env.NIC_GB_PER_S.get() or 0.0) * 1e9,
            "is_alone": len(self._blocks) == 1,
        }

    def stores_reach(self, peers: Sequence[int]) -> bool:
        return False  # the software NIC's copies are on streams of its own

    def close(self) -> None:
        for address in self._opened:
            _cuda.ipc_close(self._device, address)
        self._opened = []
        self._blocks = {}


class CudaBackend:
    is_synchronous = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._index: int = device.index
        # Not the index: processes may number the devices that they see differently.
        self.unique_device: str | None = str(torch.cuda.get_device_properties(device).uuid)
        major, minor = torch.cuda.get_device_capability(device)
        if not runs_on(_cuda.architectures, major, minor):
            raise UnsupportedError(
                f"{device} has compute capability {major}.{minor}, but the kernels were built for "
                f"{_cuda.architectures}: set DEEP_COMM_CUDA_ARCHS and build again"
            )
        self.max_sms: int | None = _cuda.num_sms(self._index)
        # Above the default: communication that waits for a free SM keeps its peers waiting too.
        self._comm_stream = torch.cuda.Stream(device, priority=-1)
        native = streams_of(self._index)
        self.streams: object = native.door
        self.framework = make_framework(device, self._comm_stream)
        self.order = _core.StreamOrder(native.door, self.framework, self._comm_stream.cuda_stream)
        self.tensors_event: TensorsEventMaker | None = functools.partial(
            TensorsEvent, comm=self._comm_stream
        )
        # Of every step of a layer's "auto".
        self.is_capturing: Callable[[], bool] = self._is_capturing
        check = native.capture_check(self._index, EXCHANGE_API)
        if check is not None:
            self.is_capturing = check

    def create_heap(
        self,
        rendezvous: Rendezvous,
        num_bytes: int,
        topology: Topology,
        rail: str | None,
        num_qps: int,
        multicast: bool,
    ) -> Heap:
        if multicast:
            # Loaded where it is asked for, as NVSHMEM.
            from deep_comm.backends.multicast import MulticastHeap

            capability = torch.cuda.get_device_capability(self.device)
            has_kernels = runs_on(_cuda.architectures, *capability, least=90)
            return MulticastHeap(rendezvous, self.device, num_bytes, has_kernels)
        if rail == NVSHMEM:
            # Loaded where it is needed: all else works without NVSHMEM.
            from deep_comm.backends.nvshmem import NvshmemHeap

            return NvshmemHeap(rendezvous, self._index, num_bytes, topology, num_qps)
        return _CudaHeap(rendezvous, self._index, num_bytes)

    def create_engine(self, rendezvous: Rendezvous, **arguments: Any) -> _core.Engine:
        return _Engine(device=self._index, **arguments)

    def mark(self) -> _core.Event:
        return streams_of(self._index).mark(current_raw_stream(self._index))

    def _is_capturing(self) -> bool:
        return streams_of(self._index).is_capturing(current_raw_stream(self._index))

    def comm_stream(self) -> torch.cuda.Stream:
        return self._comm_stream

    def synchronize(self) -> None:
        self.order.synchronize()
        self._comm_stream.synchronize()

    def device_scope(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.device(self.device)
