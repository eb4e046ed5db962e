"""What the bench times are calls made in one native step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from quick_calls import (
    E,
    H,
    K,
    M,
    NormalSpy,
    R,
    Spy,
    T,
    on_normal,
    on_ranks,
)

import deep_comm
from deep_comm.bench import operations
from deep_comm.bench.expected import Expected as NormalExpected
from deep_comm.bench.low_latency import options as low_latency
from deep_comm.bench.low_latency.expected import Expected as LowLatencyExpected
from deep_comm.bench.low_latency.operations import BufferCalls
from deep_comm.bench.workload import Workload


@pytest.mark.parametrize("config", [None, deep_comm.Config(2, 4, 16)])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_the_bench_times_calls_of_one_step(dtype: str, config: Any) -> None:
    workload = Workload(R, T, H, E, K, dtype)

    def body(buffer: Any, rank: int) -> None:
        expected = NormalExpected(workload, rank, buffer.device, num_slots=2)
        wanted = {
            operations.LAYOUT, operations.DISPATCH, operations.DISPATCH_NO_WAIT,
            operations.DISPATCH_CACHED, operations.COMBINE, operations.PAIR, operations.PAIR_CACHED,
        }  # fmt: skip
        subject = operations.BufferOperations(buffer, expected, config)
        spy = NormalSpy(buffer)
        for operation in subject.operations("direct"):
            for slot in (0, 1):
                operation.call(slot)
            if operation.name in wanted:
                spy.made.clear()
                operation.call(0)
                assert spy.made and all(spy.made), operation.name
                wanted.remove(operation.name)
        assert not wanted

    on_normal(body, num_direct_bytes=4 << 20)


@pytest.mark.parametrize("layout", low_latency.LAYOUTS)
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_the_bench_times_low_latency_calls_of_one_step(dtype: str, layout: str) -> None:
    workload = Workload(R, T, H, E, K, dtype)

    def body(buffer: Any, rank: int) -> None:
        expected = LowLatencyExpected(workload, layout, rank, buffer.device, M)
        calls = BufferCalls(buffer, expected, layout, 2)
        spy = Spy(buffer)
        for name, phases in itertools.product(low_latency.NAMES, low_latency.PHASES):
            operation = calls.operation(name, phases)
            operation.call(0)
            spy.made.clear()
            operation.call(1)
            assert spy.made and all(spy.made), (name, phases)

    on_ranks(body)
