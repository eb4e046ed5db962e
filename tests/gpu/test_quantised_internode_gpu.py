"""test_quantised_internode.py on GPUs: one host's GPUs as logical nodes, over the software
NIC and over NVSHMEM.
"""

import functools

import over_nvshmem
import pytest
import test_internode_gpu as over_nic
from checked_runs import QUANTISED, check
from gpu_cases import quantised_cases, quantised_model_cases, run
from test_nvshmem_gpu import shapes


def test_rows_are_cast_once_and_bit_for_bit(num_ranks: int) -> None:
    for shape in over_nic.shapes(num_ranks):
        first_seed = 5000 + 100 * shape[0] + shape[1]
        check(run, QUANTISED, quantised_cases(shape, first_seed, num_cases=18))


def test_asynchronous_calls_give_the_same(num_ranks: int) -> None:
    shape = over_nic.shapes(num_ranks)[-1]
    check(run, QUANTISED, quantised_cases(shape, first_seed=5900, num_cases=6), async_finish=True)


def test_many_tokens_at_a_model_shape(num_ranks: int) -> None:
    for shape in over_nic.shapes(num_ranks):
        check(run, QUANTISED, quantised_model_cases(*shape))


def check_over_nvshmem(cases: list, near: bool) -> None:
    check(functools.partial(over_nvshmem.run, near=near), QUANTISED, cases)


@over_nvshmem.needs_nvshmem
@pytest.mark.parametrize("near", [True, False], ids=["stores", "puts"])
def test_over_nvshmem(num_ranks: int, near: bool) -> None:
    for shape in shapes(num_ranks):
        check_over_nvshmem(quantised_cases(shape, 6000 + 100 * shape[0] + shape[1], 12), near)


@over_nvshmem.needs_nvshmem
@pytest.mark.parametrize("near", [True, False], ids=["stores", "puts"])
def test_many_tokens_over_nvshmem(num_ranks: int, near: bool) -> None:
    check_over_nvshmem(quantised_model_cases(*shapes(num_ranks)[0]), near)
