"""The CUDA backend on a machine without CUDA: its Python code runs, its streams are numbers.

The module `deep_comm._cuda` is replaced by one whose engine is the host target's and whose events
write down what they are asked to do. Tensors live on the host. So the order of streams and the
number of calls can be tested, and kernels still move the rows.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator

import pytest
import torch

import deep_comm
from deep_comm import _core, events

COMPUTE, COMM = 11, 22


class Log(list):
    """What was done to streams and memory, in order; and what CUDA would know of it.

    Attributes:
        current: the caller's stream.
        capturing: streams that record a graph.
        capture: number of the graph that is recorded now, or will be next.
        has_passed: what events say of the kernels before them.
        known: by stream, the work that all further work there is behind.
        kernels: (stream, what was known there) of every launch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = COMPUTE
        self.capturing: set[int] = set()
        self.capture = 1
        self.known: dict[int, set[object]] = collections.defaultdict(set)
        self.kernels: list[tuple[int, frozenset[object]]] = []
        self.has_passed = False
        self.is_silent = False  # for measuring: nothing is written down

    def names(self) -> list[str]:
        return [entry[0] for entry in self]

    def launch(self, name: str, stream: int) -> None:
        if self.is_silent:
            return
        self.append((name, stream))
        self.kernels.append((stream, frozenset(self.known[stream])))
        self.known[stream].add(len(self.kernels) - 1)

    def work(self, name: object) -> None:
        """Of the caller, on its stream."""
        self.known[self.current].add(name)


class _Point:
    """An event, with CUDA's rules for events and captures."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._known: frozenset[object] = frozenset()
        self._capture = 0

    def record(self, stream: int) -> None:
        self._known = frozenset(self._log.known[stream])
        self._capture = self._log.capture if stream in self._log.capturing else 0

    def wait(self, stream: int) -> None:
        if self._capture:
            if not self._log.capturing or self._capture != self._log.capture:
                raise RuntimeError("cudaErrorStreamCaptureIsolation")
            self._log.capturing.add(stream)
        elif stream in self._log.capturing:
            raise RuntimeError("cudaErrorStreamCaptureIsolation")
        self._log.known[stream] |= self._known


class _Stream:
    """torch.cuda.Stream."""

    def __init__(self, log: Log, stream: int) -> None:
        self._log = log
        self.cuda_stream = stream

    def synchronize(self) -> None:
        pass

    def wait_event(self, event: _Event) -> None:
        event.point.wait(self.cuda_stream)


class _Event:
    """torch.cuda.Event."""

    def __init__(self, log: Log) -> None:
        self.point = _Point(log)

    def record(self, stream: _Stream) -> None:
        if self.point._log.is_silent:
            return
        self.point.record(stream.cuda_stream)


def _module(log: Log) -> types.ModuleType:
    module = types.ModuleType("deep_comm._cuda")

    class Event(_Point):
        def __init__(self, device: int) -> None:
            super().__init__(log)

        def record(self, stream: int) -> None:
            if log.is_silent:
                return
            log.append(("record", stream))
            super().record(stream)

        def recorder(self) -> Callable[[int], None]:
            return self.record

        def wait(self, stream: int) -> None:
            if log.is_silent:
                return
            log.append(("wait", stream))
            super().wait(stream)

        def synchronize(self) -> None:
            log.append(("synchronize",))

        def has_passed(self) -> bool:
            return log.has_passed

        def order(self, first: int, then: int) -> None:
            if log.is_silent:
                return
            log.append(("order", first, then))
            super().record(first)
            super().wait(then)

    class Engine(_core.Engine):
        stub_counts = None  # of wait_counts, where launches are skipped

        def counts_waiter(self) -> Callable[[], object]:
            wait = super().counts_waiter()

            def wait_counts() -> object:
                if not log.is_silent:
                    log.append(("wait_counts",))
                return wait() if self.stub_counts is None else self.stub_counts

            return wait_counts

    def written_down(name: str, plan: str) -> None:
        """Calls of what Engine.plan_* returns; the stream is their last argument."""
        make = getattr(_core.Engine, plan)

        def plan_and_log(self: Engine, **options: object) -> Callable[..., object]:
            call = make(self, **options)
            if log.is_silent:
                return call

            def launch(*numbers: int) -> object:
                log.launch(name, numbers[-1])
                return call(*numbers)

            return launch

        setattr(Engine, plan, plan_and_log)

    written_down("layout", "plan_layout")
    written_down("notify", "plan_notify")
    written_down("dispatch", "plan_dispatch")
    written_down("combine", "plan_combine")

    def mark(device: int, stream: int) -> Event | None:
        if log.is_silent:
            return Event(device)
        log.append(("mark", stream))
        if stream in log.capturing:
            return None
        event = Event(device)
        _Point.record(event, stream)
        return event

    def mark_captured(stream: int) -> tuple[Event, int] | None:
        if stream not in log.capturing:
            return None
        event = Event(0)
        _Point.record(event, stream)
        return event, log.capture

    def mark_always(device: int, stream: int) -> Event:
        event = Event(device)
        event.record(stream)
        return event

    module.architectures = "90a"
    module.mark = mark_always
    module.Event, module.Engine = Event, Engine
    module.marker = lambda device: functools.partial(mark, device)
    module.capture_marker = lambda device: mark_captured
    module.is_capturing = lambda stream: stream in log.capturing
    module.capture_check = lambda device, exchange_api: lambda: log.current in log.capturing
    module.is_current = lambda device: True
    module.is_ready = lambda device, stream: stream not in log.capturing
    module.current_device = lambda: 0
    module.num_sms = lambda device: 132
    module.allocate = lambda device, num_bytes: _core.allocate(num_bytes)
    module.free = lambda device, address: _core.free(address)
    return module


@contextlib.contextmanager
def installed() -> Iterator[Log]:
    """Buffers built inside, on device "cpu", go through the CUDA backend."""
    log = Log()
    device = torch.device("cpu", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "deep_comm._cuda", _module(log))
        patch.setattr(events, "pool", None)  # or the stub's would outlive it
        patch.setattr(deep_comm, "_cuda", sys.modules["deep_comm._cuda"], raising=False)
        for name in ("deep_comm.backends.cuda", "deep_comm.backends.cuda_launch"):
            patch.delitem(sys.modules, name, raising=False)
        patch.setattr(
            torch._C, "_cuda_getCurrentRawStream", lambda index: log.current, raising=False
        )
        patch.setattr(torch.cuda, "Stream", lambda device, priority: _Stream(log, COMM))
        patch.setattr(torch.cuda, "Event", lambda: _Event(log))
        patch.setattr(torch.cuda, "current_stream", lambda device=None: _Stream(log, log.current))
        patch.setattr(
            torch.cuda, "set_stream", lambda stream: setattr(log, "current", stream.cuda_stream)
        )
        patch.setattr(
            torch.cuda, "synchronize", lambda device=None: log.append(("synchronize device",))
        )
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        backend = importlib.import_module("deep_comm.backends.cuda").CudaBackend
        patch.setattr("deep_comm.context.resolve_device", lambda wanted: torch.device("cpu"))
        patch.setattr("deep_comm.context.create_backend", lambda wanted: backend(device))
        try:
            yield log
        finally:
            for name in ("deep_comm.backends.cuda", "deep_comm.backends.cuda_launch"):
                sys.modules.pop(name, None)
