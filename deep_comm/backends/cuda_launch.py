"""The place of one operation among CUDA streams.

Runs in every call, where 20 microseconds are the whole of the host's time: streams are compared and
ordered as raw ``cudaStream_t``, with two events per Buffer, and torch's stream objects are only
made where torch itself must switch streams.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deep_comm import _core, _cuda, events
from deep_comm.backends.base import EXCHANGE_API, poison
from deep_comm.events import EventHandle, EventOverlap
from deep_comm.ops import quick

if TYPE_CHECKING:
    from deep_comm.handle_base import HeldTensors


def _current_raw_stream(device_index: int) -> int:
    return int(torch.cuda.current_stream(device_index).cuda_stream)


# torch's own shortcut, which its compiler's output uses too; a build without it
# pays for a stream object.
current_raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", _current_raw_stream
)


@functools.cache
def streams_of(device_index: int) -> _core.Streams:
    return _core.Streams(_cuda.streams(device_index))


def _mark(device_index: int, stream: int) -> _core.Event:
    return streams_of(device_index).mark(stream)


def _mark_here() -> _core.Event:
    device = _cuda.current_device()
    return _mark(device, current_raw_stream(device))


events.pool = events.Pool(_mark, _mark_here, lambda: current_raw_stream(_cuda.current_device()))


def make_framework(device: torch.device, comm: torch.cuda.Stream) -> _core.Framework:
    return _core.TorchFramework(
        device=device, comm_stream=comm, exchange_api=EXCHANGE_API, current_stream=None
    )


def _record(tensors: Iterable[Tensor | None], stream: torch.cuda.Stream) -> None:
    for tensor in tensors:
        if tensor is not None and tensor.numel() > 0:
            tensor.record_stream(stream)


class Streams:
    """What all operations of one Buffer share: its device, its communication stream,
    and where its last one is.

    Kernels of one Buffer run one at a time, in the order of the calls, on whichever streams: every
    operation runs behind ``done``, which lies behind the one before it
    (docs/design/0016). Operations of CUDA graphs have their order from the communication
    stream, which they all pass through.
    """

    __slots__ = (
        "comm", "device", "done", "empty", "framework", "hop", "index", "native", "order", "poisons",
        "raw_comm",
    )  # fmt: skip

    def __init__(self, device: torch.device, comm: torch.cuda.Stream, poison_outputs: bool) -> None:
        self.device = device
        self.index: int = device.index
        self.comm = comm
        self.raw_comm = int(comm.cuda_stream)
        self.poisons = poison_outputs
        self.native = streams_of(self.index)
        # Shared with native calls of the same Buffer.
        self.framework = make_framework(device, comm)
        self.order = _core.StreamOrder(self.native.door, self.framework, self.raw_comm)
        self.hop = self.order.hop  # from the caller's stream, and back in a capture
        self.done = self.order.done  # behind the last operation; never of a capture
        self.empty = quick.empty_of(device)  # the device must be current

    def synchronize(self) -> None:
        """Wait for the last operation, behind which all others are, and for what may be graphs."""
        self.order.synchronize()

    def launch(
        self, previous_event: EventHandle | None, async_finish: bool, on_comm: bool
    ) -> CallerLaunch | CommLaunch:
        compute = current_raw_stream(self.index)
        device_scope: torch.cuda.device | None = None
        if previous_event is None and not async_finish and self.native.is_ready(compute):
            return CallerLaunch(self, compute, device_scope)
        if not self.native.is_device_current():
            device_scope = torch.cuda.device(self.index)
            device_scope.__enter__()
            if (
                previous_event is None
                and not async_finish
                and not self.native.is_capturing(compute)
            ):
                return CallerLaunch(self, compute, device_scope)
        return CommLaunch(self, compute, device_scope, previous_event, async_finish, on_comm)

    def empty_for_both(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The communication stream's, and used by the current one."""
        tensor, caller = self.empty_on_comm(shape, dtype)
        if tensor.numel() > 0:
            tensor.record_stream(caller)
        return tensor

    def empty_on_comm(
        self, shape: Sequence[int], dtype: torch.dtype
    ) -> tuple[Tensor, torch.cuda.Stream]:
        """The communication stream's; and the current one."""
        caller = torch.cuda.current_stream(self.index)
        torch.cuda.set_stream(self.comm)
        try:
            return self.empty(shape, dtype), caller
        finally:
            torch.cuda.set_stream(caller)

    def end_asynchronous(self, known: HeldTensors | None, on_comm: bool) -> EventOverlap:
        if known is not None and known.tensors:
            self.record_handle(known, on_comm, current_raw_stream(self.index))
        return EventOverlap(EventHandle.of(self.native.mark(self.raw_comm)))

    def record_handle(self, handle: HeldTensors, on_comm: bool, caller_stream: int) -> None:
        """Tell torch's allocator that the communication stream uses it, and where that owns the
        outputs the caller's."""
        handle.record_on(self.comm, self.raw_comm)
        if on_comm:
            handle.record_on(torch.cuda.current_stream(self.index), caller_stream)


class CallerLaunch:
    """An operation that the caller's stream waits for anyway: it runs there."""

    __slots__ = ("stream", "caller_stream", "home_stream", "poisons", "_streams", "_device_scope")

    is_captured = False
    is_behind_caller = True

    def __init__(
        self, streams: Streams, compute: int, device_scope: torch.cuda.device | None
    ) -> None:
        self.stream = self.caller_stream = self.home_stream = compute
        self.poisons = streams.poisons
        self._streams = streams
        self._device_scope = device_scope
        last = streams.order.last
        if last != compute and last is not None:
            streams.done.wait(compute)

    def __enter__(self) -> CallerLaunch:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        streams = self._streams
        streams.order.last = self.stream
        streams.done.record(self.stream)
        if self._device_scope is not None:
            self._device_scope.__exit__(exc_type, exc_value, traceback)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = self._streams.empty(shape, dtype)
        if self.poisons:
            poison(tensor)
        return tensor

    def adopt(self, tensor: Tensor) -> Tensor:
        if self.poisons:
            poison(tensor)
        return tensor

    def wait(self, events: Iterable[Any]) -> None:
        for event in events:
            event.wait(self.stream)

    def finish(
        self, inputs: Iterable[Tensor | None], handle: HeldTensors | None = None
    ) -> EventOverlap:
        if handle is not None and handle.home_stream not in (None, self.stream):
            # The stream that would reuse the handle's memory does not wait for this call.
            handle.record_on(torch.cuda.current_stream(self._streams.index), self.stream)
        return EventOverlap()

    def pause(self) -> None:
        raise RuntimeError("an operation on the caller's stream ends where it began")

    def resume(self) -> None:
        self.pause()

    def follow_caller(self) -> None:
        pass


class CommLaunch:
    """Order of one operation among the caller's stream (compute) and the communication stream,
    where it runs: behind an event, or while the caller's stream goes on, or in a graph.

    Outputs belong to the communication stream when the caller asks for that, and also whenever the
    operation waits for an event instead of for the compute stream: memory that the compute stream
    hands out may still be in use by work that this stream has queued after the event.
    """

    __slots__ = (
        "stream",
        "caller_stream",
        "is_behind_caller",
        "is_captured",
        "poisons",
        "_streams",
        "_async_finish",
        "_on_comm",
        "_outputs",
        "_device_scope",
        "_caller",
        "_interrupted",
    )

    def __init__(
        self,
        streams: Streams,
        compute: int,
        device_scope: torch.cuda.device | None,
        previous_event: EventHandle | None,
        async_finish: bool,
        on_comm: bool,
    ) -> None:
        self.stream = comm = streams.raw_comm
        self._streams = streams
        self.caller_stream = compute
        self._async_finish = async_finish
        self._on_comm = on_comm or previous_event is not None
        self.poisons = streams.poisons
        self._outputs: list[Tensor] = []
        self._device_scope = device_scope
        self._caller: torch.cuda.Stream | None = None  # of an operation that has been paused
        self._interrupted: torch.cuda.Stream | None = None  # current when it was resumed
        self.is_behind_caller = previous_event is None
        if previous_event is not None:
            previous_event.stream_wait(streams.comm)
        elif compute != comm:
            streams.hop.order(compute, comm)
        self.is_captured = streams.native.is_capturing(comm)
        behind = comm, compute if self.is_behind_caller else comm
        if self.is_captured:
            streams.order.note_graph()
        else:
            last = streams.order.last
            if last is not None and last not in behind:
                streams.done.wait(comm)

    def __enter__(self) -> CommLaunch:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is not None:
            # Kernels of a call that failed half-way may still write: its memory must outlive them.
            self._record_outputs()
            self._end()
        if self._interrupted is not None:
            torch.cuda.set_stream(self._interrupted)
            self._interrupted = None
        if self._device_scope is not None:
            self._device_scope.__exit__(exc_type, exc_value, traceback)

    def pause(self) -> None:
        self._caller = torch.cuda.current_stream(self._streams.index)

    def resume(self) -> None:
        index = self._streams.index
        self._device_scope = None
        if not self._streams.native.is_device_current():
            self._device_scope = torch.cuda.device(index)
            self._device_scope.__enter__()
        if current_raw_stream(index) != self.caller_stream:
            assert self._caller is not None
            self._interrupted = torch.cuda.current_stream(index)
            torch.cuda.set_stream(self._caller)

    def follow_caller(self) -> None:
        if self._caller is not None and self.caller_stream != self.stream:
            self._streams.hop.order(self.caller_stream, self.stream)

    def _end(self) -> _core.Event:
        """An event behind the operation."""
        streams = self._streams
        event = streams.hop
        if not self.is_captured:
            event, streams.order.last = streams.done, self.stream
        event.record(self.stream)
        return event

    @property
    def home_stream(self) -> int:
        return self.stream if self._on_comm else self.caller_stream

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self._on_comm:
            tensor = self._streams.empty_on_comm(shape, dtype)[0]
        else:
            tensor = self._streams.empty(shape, dtype)
        if self.poisons:
            self._poison(tensor)
        self._outputs.append(tensor)
        return tensor

    def _poison(self, tensor: Tensor) -> None:
        with torch.cuda.stream(self._streams.comm):
            poison(tensor)

    def _record_outputs(self) -> None:
        """Tell torch's allocator of the stream that uses them beside their owner."""
        if self._on_comm:
            _record(self._outputs, torch.cuda.current_stream(self._streams.index))
        else:
            _record(self._outputs, self._streams.comm)

    def adopt(self, tensor: Tensor) -> Tensor:
        if self.poisons:
            self._poison(tensor)
        return tensor

    def wait(self, events: Iterable[Any]) -> None:
        for event in events:
            event.wait(self.stream)

    def finish(
        self, inputs: Iterable[Tensor | None], handle: HeldTensors | None = None
    ) -> EventOverlap:
        streams = self._streams
        end = self._end()
        if self._async_finish:
            _record(inputs, streams.comm)
            self._record_outputs()
            if handle is not None:
                self._record_handle(handle)
            return EventOverlap(EventHandle.of(streams.native.mark(self.stream)))
        if self.caller_stream != self.stream:
            end.wait(self.caller_stream)
        if self._on_comm:
            self._record_outputs()
        if handle is not None and handle.home_stream not in (None, self.caller_stream, self.stream):
            # The stream that would reuse the handle's memory does not wait for this call.
            self._record_handle(handle)
        return EventOverlap()

    def _record_handle(self, handle: HeldTensors) -> None:
        self._streams.record_handle(handle, self._on_comm, self.caller_stream)
