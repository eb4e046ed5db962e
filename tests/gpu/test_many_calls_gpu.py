"""test_many_calls.py on GPUs."""

import gc

import pytest
import torch
from gpu_cases import run
from long_runs import make_and_destroy, many_calls, synchronise

LAST = 0xFFFFFFFF


def _many(group, generation: int) -> int:
    device = torch.device("cuda", torch.cuda.current_device())
    return many_calls(group, device, 10_000, generation)


@pytest.mark.parametrize("generation", [0, LAST - 3000])
def test_ten_thousand_calls_in_a_row(num_ranks: int, generation: int) -> None:
    assert run(_many, num_ranks, generation) == [10_000] * num_ranks


def _cycles(group) -> list[int]:
    device = torch.device("cuda", torch.cuda.current_device())
    free = []
    for _ in range(20):
        make_and_destroy(group, device)
        gc.collect()
        torch.cuda.empty_cache()
        synchronise(group)  # peers have let go of this device's memory, too
        free.append(torch.cuda.mem_get_info(device)[0])
        synchronise(group)
    return free


@pytest.mark.alone
def test_twenty_buffers_leave_no_device_memory_behind(num_ranks: int) -> None:
    for free in run(_cycles, num_ranks):
        assert max(free[5:]) - min(free[5:]) < 4 << 20, free
