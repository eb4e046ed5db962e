"""Tensors of an asynchronous low-latency call: the communication stream reads and writes
them, the caller's owns their memory, and the call's event sees that it is not handed out again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import fake_cuda
import pytest
import torch
from run_by import run_by
from small_calls import E, M, Told, inputs, on_streams

from deep_comm.events import TensorsEvent

OTHER = 33


def with_calls(body: Callable[[Any, fake_cuda.Log, Told], None]) -> None:
    """Later calls, on the compute stream."""

    def after_calls(buffer: Any, log: fake_cuda.Log, told: Told) -> None:
        x, idx, weights = inputs(0)
        handle = buffer.low_latency_dispatch(x, idx, M, E)[2]
        rows = torch.ones(handle.rows_shape, dtype=torch.bfloat16)
        buffer.low_latency_combine(rows, idx, weights, handle)
        log.current = fake_cuda.COMPUTE
        body(buffer, log, told)

    on_streams(after_calls)


def dispatched(buffer: Any, told: Told) -> tuple[Any, list[int], list[weakref.ref[Any]]]:
    """The event of a dispatch whose tensors nobody else has, their addresses, and what says whether
    they are there."""
    x, idx, _ = inputs(0)
    (rows, scales), _, handle, event, _ = buffer.low_latency_dispatch(
        x, idx, M, E, async_finish=True
    )
    tensors = rows, scales, handle.metadata, x, idx
    assert told == []
    return event, [each.data_ptr() for each in tensors], [weakref.ref(each) for each in tensors]


def are_there(tensors: list[weakref.ref[Any]]) -> bool:
    gc.collect()
    there = [tensor() is not None for tensor in tensors]
    assert len(set(there)) == 1
    return there[0]


def wait_on(log: Any, event: Any, stream: int) -> None:
    log.current = stream
    event.current_stream_wait()
    log.current = fake_cuda.COMPUTE


@run_by(with_calls)
def test_tensors_are_kept_until_their_stream_waits(buffer: Any, log: Any, told: Told, /) -> None:
    event, _, tensors = dispatched(buffer, told)
    assert are_there(tensors)
    wait_on(log, event, OTHER)
    assert are_there(tensors)
    wait_on(log, event, fake_cuda.COMPUTE)
    assert not are_there(tensors)
    del event
    gc.collect()
    assert told == []


@pytest.mark.parametrize("waits_elsewhere", [False, True])
@pytest.mark.parametrize("has_passed", [False, True])
@run_by(with_calls)
def test_an_event_that_goes_before_tells_torchs_allocator(
    buffer: Any, log: Any, told: Told, /, has_passed: bool, waits_elsewhere: bool
) -> None:
    event, addresses, tensors = dispatched(buffer, told)
    if waits_elsewhere:
        wait_on(log, event, OTHER)
    log.has_passed = has_passed
    del event
    assert not are_there(tensors)
    assert told == ([] if has_passed else [(each, fake_cuda.COMM) for each in addresses])


@run_by(with_calls)
def test_an_interrupted_call_tells_torchs_allocator(
    buffer: Any, log: Any, told: Told, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a signal's handler raises between the launch and the event loses no memory."""
    x, idx, _ = inputs(0)
    interrupted: list[Any] = []

    def interrupt(self: Any, pooled: Any, tensors: Any, *rest: Any, **others: Any) -> None:
        interrupted.extend(tensor.data_ptr() for tensor in tensors)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TensorsEvent, "__init__", interrupt)
        with pytest.raises(KeyboardInterrupt):
            buffer.low_latency_dispatch(x, idx, M, E, async_finish=True)
    assert len(interrupted) == 5 and {x.data_ptr(), idx.data_ptr()} < set(interrupted)
    assert told == [(address, fake_cuda.COMM) for address in interrupted]


@pytest.mark.parametrize("is_given", [False, True])
@run_by(with_calls)
def test_sums_are_kept_given_or_not(buffer: Any, log: Any, told: Told, /, is_given: bool) -> None:
    x, idx, weights = inputs(0)
    handle = buffer.low_latency_dispatch(x, idx, M, E)[2]
    rows = torch.ones(handle.rows_shape, dtype=torch.bfloat16)
    out = torch.empty_like(x) if is_given else None
    told.clear()
    combined, event, _ = buffer.low_latency_combine(
        rows, idx, weights, handle, async_finish=True, out=out
    )
    assert told == []
    there = [weakref.ref(each) for each in (combined, rows, idx, weights, handle.metadata)]
    del combined, out, rows, idx, weights, handle
    assert are_there(there)
    wait_on(log, event, fake_cuda.COMPUTE)
    assert not are_there(there)
