"""The CUDA backend on a machine without CUDA: its Python code runs, its streams are numbers.

The module `deep_comm._cuda` is replaced by one whose engine is the host target's and whose streams
and events (tests/native/fake_streams.cpp) write down what they are asked to do. Tensors live on the
host. So the order of streams and the number of calls can be tested, and kernels still move rows.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import deep_comm
from deep_comm import _core, _simt_tests, events
from deep_comm.backends.base import EXCHANGE_API

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
        stub_counts: what `wait_counts` returns where launches are skipped.
        planned: (name, blocks) of every local kernel, ("combine", DefaultConfig.combine_sms) of
            every plan of a combine, ("may_run_beside", bool) of every expanded call.
        defers: from a notify on, until the host waits for its counts, an engine's launches go to a
            thread of its own, in order: a stream. Other launches end before they return.
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
        self.stub_counts: tuple[int, int, bool, list[int]] | None = None
        self.planned: list[tuple[str, Any]] = []
        self.defers = False

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

    def assert_in_order(self) -> None:
        """Each kernel comes after the one before it."""
        for number, (stream, known) in enumerate(self.kernels):
            assert number == 0 or number - 1 in known, (number, stream, self)

    @contextlib.contextmanager
    def capture_on(self, stream: int) -> Iterator[None]:
        """A graph is recorded, with `stream` as the caller's."""
        before, self.current = self.current, stream
        self.capturing.add(stream)
        known = {key: set(value) for key, value in self.known.items()}
        try:
            yield
        finally:
            assert self.current == stream
            self.capturing.clear()
            self.capture += 1
            self.known.clear()
            self.known.update(known)  # what was captured has not run
            self.current = before

    # What the native engine and streams ask.

    def plan(self, name: str, what: Any) -> None:
        self.planned.append((name, what))

    def defers_launches(self) -> bool:
        return self.defers

    def wait_counts(self) -> tuple[int, int, bool, list[int]] | None:
        if not self.is_silent:
            self.append(("wait_counts",))
        return self.stub_counts

    def is_capturing(self, stream: int) -> bool:
        return stream in self.capturing

    def capture_of(self, stream: int) -> int:
        return self.capture if stream in self.capturing else 0

    def make_event(self) -> PooledEvent:
        return PooledEvent(self)

    def mark(self, stream: int) -> PooledEvent:
        event = PooledEvent(self)
        if not self.is_silent:
            self.append(("mark", stream))
            _Point.record(event, stream)
        return event

    def synchronize_device(self) -> None:
        self.append(("synchronize device",))


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


class PooledEvent(_Point):
    """An event of the native streams."""

    def record(self, stream: int) -> None:
        if self._log.is_silent:
            return
        self._log.append(("record", stream))
        super().record(stream)

    def wait(self, stream: int) -> None:
        if self._log.is_silent:
            return
        self._log.append(("wait", stream))
        super().wait(stream)

    def synchronize(self) -> None:
        self._log.append(("synchronize",))

    def has_passed(self) -> bool:
        return self._log.has_passed

    def order(self, first: int, then: int) -> None:
        if self._log.is_silent:
            return
        self._log.append(("order", first, then))
        super().record(first)
        super().wait(then)


def _module(log: Log) -> types.ModuleType:
    module = types.ModuleType("deep_comm._cuda")

    class Engine(_core.Engine):
        _logged: Any = None

        @property
        def calls(self) -> object:
            self._logged = _simt_tests.LoggedEngine(super().calls, log)
            return self._logged.door

        def drain(self) -> None:
            """Wait for launches that are deferred."""
            if self._logged is not None:
                self._logged.drain()

        def close(self) -> None:
            self.drain()
            super().close()

        @property
        def stub_counts(self) -> tuple[int, int, bool, list[int]] | None:
            return log.stub_counts

        @stub_counts.setter
        def stub_counts(self, counts: tuple[int, int, bool, list[int]] | None) -> None:
            log.stub_counts = counts

    module.architectures = "90a ptx90"
    module.Engine = Engine
    module.streams = lambda device: _simt_tests.fake_streams(log)
    module.current_device = lambda: 0
    module.num_sms = lambda device: 132
    module.allocate = lambda device, num_bytes: _core.allocate(num_bytes)
    module.free = lambda device, address: _core.free(address)
    return module


def _framework(log: Log) -> Callable[..., _core.Framework]:
    def make(device: torch.device, comm: Any) -> _core.Framework:
        return _core.TorchFramework(
            device=device,
            comm_stream=comm,
            exchange_api=EXCHANGE_API,
            current_stream=lambda: log.current,
        )

    return make


@contextlib.contextmanager
def installed() -> Iterator[Log]:
    """Buffers built inside, on device "cpu", go through the CUDA backend."""
    log = Log()
    device = torch.device("cpu", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "deep_comm._cuda", _module(log))
        patch.setattr(events, "pool", None)  # or the stub's would outlive it
        patch.setattr(deep_comm, "_cuda", sys.modules["deep_comm._cuda"], raising=False)
        for name in ("deep_comm.backends.cuda", "deep_comm.backends.cuda_streams"):
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
        patch.setattr(torch.cuda, "synchronize", lambda device=None: log.synchronize_device())
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        properties = types.SimpleNamespace(uuid="GPU-0")
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        backend = importlib.import_module("deep_comm.backends.cuda").CudaBackend
        patch.setattr("deep_comm.backends.cuda.make_framework", _framework(log))
        patch.setattr("deep_comm.context.resolve_device", lambda wanted: torch.device("cpu"))
        patch.setattr("deep_comm.context.create_backend", lambda wanted: backend(device))
        try:
            yield log
        finally:
            for name in ("deep_comm.backends.cuda", "deep_comm.backends.cuda_streams"):
                sys.modules.pop(name, None)


class Counter:
    """Python functions of the package entered while it is active."""

    def __init__(self) -> None:
        self.functions: list[str] = []

    def __enter__(self) -> Counter:
        sys.setprofile(self._enter)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)

    def _enter(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call" and "/deep_comm/" in frame.f_code.co_filename:
            self.functions.append(frame.f_code.co_name)
