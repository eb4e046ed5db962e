"""test_expand.py on GPUs: the same cases; every rank is a process."""

import dataclasses

import matrix
import pytest
import torch
from cases import Case, Scales
from checked_runs import EXPANDED, check
from gpu_cases import on_gpus, run


def cases_for(num_ranks: int, seed: int, num_cases: int) -> list[Case]:
    cases = matrix.sample(num_cases, seed, ranks=[num_ranks], alignment=[1, 16, 128])
    return [dataclasses.replace(case, nvl_bytes=128 << 20) for case in cases]


@on_gpus(2, 3, 4, 5, 6, 7, 8)
def test_every_expert_gets_its_rows_and_every_token_its_sum(num_ranks: int) -> None:
    cases = cases_for(num_ranks, seed=num_ranks, num_cases=40)
    check(run, EXPANDED, cases)


@pytest.mark.parametrize("direct_bytes", [None, 0])
@pytest.mark.parametrize("has_scales", [False, True])
def test_many_tokens_at_a_model_shape(
    num_ranks: int, direct_bytes: int | None, has_scales: bool
) -> None:
    case = Case(
        tuple(515 + 97 * rank for rank in range(num_ranks)), hidden=7168, experts=256, topk=8,
        dtype=torch.float8_e4m3fn if has_scales else torch.bfloat16,
        scales=Scales(56) if has_scales else None, alignment=16, biases=1, calls=2,
        nvl_bytes=2 << 30, direct_bytes=direct_bytes,
    )  # fmt: skip
    check(run, EXPANDED, [case])


def test_asynchronous_calls_give_the_same(num_ranks: int) -> None:
    cases = cases_for(num_ranks, seed=93, num_cases=12)
    check(run, EXPANDED, cases, async_finish=True)
