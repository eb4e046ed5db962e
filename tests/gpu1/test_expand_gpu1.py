"""test_expand.py on one GPU, whose ranks are processes that share it in turns."""

import dataclasses
import functools

import matrix
import pytest
from checked_runs import EXPANDED, check
from gpu_cases import run


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_expert_gets_its_rows_and_every_token_its_sum(num_ranks: int) -> None:
    cases = [
        dataclasses.replace(case, nvl_bytes=128 << 20)
        for case in matrix.sample(12, 50 + num_ranks, ranks=[num_ranks], alignment=[1, 16, 128])
    ]
    check(functools.partial(run, devices=[0] * num_ranks), EXPANDED, cases)
