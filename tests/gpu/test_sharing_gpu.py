"""Two nodes of two ranks on two GPUs, for machines that have no more: over the software NIC and
over NVSHMEM, which lets several PEs share a GPU as long as the host synchronises nothing on a
stream.

Kernels of processes that share a GPU run in turns, a few milliseconds each, so that nothing else
may run beside these tests, and every hop between ranks takes such a turn.
"""

import dataclasses
import functools

import over_nvshmem
import pytest
import test_internode_gpu as over_nic
import test_low_latency_internode_gpu as low_latency
import test_low_latency_masks_gpu as masks
import torch
from cases import direct, verify_each
from checked_runs import ROUNDTRIP, check
from gpu_cases import POISON, internode_cases
from internode import model_case
from low_latency import run_on_gpu
from low_latency import verify as verify_low_latency
from low_latency_masks import DEAD, survive, verify_outcomes

from deep_comm import processes

pytestmark = pytest.mark.alone  # of all lanes of tools/test_gpus

NUM_PROCESSES = 4
SHAPE = (2, 2)
# Where ranks share a GPU: those of a node, so that the rail is what joins GPUs, or those of a rail.
PLACES = {"nodes": [0, 0, 1, 1], "rails": [0, 1, 0, 1]}


@pytest.fixture(autouse=True)
def two_or_three_gpus() -> None:
    if torch.cuda.device_count() >= 4:
        pytest.skip("four CUDA devices: the same shape is tested with one a rank")


@pytest.fixture(params=PLACES)
def devices(request: pytest.FixtureRequest) -> list[int]:
    return PLACES[request.param]


def run(pool: processes.Pool, fn, num_ranks: int, *arguments, devices: list[int]) -> list:
    return pool.run(
        fn, num_ranks, *arguments, backend="gloo", devices=devices, variables=POISON, timeout_s=120
    )


def test_every_rank_gets_its_rows_and_sums(pool: processes.Pool, devices: list[int]) -> None:
    cases = internode_cases(SHAPE, first_seed=2200, num_cases=12)
    check(functools.partial(run, pool, devices=devices), ROUNDTRIP, cases)


def test_asynchronous_calls_give_the_same(pool: processes.Pool) -> None:
    cases = internode_cases(SHAPE, first_seed=2220, num_cases=4)
    on_two = functools.partial(run, pool, devices=PLACES["nodes"])
    check(on_two, ROUNDTRIP, cases, async_finish=True)


def test_many_tokens_at_a_model_shape(pool: processes.Pool, devices: list[int]) -> None:
    cases = [direct(model_case(4, 2))]
    check(functools.partial(run, pool, devices=devices), ROUNDTRIP, cases)


def test_a_silent_rank_is_named_and_the_buffer_recovers(pool: processes.Pool) -> None:
    over_nic.check_named(run(pool, over_nic.silent_rank, 4, 3, 2, devices=PLACES["nodes"]))


def test_low_latency_gives_every_rank_its_rows_and_sums(pool: processes.Pool) -> None:
    """Ranks of a rail on GPUs of their own: what the software NIC has asked for within one GPU the
    driver may keep until the kernels that wait for it have ended (docs/guide/nodes.md)."""
    cases = [low_latency.sampled_case(seed, SHAPE) for seed in range(50, 56)]
    results = run(pool, run_on_gpu, 4, cases, 30.0, devices=PLACES["nodes"])
    verify_each(verify_low_latency, cases, results)


@pytest.mark.parametrize("dead", [(DEAD,), (2, 3)], ids=["rank", "node"])
def test_low_latency_goes_on_without_the_killed(dead: tuple[int, ...]) -> None:
    case, stage = masks.nodes_case(4, 2, use_fp8=True, weights_ahead=False), "in dispatch"
    ended = processes.outcomes(
        survive, 4, case, stage, True, dead, 4.0, devices=PLACES["nodes"], timeout_s=120
    )
    verify_outcomes(case, ended, stage, dead)


@over_nvshmem.needs_nvshmem
@pytest.mark.parametrize("near", [True, False], ids=["stores", "puts"])
def test_over_nvshmem(near: bool) -> None:
    cases = internode_cases(SHAPE, first_seed=2300, num_cases=8)
    cases = [dataclasses.replace(case, calls=min(case.calls, 2)) for case in cases]
    on_two = functools.partial(
        over_nvshmem.run, near=near, devices=PLACES["nodes"], timeout_s=100.0
    )
    check(on_two, ROUNDTRIP, cases)
