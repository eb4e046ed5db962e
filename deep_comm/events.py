"""Events between the caller's stream and a Buffer's communication stream.

On the host target kernels have ended when a call returns, so that events hold nothing and waiting
for one does nothing; which arguments may go together is the same on both targets.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from deep_comm.errors import ArgumentError


class Pool(NamedTuple):
    """Events of the native pool, for a tenth of the time that one of torch's and its stream objects
    take.

    Attributes: ``mark(device, stream)``: one at this point of a raw stream; ``here()``: at this
    point of the current one; ``current_stream()``: that one.
    """

    mark: Callable[[int, int], Any]
    here: Callable[[], Any]
    current_stream: Callable[[], int]


pool: Pool | None = None
"""From when the CUDA backend is there; without it, events of native calls have passed."""


class EventHandle:
    """A point in the work of a CUDA stream: the current stream unless one is given.

    On the host target it holds nothing, and waiting for it does nothing.

    Examples:
        >>> event = deep_comm.EventHandle()
        >>> event.current_stream_wait()
    """

    _event: torch.cuda.Event | None = None
    _pooled: Any = None

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        if pool is not None:
            if stream is None:
                self._pooled = pool.here()
            else:
                self._pooled = pool.mark(stream.device_index, stream.cuda_stream)
        # Without a CUDA context nothing can be in flight, and recording would make one.
        elif stream is not None or (torch.cuda.is_available() and torch.cuda.is_initialized()):
            self._event = torch.cuda.Event()
            self._event.record(stream if stream is not None else torch.cuda.current_stream())

    @classmethod
    def of(cls, pooled: Any) -> EventHandle:
        """Of an event of the pool."""
        handle = object.__new__(cls)
        handle._pooled = pooled
        return handle

    def current_stream_wait(self) -> None:
        """Let what the current stream gets from now on wait for this event. The host does not."""
        if self._pooled is not None:
            self._pooled.wait(0 if pool is None else pool.current_stream())
        elif self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def stream_wait(self, stream: torch.cuda.Stream) -> None:
        """Let what ``stream`` gets from now on wait for this event. The host does not."""
        if self._pooled is not None:
            self._pooled.wait(stream.cuda_stream)
        elif self._event is not None:
            stream.wait_event(self._event)


class TensorsEvent(EventHandle):
    """The end of an operation on a communication stream, which reads and writes ``tensors`` of the
    stream ``owner_stream``: their memory must not go back to it before it waits for this event.

    So they are kept until it does. That costs nothing; telling torch's allocator of another stream
    (``record_stream``) takes it an event a tensor, and is left for events that nobody waits for.
    """

    _tensors: Sequence[torch.Tensor] = ()

    def __init__(
        self,
        pooled: Any,
        tensors: Sequence[torch.Tensor],
        owner_stream: int,
        comm: torch.cuda.Stream,
    ) -> None:
        self._pooled = pooled
        self._tensors = tensors
        self._owner_stream = owner_stream
        self._comm = comm

    def current_stream_wait(self) -> None:
        assert pool is not None
        self._wait(pool.current_stream())

    def stream_wait(self, stream: torch.cuda.Stream) -> None:
        self._wait(stream.cuda_stream)

    def _wait(self, stream: int) -> None:
        self._pooled.wait(stream)
        if stream == self._owner_stream:
            self._tensors = ()

    def __del__(self) -> None:
        if not self._tensors or sys.is_finalizing() or self._pooled.has_passed():
            return
        for tensor in self._tensors:
            if tensor.numel() > 0:
                tensor.record_stream(self._comm)


class EventOverlap:
    """An EventHandle or nothing. As a context manager it waits at the end of the block.

    Asynchronous calls return one with an event, other calls an empty one.

    Attributes:
        event: None if the call was synchronous.
        extra_tensors: tensors that it keeps alive.
        hook_after_wait: called once, by the next wait.

    Examples:
        >>> *_, event = buffer.dispatch(x, topk_idx=topk_idx, num_experts=E, async_finish=True)
        >>> with event:
        ...     shared = x / 2  # work that does not need the result of the communication
    """

    # Of an instance that calls in one native step make, without __init__.
    event: EventHandle | None = None
    extra_tensors: tuple[torch.Tensor, ...] | None = None
    hook_after_wait: Callable[[], object] | None = None
    _release_handle_by_call = False

    def __init__(
        self,
        event: EventHandle | None = None,
        extra_tensors: tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Let what the current stream gets from now on wait for the event. The host does not.

        Args:
            release_handle: let go of the event, and of what it keeps alive, afterwards.

        Raises:
            ArgumentError: there is no event.
        """
        if self.event is None:
            raise ArgumentError(
                "event", None, "must be that of an asynchronous call to wait for it"
            )
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = self.extra_tensors = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], object]) -> None:
        """Let the next wait call the hook when it has queued the waiting. One hook at a time.

        Examples:
            >>> event = deep_comm.EventOverlap(deep_comm.EventHandle())
            >>> event.register_hook_after_wait(lambda: print("queued"))
            >>> event.current_stream_wait()
        """
        if self.hook_after_wait is not None:
            raise ArgumentError("hook_after_wait", None, "is there already, and only one may be")
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """``with event(release_handle=True): ...``"""
        self._release_handle_by_call = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_raised: object) -> None:
        if self.event is not None:
            self.current_stream_wait(self._release_handle_by_call)


def unwrap(previous_event: EventOverlap | EventHandle | None) -> EventHandle | None:
    """The event to wait for. ``EventOverlap(None)``, what synchronous calls return, means none."""
    if previous_event is None or isinstance(previous_event, EventHandle):
        return previous_event
    if isinstance(previous_event, EventOverlap):
        return previous_event.event
    raise ArgumentError(
        "previous_event", type(previous_event).__name__, "must be an EventOverlap or None"
    )


def event_of_call(
    previous_event: EventOverlap | EventHandle | None,
    async_finish: bool,
    allocate_on_comm_stream: bool,
) -> EventHandle | None:
    """What a call waits for. The three may only be combined as the streams allow."""
    event = unwrap(previous_event)
    if allocate_on_comm_stream and (event is None or not async_finish):
        given = "given" if event is not None else None
        raise ArgumentError(
            "allocate_on_comm_stream",
            f"previous_event={given}, async_finish={async_finish}",
            "needs a previous_event and async_finish=True",
        )
    return event
