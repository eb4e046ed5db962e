"""tests/cpu/test_end_to_end.py on one GPU: its ranks are processes that share the device in turns.

Ranks as threads of one process will not do here: what one of them asks of the driver
(memory, a copy from ordinary host memory, loading a kernel) may wait for the kernels of
another, which wait for it.
"""

import dataclasses

import pytest
from cases import Case
from gpu_cases import matrix_for, run, run_cases, verify_all


def run_on_one_device(num_ranks: int, cases: list[Case], options: dict) -> None:
    verify_all(cases, run(run_cases, num_ranks, cases, options, devices=[0] * num_ranks))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_rank_gets_its_rows_and_sums(num_ranks: int) -> None:
    run_on_one_device(num_ranks, matrix_for(num_ranks, seed=30 + num_ranks, num_cases=16), {})


def test_one_rank_at_a_model_shape() -> None:
    case = Case((1537,), hidden=7168, experts=256, topk=8, biases=2, calls=3, nvl_bytes=512 << 20)
    run_on_one_device(1, [case], {})


def test_asynchronous_calls_give_the_same() -> None:
    cases = [dataclasses.replace(case, calls=2) for case in matrix_for(2, seed=40, num_cases=4)]
    run_on_one_device(2, cases, {"async_finish": True})
