"""On which stream ElasticBuffer's torch operations run, and who waits for whom:
with streams that write down.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from deep_comm import events
from deep_comm.compat.elastic import ElasticBuffer, EPHandle
from deep_comm.compat.section import Section


class Stream:
    def __init__(self, name: str, log: list) -> None:
        self.name, self.log, self.device = name, log, "cuda:0"

    def wait_stream(self, other: Stream) -> None:
        self.log.append((self.name, "waits for", other.name))

    def wait_event(self, event: Event) -> None:
        self.log.append((self.name, "waits for", event.name))


class Event:
    def __init__(self) -> None:
        self.name = "?"

    def record(self, stream: Stream) -> None:
        self.name = f"event of {stream.name}"


class Tensor:
    """Says which streams were told to keep its memory."""

    def __init__(self) -> None:
        self.streams: list[str] = []

    def numel(self) -> int:
        return 1

    def record_stream(self, stream: Stream) -> None:
        self.streams.append(stream.name)


class Machine:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list = []
        self.comm, self.compute = Stream("comm", self.log), Stream("compute", self.log)
        self.current = self.compute
        self.buffer = SimpleNamespace(
            device=torch.device("cuda", 0), get_comm_stream=lambda: self.comm
        )
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        patch.setattr(torch.cuda, "stream", self._switch)
        patch.setattr(torch.cuda, "Event", Event)

    @contextlib.contextmanager
    def _switch(self, stream: Stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_a_synchronous_section_stands_between_what_is_before_and_after(machine: Machine) -> None:
    given, made = Tensor(), Tensor()
    section = Section(machine.buffer, [], is_async=False)
    with section:
        assert machine.current is machine.comm
    assert machine.current is machine.compute
    event = section.finish([given, None], [made])
    assert event.event is None
    assert machine.log == [("comm", "waits for", "compute"), ("compute", "waits for", "comm")]
    # Memory of either stream is kept until the other is done with it.
    assert (given.streams, made.streams) == (["comm"], ["compute"])


def test_an_asynchronous_section_returns_what_to_wait_for(machine: Machine) -> None:
    section = Section(machine.buffer, [], is_async=True)
    with section:
        pass
    event = section.finish([], [])
    assert machine.log == [("comm", "waits for", "compute")]
    event.current_stream_wait()
    assert machine.log[1:] == [("compute", "waits for", "event of comm")]


def test_a_section_with_events_waits_for_them_instead_of_the_current_stream(
    machine: Machine,
) -> None:
    first, second = (events.EventHandle(Stream(name, machine.log)) for name in ("a", "b"))
    with Section(machine.buffer, [first, second], is_async=True):
        pass
    assert machine.log == [("comm", "waits for", "event of a"), ("comm", "waits for", "event of b")]


@pytest.mark.parametrize("is_async", [False, True])
def test_an_event_before_the_epilogue_comes_beside_the_current_stream(
    machine: Machine, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    before_epilogue = events.EventHandle(Stream("a", machine.log))
    given = []

    class Buffer(ElasticBuffer):
        def __init__(self) -> None:
            pass

        def _cached_dispatch(self, x, handle, weights, rows, timing) -> None:
            given.append(timing)

        _combine = _cached_dispatch

    handle = object.__new__(EPHandle)
    handle.do_expand = False
    rows = torch.zeros(1, 8)
    options = {
        "previous_event_before_epilogue": before_epilogue, "async_with_compute_stream": is_async
    }  # fmt: skip
    monkeypatch.setattr(EPHandle, "require", lambda self, **given: None)
    Buffer().dispatch(rows, handle=handle, **options)
    Buffer().combine(rows, handle, **options)
    for timing in given:
        machine.log.clear()
        with Section(machine.buffer, timing.events, timing.is_async):
            pass
        # The rows of the current stream may not be there yet when that event has passed.
        waited_for = [name for _, _, name in machine.log]
        assert waited_for == ["event of compute", "event of a"]
    assert len(given) == 2


def test_a_section_on_the_communication_stream_itself_waits_for_nothing(machine: Machine) -> None:
    machine.current = machine.comm
    section = Section(machine.buffer, [], is_async=False)
    with section:
        pass
    section.finish([], [])
    assert machine.log == []


def test_an_error_gives_the_current_stream_back(machine: Machine) -> None:
    with pytest.raises(ValueError, match="inside"), Section(machine.buffer, [], is_async=False):
        raise ValueError("inside")
    assert machine.current is machine.compute
