"""test_end_to_end.py on one GPU: its ranks are processes that share the device in turns.

Ranks as threads of one process will not do here: what one of them asks of the driver
(memory, a copy from ordinary host memory, loading a kernel) may wait for the kernels of
another, which wait for it.
"""

import dataclasses
import functools

import pytest
from cases import Case
from checked_runs import ROUNDTRIP, check
from gpu_cases import matrix_for, run


def check_on_one_device(cases: list[Case], **options: bool) -> None:
    check(functools.partial(run, devices=[0] * cases[0].num_ranks), ROUNDTRIP, cases, **options)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_rank_gets_its_rows_and_sums(num_ranks: int) -> None:
    check_on_one_device(matrix_for(num_ranks, seed=30 + num_ranks, num_cases=16))


def test_one_rank_at_a_model_shape() -> None:
    case = Case((1537,), hidden=7168, experts=256, topk=8, biases=2, calls=3, nvl_bytes=512 << 20)
    check_on_one_device([case])


def test_asynchronous_calls_give_the_same() -> None:
    cases = [dataclasses.replace(case, calls=2) for case in matrix_for(2, seed=40, num_cases=4)]
    check_on_one_device(cases, async_finish=True)
