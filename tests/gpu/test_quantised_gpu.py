"""test_quantised_dispatch.py on GPUs: the same cases; every rank is a process."""

import dataclasses

import matrix
import pytest
import quantised
import torch
from cases import Case
from checked_runs import QUANTISED, check
from gpu_cases import on_gpus, run
from quantised import FORMS


@on_gpus(2, 3, 4, 5, 6, 7, 8)
def test_rows_are_cast_once_and_bit_for_bit(num_ranks: int) -> None:
    cases = matrix.sample(
        36, num_ranks, ranks=[num_ranks], hidden=[128, 384, 1024, 2176, 7168],
        payload=[(torch.bfloat16, None)], alignment=[1, 16, 128], smem_bytes=[None],
    )  # fmt: skip
    forms = [
        (dataclasses.replace(case, nvl_bytes=128 << 20), FORMS[number % len(FORMS)])
        for number, case in enumerate(cases)
    ]
    check(run, QUANTISED, forms)


@pytest.mark.parametrize("direct_bytes", [None, 0])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_many_tokens_at_a_model_shape(
    num_ranks: int, direct_bytes: int | None, form: quantised.Form
) -> None:
    case = Case(
        tuple(1024 + 97 * rank for rank in range(num_ranks)), hidden=7168, experts=256, topk=8,
        alignment=128, calls=2, nvl_bytes=2 << 30, direct_bytes=direct_bytes,
    )  # fmt: skip
    check(run, QUANTISED, [(case, form)])
