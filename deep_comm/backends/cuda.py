"""The GPU target: CUDA IPC heaps, and one high-priority communication stream per Buffer."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from deep_comm import _cuda, env
from deep_comm.backends import in_process
from deep_comm.backends.base import Heap, poison
from deep_comm.errors import TopologyError, UnsupportedError
from deep_comm.events import EventHandle, EventOverlap
from deep_comm.rendezvous import Rendezvous
from deep_comm.topology import host_identity

if TYPE_CHECKING:
    from deep_comm import _core

# The engine of either target has the same methods; their types are written down once.
_Engine = cast("type[_core.Engine]", _cuda.Engine)


class _DeviceMemory:
    """What torch needs to see foreign device memory as a tensor; keeps ``owner`` alive with it."""

    def __init__(self, address: int, num_bytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class _CudaHeap:
    """cudaMalloc memory that peers reach over NVLink.

    Peers in other processes open it by its IPC handle; peers that are threads of this process use
    the address itself.
    """

    def __init__(self, rendezvous: Rendezvous, device: int, num_bytes: int) -> None:
        self._device = device
        self._rank = rendezvous.rank
        self._opened: list[int] = []
        self._blocks: dict[int, in_process.Block] = {}
        self.num_bytes = num_bytes
        bases: list[int] = []

        def create() -> tuple[str, int, int, int, bytes]:
            def free(address: int) -> None:
                _cuda.free(device, address)

            block = in_process.Block(_cuda.allocate(device, num_bytes), num_bytes, free)
            self._blocks[self._rank] = block
            in_process.register(block)
            handle = b"" if rendezvous.in_process else _cuda.ipc_handle(block.address)
            return host_identity(), os.getpid(), device, block.address, handle

        def attach() -> None:
            for rank, (host, pid, peer_device, address, handle) in enumerate(described):
                is_local = (host, pid) == (host_identity(), os.getpid())
                bases.append(
                    self._attach_local(rank, peer_device, address)
                    if is_local
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

    def view(self, offset: int, num_bytes: int, owner: object = None) -> Tensor:
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=f"cuda:{self._device}")
        memory = _DeviceMemory(self.base + offset, num_bytes, (self._blocks[self._rank], owner))
        return torch.as_tensor(memory, device=f"cuda:{self._device}")

    def close(self) -> None:
        for address in self._opened:
            _cuda.ipc_close(self._device, address)
        self._opened = []
        self._blocks = {}


class _CudaLaunch:
    """Order of one operation among the caller's stream (compute) and the communication stream.

    Outputs belong to the communication stream when the caller asks for that, and also whenever the
    operation waits for an event instead of for the compute stream: memory that the compute stream
    hands out may still be in use by work that this stream has queued after the event.
    """

    def __init__(
        self,
        device: torch.device,
        comm_stream: torch.cuda.Stream,
        previous_event: EventHandle | None,
        async_finish: bool,
        allocate_on_comm_stream: bool,
        poison_outputs: bool,
    ) -> None:
        self.stream = comm_stream.cuda_stream
        self._device = device
        self._comm = comm_stream
        self._previous_event = previous_event
        self._async_finish = async_finish
        self._on_comm = allocate_on_comm_stream or previous_event is not None
        self._poison_outputs = poison_outputs
        self._outputs: list[Tensor] = []
        self._scope = contextlib.ExitStack()

    def __enter__(self) -> _CudaLaunch:
        self._scope.enter_context(torch.cuda.device(self._device))
        self._compute = torch.cuda.current_stream(self._device)
        if self._previous_event is not None:
            self._previous_event.stream_wait(self._comm)
        elif self._compute != self._comm:
            self._comm.wait_stream(self._compute)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is not None:
            # Kernels of a call that failed half-way may still write: its memory must outlive them.
            self._record(self._outputs)
        self._scope.close()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        owner = self._comm if self._on_comm else self._compute
        with torch.cuda.stream(owner):
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
        if self._poison_outputs:
            with torch.cuda.stream(self._comm):
                poison(tensor)
        self._outputs.append(tensor)
        return tensor

    def _record(self, tensors: Iterable[Tensor | None]) -> None:
        for tensor in tensors:
            if tensor is not None and tensor.numel() > 0:
                tensor.record_stream(self._comm)
                if self._on_comm:
                    tensor.record_stream(self._compute)

    def adopt(self, tensor: Tensor) -> Tensor:
        if self._poison_outputs:
            with torch.cuda.stream(self._comm):
                poison(tensor)
        return tensor

    def wait(self, events: Iterable[EventHandle]) -> None:
        for event in events:
            event.stream_wait(self._comm)

    def finish(self, inputs: Iterable[Tensor | None]) -> EventOverlap:
        if self._async_finish:
            self._record(inputs)
            self._record(self._outputs)
            return EventOverlap(EventHandle(self._comm))
        if self._compute != self._comm:
            self._compute.wait_stream(self._comm)
        if self._on_comm:
            self._record(self._outputs)
        return EventOverlap(None)


class CudaBackend:
    is_synchronous = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._index: int = device.index
        major, minor = torch.cuda.get_device_capability(device)
        built = {architecture.rstrip("af") for architecture in _architectures()}
        if f"{major}{minor}" not in built:
            raise UnsupportedError(
                f"{device} has compute capability {major}.{minor}, but the kernels were built for "
                f"{_cuda.architectures}"
            )
        self.max_sms: int | None = _cuda.num_sms(self._index)
        self._poison_outputs = env.POISON.get()
        # Above the default: communication that waits for a free SM keeps its peers waiting too.
        self._comm_stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def workspace_bytes(self, num_ranks: int, num_max_experts: int) -> int:
        return _Engine.workspace_bytes(num_ranks=num_ranks, num_max_experts=num_max_experts)

    def ring_bytes(
        self,
        *,
        num_ranks: int,
        num_channels: int,
        num_slots: int,
        row_bytes: int,
        scale_row_bytes: int,
        num_topk: int,
    ) -> int:
        return _Engine.ring_bytes(
            num_ranks=num_ranks,
            num_channels=num_channels,
            num_slots=num_slots,
            row_bytes=row_bytes,
            scale_row_bytes=scale_row_bytes,
            num_topk=num_topk,
        )

    def create_heap(self, rendezvous: Rendezvous, num_bytes: int) -> Heap:
        return _CudaHeap(rendezvous, self._index, num_bytes)

    def create_engine(
        self, rendezvous: Rendezvous, heap: Heap, num_max_experts: int, timeout_ns: int
    ) -> _core.Engine:
        return _Engine(
            rank=rendezvous.rank,
            num_ranks=rendezvous.size,
            device=self._index,
            peer_bases=list(heap.peer_bases),
            heap_bytes=heap.num_bytes,
            num_max_experts=num_max_experts,
            timeout_ns=timeout_ns,
        )

    def comm_stream(self) -> torch.cuda.Stream:
        return self._comm_stream

    def launch(
        self, previous_event: EventHandle | None, async_finish: bool, allocate_on_comm_stream: bool
    ) -> _CudaLaunch:
        return _CudaLaunch(
            self.device,
            self._comm_stream,
            previous_event,
            async_finish,
            allocate_on_comm_stream,
            self._poison_outputs,
        )

    def mark(self) -> tuple[int, EventHandle] | None:
        if torch.cuda.is_current_stream_capturing():
            return None  # an eager output dropped during a capture: replays are ordered behind its readers
        stream = torch.cuda.current_stream(self.device)
        return stream.cuda_stream, EventHandle(stream)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        self._comm_stream.synchronize()

    def device_scope(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.device(self.device)


def _architectures() -> list[str]:
    return re.split(r"[\s,;]+", _cuda.architectures.strip())
