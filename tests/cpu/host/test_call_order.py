"""The order of native calls among streams (csrc/host/stream_order.hpp), on streams that keep CUDA's
rules (fake_cuda): kernels of one Buffer must run one at a time, in the order of the calls, on
every stream; and what the framework's allocator is told of. Whole calls, graphs, and that these
checks can fail: test_stream_order.py."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import fake_cuda
import pytest
from fake_cuda import COMM, COMPUTE

from deep_comm import _simt_tests

OTHER = 33


class Log(fake_cuda.Log):
    """And what the allocator was told: (tensor, "comm" or "current")."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, str]] = []


class Captured:
    """An EventHandle of the current stream."""

    def __init__(self, log: Log) -> None:
        self._point = fake_cuda._Point(log)
        self._point.record(log.current)

    def wait_on_comm(self) -> None:
        self._point.wait(COMM)


class Bench:
    def __init__(self) -> None:
        self.log = Log()
        streams = _simt_tests.fake_streams(self.log)
        self.order = _simt_tests.StreamOrder(streams, self.log, COMM)

    def call(self, **options: Any) -> Callable[[int], None] | None:
        call = self.order.begin(**options)
        self.log.launch("kernel", call.stream)
        return call.finish()

    def fail(self, **options: Any) -> None:
        """Between its launch and its end."""
        call = self.order.begin(**options)
        self.log.launch("kernel", call.stream)
        call.note_output("output")
        del call


def test_a_call_without_order_leaves_no_event() -> None:
    bench = Bench()
    bench.call()
    bench.log.current = OTHER
    bench.log.clear()
    call = bench.order.begin_unordered()
    assert call.stream == OTHER
    call.finish()
    assert bench.log == []


def test_a_captured_call_that_raises_is_in_order() -> None:
    bench = Bench()
    with bench.log.capture_on(44):
        bench.call()
        bench.fail()
        wait = bench.call(is_async=True)
        assert wait is not None
        wait(44)
        bench.log.assert_in_order()
    bench.log.clear()
    bench.order.synchronize()
    assert bench.log.names() == ["synchronize device"]


@pytest.mark.parametrize("seed", range(6))
def test_any_mixture_of_calls_is_in_order(seed: int) -> None:
    bench = Bench()
    log = bench.log
    choose = random.Random(seed)
    events: list[Captured] = []
    for number in range(200):
        log.current = choose.choice((COMPUTE, OTHER, COMM, 44))
        log.work(("user", number))
        options: dict[str, Any] = dict(is_async=choose.random() < 0.4)
        if choose.random() < 0.3 and events:
            options["previous_event"] = choose.choice(events)
        options["allocates_on_comm"] = choose.random() < 0.3
        wait = None
        if choose.random() < 0.2:
            bench.fail(**options)
        else:
            wait = bench.call(**options)
            assert (wait is not None) is options["is_async"]
            if not options["is_async"]:
                assert len(log.kernels) - 1 in log.known[log.current]
        if "previous_event" not in options:
            assert ("user", number) in log.kernels[-1][1]
        if wait is not None and choose.random() < 0.5:
            wait(log.current)
        events.append(Captured(log))
    bench.log.assert_in_order()
    log.clear()
    bench.order.synchronize()
    assert log.names() == ["synchronize"]


@pytest.mark.parametrize("raises", [False, True], ids=["before its end", "in its end"])
def test_memory_of_a_call_that_raises_outlives_its_kernel(raises: bool) -> None:
    """All of it: what is freed on the caller's stream is written there after the kernel."""
    bench = Bench()
    log = bench.log
    call = bench.order.begin(is_async=True)
    log.launch("kernel", call.stream)
    call.note_output("output")
    if raises:
        log.told = None  # type: ignore[assignment]
        with pytest.raises(AttributeError):
            call.finish(inputs=["input"])
    assert 0 not in log.known[COMPUTE]
    del call
    gc.collect()
    assert 0 in log.known[COMPUTE]


@pytest.mark.parametrize("current", [OTHER, COMPUTE])
def test_a_paused_call_goes_on_as_if_the_stream_were_the_same(current: int) -> None:
    bench = Bench()
    log = bench.log
    call = bench.order.begin(is_async=True)
    call.prepare_pause()
    log.launch("notify", call.stream)
    del log.current  # torch is asked for nothing after a launch
    call.pause()
    log.current = COMPUTE
    log.work("meanwhile")
    log.current = current
    call.resume()
    assert log.current == COMPUTE
    call.follow_caller()
    log.launch("dispatch", call.stream)
    assert "meanwhile" in log.kernels[-1][1]
    assert call.finish() is not None
    assert log.current == current
    bench.call()
    bench.log.assert_in_order()


def test_nothing_follows_the_caller_of_a_call_that_never_paused() -> None:
    bench = Bench()
    call = bench.order.begin(is_async=True)
    bench.log.clear()
    call.follow_caller()
    assert bench.log == []
    call.finish()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("options", "inputs", "output"),
    [
        (dict(), [], []),
        (dict(is_async=True), ["comm"], ["comm"]),
        (dict(is_async=True, allocates_on_comm=True), ["comm"], ["current"]),
        (dict(previous_event=True), [], ["current"]),
        (dict(previous_event=True, is_async=True), ["comm"], ["current"]),
        (dict(allocates_on_comm=True), [], []),
    ],
)  # fmt: skip
def test_what_the_allocator_is_told(
    options: dict[str, Any], inputs: list[str], output: list[str], fails: bool
) -> None:
    bench = Bench()
    if "previous_event" in options:
        options = options | dict(previous_event=Captured(bench.log))
    call = bench.order.begin(**options)
    call.note_output("output")
    if fails:
        inputs, output = [], []  # the caller's stream waits instead
        del call
    else:
        call.finish(["input", None])
    want = [("input", stream) for stream in inputs] + [("output", stream) for stream in output]
    assert bench.log.told == want


def test_memory_of_a_handle_is_told_of_other_streams() -> None:
    bench = Bench()
    log = bench.log

    def told(home: int | None, **options: Any) -> list[str]:
        log.told.clear()
        bench.order.begin(**options).finish([], ["handle"], home)
        return [stream for tensor, stream in log.told if tensor == "handle"]

    assert told(COMPUTE) == [] and told(None) == []
    assert told(OTHER) == ["current"]
    event = Captured(log)
    assert told(OTHER, previous_event=event) == ["comm", "current"]
    assert told(COMPUTE, previous_event=event) == [] and told(COMM, previous_event=event) == []
    assert told(COMPUTE, is_async=True) == ["comm"] and told(None, is_async=True) == ["comm"]
    assert told(COMPUTE, is_async=True, allocates_on_comm=True) == ["comm", "current"]
