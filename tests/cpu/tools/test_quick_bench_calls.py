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
from deep_comm.bench.expected import Expected
from deep_comm.bench.operations import LowLatencyCalls, NormalCalls
from deep_comm.bench.workload import Workload


@pytest.mark.parametrize("config", [None, deep_comm.Config(2, 4, 16)])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_the_bench_times_calls_of_one_step(dtype: str, config: Any) -> None:
    workload = Workload(R, T, H, E, K, dtype)

    def body(buffer: Any, rank: int) -> None:
        subject = NormalCalls(buffer, Expected(workload, rank, buffer.device, 2), config)
        spy = NormalSpy(buffer)
        for name in operations.MEANINGS:
            subject.mode = "direct"
            operation = subject.operation(name)
            for input_idx in (0, 1) if operation else ():
                operation.call(input_idx)
            if not any(word in name for word in ("place", "cast", "expanded", "+ combine no-wait")):
                spy.made.clear()
                operation.call(0)
                assert spy.made and all(spy.made), name

    on_normal(body, num_direct_bytes=4 << 20)


@pytest.mark.parametrize("layout", operations.LAYOUTS)
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_the_bench_times_low_latency_calls_of_one_step(dtype: str, layout: str) -> None:
    workload = Workload(R, T, H, E, K, dtype)

    def body(buffer: Any, rank: int) -> None:
        expected = Expected(workload, rank, buffer.device, 2, low_latency=True)
        calls = LowLatencyCalls(buffer, expected, layout, M)
        spy = Spy(buffer)
        for name, phases in itertools.product(operations.LOW_LATENCY_NAMES, operations.PHASES):
            operation = calls.operation(name, phases)
            operation.call(0)
            spy.made.clear()
            operation.call(1)
            assert spy.made and all(spy.made), (name, phases)

    on_ranks(body)
