"""deep_comm.tp between processes that share one GPU: they run in turns, so cases are few."""

from __future__ import annotations

import collectives
import gpu_cases
import pytest
import torch
from collectives import OPS, Call, CollectiveCase, verify
from gpu_cases import on_own_device


def run(num_ranks: int, fn, *args: object) -> list:
    return gpu_cases.run(
        on_own_device, num_ranks, fn, *args, devices=[0] * num_ranks, variables={}, timeout_s=100
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("op", OPS)
def test_results_have_the_bits_of_the_reference(op: str, num_ranks: int) -> None:
    calls = tuple(
        Call(op, (6, columns), dtype, 8, offset)
        for columns, offset in ((5, 1), (4096, 0))
        for dtype in (torch.bfloat16, torch.float32)
    )
    case = CollectiveCase(num_ranks, calls, staging_bytes=1 << 21)
    verify(case, run(num_ranks, collectives.run_on_gpu, case))


def test_what_was_stored_before_a_signal_is_seen_after_the_wait() -> None:
    collectives.verify_ring(run(2, collectives.ring, 5), 5)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_sums_with_a_residual_are_normalised(num_ranks: int) -> None:
    case = collectives.norms_on_gpus(num_ranks)
    verify(case, run(num_ranks, collectives.run_on_gpu, case))
