"""The place of one operation among CUDA streams.

Runs in every call, where 20 microseconds are the whole of the host's time: streams are compared and
ordered as raw ``cudaStream_t``, with one event per Buffer, and torch's stream objects are only made where
torch itself must switch streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deep_comm import _cuda
from deep_comm.backends.base import poison
from deep_comm.events import EventHandle, EventOverlap

if TYPE_CHECKING:
    from deep_comm.handle import KnownHandle


def _current_raw_stream(device_index: int) -> int:
    return int(torch.cuda.current_stream(device_index).cuda_stream)


# torch's own shortcut, which its compiler's output uses too; a build without it pays for a stream object.
current_raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", _current_raw_stream
)
current_device: Callable[[], int] = _cuda.current_device


class Streams:
    """What all operations of one Buffer share: its device, its communication stream, an event."""

    def __init__(self, device: torch.device, comm: torch.cuda.Stream) -> None:
        self.device = device
        self.index: int = device.index
        self.comm = comm
        self.raw_comm = int(comm.cuda_stream)
        self.event = _cuda.Event(self.index)


class CudaLaunch:
    """Order of one operation among the caller's stream (compute) and the communication stream.

    Outputs belong to the communication stream when the caller asks for that, and also whenever the
    operation waits for an event instead of for the compute stream: memory that the compute stream
    hands out may still be in use by work that this stream has queued after the event.
    """

    __slots__ = (
        "stream",
        "ordered_after",
        "_streams",
        "_previous_event",
        "_async_finish",
        "_on_comm",
        "poisons",
        "_outputs",
        "_compute",
        "_device_scope",
    )

    def __init__(
        self,
        streams: Streams,
        previous_event: EventHandle | None,
        async_finish: bool,
        allocate_on_comm_stream: bool,
        poison_outputs: bool,
    ) -> None:
        self.stream = streams.raw_comm
        self._streams = streams
        self._previous_event = previous_event
        self._async_finish = async_finish
        self._on_comm = allocate_on_comm_stream or previous_event is not None
        self.poisons = poison_outputs
        self._outputs: list[Tensor] = []
        self._device_scope: torch.cuda.device | None = None

    def __enter__(self) -> CudaLaunch:
        streams = self._streams
        if current_device() != streams.index:
            self._device_scope = torch.cuda.device(streams.index)
            self._device_scope.__enter__()
        self._compute = current_raw_stream(streams.index)
        self.ordered_after: int | None = None
        if self._previous_event is not None:
            self._previous_event.stream_wait(streams.comm)
        else:
            self.ordered_after = self._compute
            if self._compute != streams.raw_comm:
                streams.event.order(self._compute, streams.raw_comm)
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
        if self._device_scope is not None:
            self._device_scope.__exit__(exc_type, exc_value, traceback)

    @property
    def home_stream(self) -> int:
        return self.stream if self._on_comm else self._compute

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self._on_comm:
            tensor = self._empty_on_comm(shape, dtype)
        else:
            tensor = torch.empty(*shape, dtype=dtype, device=self._streams.device)
        if self.poisons:
            self._poison(tensor)
        self._outputs.append(tensor)
        return tensor

    def _empty_on_comm(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        compute = torch.cuda.current_stream(self._streams.index)
        torch.cuda.set_stream(self._streams.comm)
        try:
            return torch.empty(*shape, dtype=dtype, device=self._streams.device)
        finally:
            torch.cuda.set_stream(compute)

    def _poison(self, tensor: Tensor) -> None:
        with torch.cuda.stream(self._streams.comm):
            poison(tensor)

    def _record(self, tensors: Iterable[Tensor | None]) -> None:
        """Tell torch's allocator that both streams use the tensors, whichever of them owns them."""
        streams = [self._streams.comm]
        if self._on_comm:
            streams.append(torch.cuda.current_stream(self._streams.index))
        for tensor in tensors:
            if tensor is not None and tensor.numel() > 0:
                for stream in streams:
                    tensor.record_stream(stream)

    def adopt(self, tensor: Tensor) -> Tensor:
        if self.poisons:
            self._poison(tensor)
        return tensor

    def wait(self, events: Iterable[Any]) -> None:
        for event in events:
            event.wait(self.stream)

    def finish(
        self, inputs: Iterable[Tensor | None], handle: KnownHandle | None = None
    ) -> EventOverlap:
        streams = self._streams
        if self._async_finish:
            self._record(inputs)
            self._record(self._outputs)
            if handle is not None:
                self._record_handle(handle)
            return EventOverlap(EventHandle(streams.comm))
        if self._compute != streams.raw_comm:
            streams.event.order(streams.raw_comm, self._compute)
        if self._on_comm:
            self._record(self._outputs)
        if handle is not None and handle.home_stream not in (
            None,
            self._compute,
            streams.raw_comm,
        ):
            # The stream that would reuse the handle's memory does not wait for this call.
            self._record_handle(handle)
        return EventOverlap(None)

    def _record_handle(self, handle: KnownHandle) -> None:
        """Once a stream is enough: the allocator remembers it for as long as the memory is in use."""
        key = (self._streams.raw_comm, self._compute if self._on_comm else None)
        if key not in handle.recorded_on:
            self._record(handle.tensors)
            handle.recorded_on.add(key)
