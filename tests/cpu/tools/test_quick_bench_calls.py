"""What the bench times are calls made in one native step."""

from __future__ import annotations

from typing import Any

import pytest
from quick_calls import E, H, K, NormalSpy, R, T, on_normal

import deep_comm
from deep_comm.bench import operations
from deep_comm.bench.expected import Expected as NormalExpected
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
