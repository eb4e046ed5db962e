"""deep_comm.tp between processes that share one GPU: they run in turns, so cases are few."""

from __future__ import annotations

import gpu_pool
import pytest
import torch
from collectives import NORM, OPS, Call, CollectiveCase, ring, run_case, verify


def run(fn, num_ranks: int, *args: object) -> list:
    return gpu_pool.shared().run(fn, num_ranks, *args, devices=[0] * num_ranks, timeout_s=100)


def on_device(group, case: CollectiveCase) -> list[torch.Tensor]:
    return run_case(group, case, device=torch.device("cuda", 0), timeout_s=30)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("op", OPS)
def test_results_have_the_bits_of_the_reference(op: str, num_ranks: int) -> None:
    calls = tuple(
        Call(op, (6, columns), dtype, 8, offset)
        for columns, offset in ((5, 1), (4096, 0))
        for dtype in (torch.bfloat16, torch.float32)
    )
    case = CollectiveCase(num_ranks, calls, staging_bytes=1 << 20)
    verify(case, run(on_device, num_ranks, case))


def _ring(group) -> list[list[float]]:
    return ring(group, 5, torch.device("cuda", 0))


def test_what_was_stored_before_a_signal_is_seen_after_the_wait() -> None:
    for rank, seen in enumerate(run(_ring, 2)):
        assert seen == [[10.0 * (1 - rank) + number] * 6 for number in range(5)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_sums_with_a_residual_are_normalised(num_ranks: int) -> None:
    calls = tuple(
        Call(NORM, shape, dtype, 16)
        for shape in ((1, 264), (5, 8192), (300, 1024))
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    )
    case = CollectiveCase(num_ranks, calls, staging_bytes=4 << 20)
    verify(case, run(on_device, num_ranks, case))
