"""test_expand.py on one GPU, whose ranks are processes that share it in turns."""

import dataclasses
import functools

import matrix
import pytest
from cases import Case
from checked_runs import EXPANDED, check
from gpu_cases import run


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_expert_gets_its_rows_and_every_token_its_sum(num_ranks: int) -> None:
    cases = [
        dataclasses.replace(case, nvl_bytes=128 << 20)
        for case in matrix.sample(12, 50 + num_ranks, ranks=[num_ranks], alignment=[1, 16, 128])
    ]
    check(functools.partial(run, devices=[0] * num_ranks), EXPANDED, cases)


@pytest.mark.parametrize("tokens", [(4100,), (2051, 700)], ids=str)
def test_rows_are_copied_while_others_land(tokens: tuple[int, ...]) -> None:
    """With default SMs the copies run beside the dispatch; with a Config behind it."""
    case = Case(
        tokens, hidden=2048, experts=8, topk=4, alignment=128, calls=3, fused_layout=True,
        nvl_bytes=512 << 20,
    )  # fmt: skip
    cases = [case, dataclasses.replace(case, worst=5)]
    check(functools.partial(run, devices=[0] * len(tokens)), EXPANDED, cases)
