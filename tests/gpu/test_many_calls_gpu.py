"""test_many_calls.py on GPUs."""

import gc

import pytest
import torch
from gpu_cases import on_own_device, run
from long_runs import make_and_destroy, many_calls, synchronise

LAST = 0xFFFFFFFF


@pytest.mark.parametrize("generation", [0, LAST - 3000])
def test_ten_thousand_calls_in_a_row(num_ranks: int, generation: int) -> None:
    done = run(on_own_device, num_ranks, many_calls, 10_000, generation)
    assert done == [10_000] * num_ranks


def _cycles(group, device: torch.device) -> list[int]:
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
    for free in run(on_own_device, num_ranks, _cycles):
        assert max(free[5:]) - min(free[5:]) < 4 << 20, free
