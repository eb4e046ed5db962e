"""test_internode.py and test_quantised_internode.py on one GPU, which the ranks of all nodes
share in turns. Over NVSHMEM alone: what the software NIC asks for within one GPU the driver may
keep until the kernels that wait for it have ended.
"""

import dataclasses
import functools

import pytest
from cases import InternodeCase, direct
from checked_runs import QUANTISED, ROUNDTRIP, Kind, check
from gpu_cases import internode_cases, quantised_cases, quantised_model_cases
from internode import model_case
from over_nvshmem import needs_nvshmem, run

pytestmark = needs_nvshmem

SHAPES = pytest.mark.parametrize("shape", [(2, 1), (3, 1), (2, 2)], ids=["2x1", "3x1", "2x2"])
NEAR = pytest.mark.parametrize("near", [True, False], ids=["stores", "puts"])


def check_on_one_device(kind: Kind, cases: list, near: bool) -> None:
    first = cases[0] if isinstance(cases[0], InternodeCase) else cases[0][0]
    on_one = functools.partial(run, near=near, devices=[0] * first.num_ranks)
    check(on_one, kind, cases)


@SHAPES
@NEAR
def test_every_rank_gets_its_rows_and_sums(shape: tuple[int, int], near: bool) -> None:
    cases = internode_cases(shape, 2600 + 10 * shape[0] + shape[1], num_cases=8)
    cases = [dataclasses.replace(case, calls=min(case.calls, 2)) for case in cases]
    check_on_one_device(ROUNDTRIP, cases, near)


@SHAPES
@NEAR
def test_rows_are_cast_once_and_bit_for_bit(shape: tuple[int, int], near: bool) -> None:
    cases = quantised_cases(shape, 2700 + 10 * shape[0] + shape[1], num_cases=12)
    check_on_one_device(QUANTISED, cases, near)


@NEAR
def test_many_tokens_at_a_model_shape(near: bool) -> None:
    check_on_one_device(ROUNDTRIP, [direct(model_case(2, 1, biases=2))], near)
    without_rings = quantised_model_cases(2, 1)[1:]  # credit would wait for a turn again and again
    check_on_one_device(QUANTISED, without_rings, near)
