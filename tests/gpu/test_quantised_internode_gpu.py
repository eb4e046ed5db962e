"""test_quantised_internode.py on GPUs: one host's GPUs as logical nodes, over the software
NIC and over NVSHMEM.
"""

import dataclasses
import functools
import random

import pytest
import test_internode_gpu as over_nic
import test_nvshmem_gpu as over_nvshmem
import torch
from cases import InternodeCase, direct
from checked_runs import QUANTISED, check
from gpu_cases import run
from internode import model_case
from quantised import FORMS, Form

Cases = list[tuple[InternodeCase, Form]]


def random_cases(shape: tuple[int, int], first_seed: int, num_cases: int) -> Cases:
    choose = random.Random(first_seed)
    cases = over_nic.random_cases(shape, first_seed, num_cases)
    return [
        (
            dataclasses.replace(
                case, hidden=choose.choice((128, 384, 2176)), dtype=torch.bfloat16, scales=None
            ),
            FORMS[number // 2 % len(FORMS)],
        )
        for number, case in enumerate(cases)
    ]


def model_cases(num_nodes: int, ranks_per_node: int) -> Cases:
    rings = model_case(
        num_nodes * ranks_per_node, ranks_per_node, experts=256, alignment=16, biases=0, calls=2,
        nvl_bytes=1 << 30, direct_bytes=0,
    )  # fmt: skip
    exponents = Form(round_scale=True, use_ue8m0=True, column_major=True)
    return [(rings, Form()), (direct(rings), Form(expand=True)), (direct(rings), exponents)]


def test_rows_are_cast_once_and_bit_for_bit(num_ranks: int) -> None:
    for shape in over_nic.shapes(num_ranks):
        first_seed = 5000 + 100 * shape[0] + shape[1]
        check(run, QUANTISED, random_cases(shape, first_seed, num_cases=18))


def test_asynchronous_calls_give_the_same(num_ranks: int) -> None:
    shape = over_nic.shapes(num_ranks)[-1]
    check(run, QUANTISED, random_cases(shape, first_seed=5900, num_cases=6), async_finish=True)


def test_many_tokens_at_a_model_shape(num_ranks: int) -> None:
    for shape in over_nic.shapes(num_ranks):
        check(run, QUANTISED, model_cases(*shape))


def check_over_nvshmem(cases: Cases, near: bool) -> None:
    check(functools.partial(over_nvshmem.run, near=near), QUANTISED, cases)


@over_nvshmem.needs_nvshmem
@pytest.mark.parametrize("near", [True, False], ids=["stores", "puts"])
def test_over_nvshmem(num_ranks: int, near: bool) -> None:
    for shape in over_nvshmem.shapes(num_ranks):
        check_over_nvshmem(random_cases(shape, 6000 + 100 * shape[0] + shape[1], 12), near)


@over_nvshmem.needs_nvshmem
@pytest.mark.parametrize("near", [True, False], ids=["stores", "puts"])
def test_many_tokens_over_nvshmem(num_ranks: int, near: bool) -> None:
    check_over_nvshmem(model_cases(*over_nvshmem.shapes(num_ranks)[0]), near)
