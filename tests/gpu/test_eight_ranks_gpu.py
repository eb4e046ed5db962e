"""Five to eight ranks on machines with fewer GPUs, which they share: a node of eight, 2 x 4, 4 x 2.

Kernels of processes that share a GPU run in turns of a few milliseconds, and every hop between
ranks takes such turns: rows and sums are what is looked at, few cases, nothing else running.
"""

import dataclasses
import functools

import over_nvshmem
import pytest
import test_low_latency_internode_gpu as low_latency
import torch
from cases import Case, direct, verify_each
from checked_runs import ROUNDTRIP, check
from gpu_cases import POISON, internode_cases, matrix_for
from internode import model_case
from low_latency import run_on_gpu
from low_latency import verify as verify_low_latency

from deep_comm import processes

pytestmark = pytest.mark.alone  # of all lanes of tools/test_gpus

NUM_PROCESSES = 8
NODE, SHAPES = (1, 8), [(2, 4), (4, 2)]


@pytest.fixture(autouse=True)
def fewer_than_eight_gpus() -> None:
    if torch.cuda.device_count() >= 8:
        pytest.skip("eight CUDA devices: the same cases are tested with one a rank")


def places(num_ranks: int) -> list[int]:
    """Neighbouring ranks share a GPU, so that rows cross NVLink inside a node of all and between
    nodes."""
    count = torch.cuda.device_count()
    return [rank * count // num_ranks for rank in range(num_ranks)]


def run(pool: processes.Pool, fn, num_ranks: int, *arguments) -> list:
    return pool.run(
        fn, num_ranks, *arguments, backend="gloo", devices=places(num_ranks), variables=POISON,
        timeout_s=120,
    )  # fmt: skip


@pytest.mark.parametrize("num_ranks", [5, 6, 7, 8])
def test_a_node_of_many_ranks(pool: processes.Pool, num_ranks: int) -> None:
    cases = matrix_for(num_ranks, seed=160 + num_ranks, num_cases=8)
    cases = [dataclasses.replace(case, calls=min(case.calls, 2)) for case in cases]
    check(functools.partial(run, pool), ROUNDTRIP, cases)


def test_a_node_of_eight_at_a_model_shape(pool: processes.Pool) -> None:
    case = Case(
        tuple(512 + 97 * rank for rank in range(8)), hidden=7168, experts=256, topk=8, biases=1,
        calls=2, nvl_bytes=1 << 30,
    )  # fmt: skip
    check(functools.partial(run, pool), ROUNDTRIP, [case])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_nodes_over_the_software_nic(pool: processes.Pool, shape: tuple[int, int]) -> None:
    cases = internode_cases(shape, first_seed=2400, num_cases=6)
    cases = [dataclasses.replace(case, calls=min(case.calls, 2)) for case in cases]
    check(functools.partial(run, pool), ROUNDTRIP, cases)


def test_two_nodes_of_four_at_a_model_shape(pool: processes.Pool) -> None:
    case = model_case(8, 4, 256, calls=2)
    cases = [dataclasses.replace(case, direct_bytes=0), direct(case)]
    check(functools.partial(run, pool), ROUNDTRIP, cases)


# As 4 x 2 ranks of a rail would share a GPU: see test_sharing_gpu.py.
@pytest.mark.parametrize("shape", [NODE, SHAPES[0]], ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_low_latency(pool: processes.Pool, shape: tuple[int, int]) -> None:
    cases = [low_latency.sampled_case(seed, shape) for seed in range(60, 66)]
    verify_each(verify_low_latency, cases, run(pool, run_on_gpu, 8, cases, 30.0))


@over_nvshmem.needs_nvshmem
def test_two_nodes_of_four_over_nvshmem() -> None:
    cases = internode_cases(SHAPES[0], first_seed=2500, num_cases=4)
    cases = [dataclasses.replace(case, calls=min(case.calls, 2)) for case in cases]
    on_few = functools.partial(over_nvshmem.run, devices=places(8), timeout_s=100.0)
    check(on_few, ROUNDTRIP, cases)
