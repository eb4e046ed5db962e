"""On which streams the CUDA backend launches, and what each call is behind: with stubbed driver
calls that keep CUDA's rules (fake_cuda). Kernels of one Buffer must run one at a time, in the order
of the calls, on every stream."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import fake_cuda
import pytest
import torch
from fake_cuda import COMM, COMPUTE
from run_by import run_by

import deep_comm
from deep_comm import local

T, H, E = 5, 64, 4
OTHER = 33
CONFIG = deep_comm.Config(1, 4, 16)


class Bench:
    def __init__(self, buffer: Any, log: Any) -> None:
        self.buffer, self.log = buffer, log
        self.x = torch.randn(T, H).bfloat16()
        self.idx = torch.arange(T)[:, None] % E
        self.handle = self.new_routing()[4]
        log.clear()
        log.kernels.clear()
        log.known.clear()

    def new_routing(self, **options: Any) -> Any:
        routing = dict(topk_idx=self.idx, topk_weights=self.idx.float(), num_experts=E)
        return self.buffer.dispatch(self.x, **routing, config=CONFIG, **options)

    def cached(self, **options: Any) -> Any:
        return self.buffer.dispatch(self.x, handle=self.handle, config=CONFIG, **options)

    def combine(self, **options: Any) -> Any:
        return self.buffer.combine(self.x, self.handle, config=CONFIG, **options)

    def layout(self, **options: Any) -> Any:
        return self.buffer.get_dispatch_layout(self.idx, E, **options)


def _with_bench(body: Callable[[Bench], None]) -> None:
    def main(group: local.ThreadGroup) -> None:
        with deep_comm.Buffer(group, 4 << 20, num_direct_bytes=2 << 20, timeout_s=20) as buffer:
            body(Bench(buffer, log))

    with fake_cuda.installed() as log:
        local.run(main, 1, timeout_s=60)


@run_by(_with_bench)
def test_a_synchronous_call_runs_on_the_callers_stream_without_a_hop(bench: Bench, /) -> None:
    for call in (bench.cached, bench.combine, bench.layout, bench.new_routing):
        bench.log.clear()
        call()
        streams = {entry[1] for entry in bench.log if len(entry) > 1}
        assert streams == {COMPUTE} and "wait" not in bench.log.names(), bench.log


@run_by(_with_bench)
def test_calls_on_several_streams_run_one_behind_the_other(bench: Bench, /) -> None:
    bench.cached()
    bench.log.current = OTHER
    bench.combine()
    bench.log.current = COMPUTE
    bench.cached()
    bench.log.clear()
    bench.cached()
    bench.log.assert_in_order()
    assert [stream for stream, _ in bench.log.kernels] == [COMPUTE, OTHER, COMPUTE, COMPUTE]
    assert "wait" not in bench.log.names()  # only where the stream changes


@run_by(_with_bench)
def test_the_order_of_streams_is_seen_by_this_test(
    bench: Bench, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: without the wait, the check fails."""
    bench.cached()
    monkeypatch.setattr(fake_cuda._Point, "wait", lambda point, stream: None)
    bench.log.current = OTHER
    bench.combine()
    with pytest.raises(AssertionError):
        bench.log.assert_in_order()


@run_by(_with_bench)
def test_an_asynchronous_call_leaves_the_callers_stream_alone(bench: Bench, /) -> None:
    bench.cached()
    bench.log.work("before")
    event = bench.cached(async_finish=True)[5]
    stream, known = bench.log.kernels[-1]
    assert stream == COMM and "before" in known
    assert 1 not in bench.log.known[COMPUTE]
    event.current_stream_wait()
    assert 1 in bench.log.known[COMPUTE]
    bench.log.assert_in_order()


@pytest.mark.parametrize("async_finish", [False, True])
@run_by(_with_bench)
def test_a_call_behind_an_event_does_not_wait_for_later_work(
    bench: Bench, /, async_finish: bool
) -> None:
    bench.log.work("before")
    bench.cached()
    event = deep_comm.Buffer.capture()
    bench.log.work("after")
    bench.combine(previous_event=event, async_finish=async_finish)
    stream, known = bench.log.kernels[-1]
    assert stream == COMM and "before" in known and "after" not in known
    bench.log.assert_in_order()
    assert (1 in bench.log.known[COMPUTE]) is not async_finish
    bench.cached()
    bench.log.assert_in_order()


@run_by(_with_bench)
def test_the_comm_stream_may_be_the_current_stream(bench: Bench, /) -> None:
    bench.cached()
    bench.log.current = COMM
    bench.combine()
    bench.cached(async_finish=True)
    bench.log.current = COMPUTE
    bench.cached()
    bench.log.assert_in_order()


@pytest.mark.parametrize("streams", [(44,), (44, 55)])
@run_by(_with_bench)
def test_a_graph_takes_its_order_with_it(bench: Bench, /, streams: tuple[int, ...]) -> None:
    """Eager, captured and eager calls: no event of one is waited for in the
    other, and each is in order.
    """
    log = bench.log
    bench.cached()
    first_eager = list(log.kernels)
    log.kernels.clear()
    with log.capture_on(streams[0]):
        log.capturing.update(streams)
        for number in range(4):
            log.current = streams[number % len(streams)]
            bench.cached() if number % 2 else bench.combine()
            assert number in log.known[log.current] and log.kernels[-1][0] == COMM
        bench.cached(async_finish=True)[5].current_stream_wait()
        bench.log.assert_in_order()
        log.current = streams[0]
    log.kernels[:] = first_eager
    log.known[COMPUTE] = {0}
    log.current = OTHER
    bench.combine()  # behind the eager call, and no captured event is waited for
    bench.cached(async_finish=True)
    bench.log.assert_in_order()
    assert log.capturing == set()


@pytest.mark.parametrize("reader", [44, 55])
@run_by(_with_bench)
def test_memory_within_a_graph_is_written_behind_its_readers(bench: Bench, /, reader: int) -> None:
    """Whose reader is not one that the call waits for: work of the same stream behind the event, or
    another stream's."""
    log = bench.log
    for _ in range(2):  # the second graph gets memory of the first, and waits for none of that
        with log.capture_on(44):
            rows = bench.cached()[0]
            options: dict[str, Any] = {}
            if reader == 44:
                options["previous_event"] = deep_comm.Buffer.capture()
            else:
                log.known[reader] |= log.known[44]
                log.capturing.add(reader)
            log.current = reader
            log.work("reads rows")
            place = rows.data_ptr()
            del rows
            log.current = 44
            again = bench.cached(**options)[0]
            assert again.data_ptr() == place
            assert "reads rows" in log.kernels[-1][1]
            del again


@run_by(_with_bench)
def test_what_ends_a_buffer_waits_for_graphs_as_well(bench: Bench, /) -> None:
    """They run on whichever stream they are replayed on."""
    bench.cached()
    bench.buffer._context.synchronize()
    assert "synchronize device" not in bench.log.names()
    with bench.log.capture_on(44):
        bench.cached()
    bench.buffer._context.synchronize()
    assert "synchronize device" in bench.log.names()


@pytest.mark.parametrize("seed", range(6))
@run_by(_with_bench)
def test_any_mixture_of_calls_is_in_order(bench: Bench, /, seed: int) -> None:
    choose = random.Random(seed)
    events = []
    for number in range(120):
        bench.log.current = choose.choice((COMPUTE, OTHER, COMM, 44))
        bench.log.work(("user", number))
        call = choose.choice((bench.cached, bench.combine, bench.layout, bench.new_routing))
        options: dict[str, Any] = {}
        is_async = choose.random() < 0.4
        if choose.random() < 0.3 and events:
            options["previous_event"] = choose.choice(events)
            options["allocate_on_comm_stream"] = is_async and choose.random() < 0.5
        event = call(async_finish=is_async, **options)[-1]
        known = bench.log.kernels[-1][1]
        if not options:
            assert ("user", number) in known
        if not is_async:
            assert len(bench.log.kernels) - 1 in bench.log.known[bench.log.current]
        elif choose.random() < 0.5:
            event.current_stream_wait()
        events.append(event if is_async else deep_comm.Buffer.capture())
    bench.log.assert_in_order()
    bench.log.clear()
    bench.buffer._context.backend.synchronize()
    assert bench.log.names() == ["synchronize"]
