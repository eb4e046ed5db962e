"""tests/gpu/test_internode_gpu.py over NVSHMEM: the GPUs of one host as logical nodes, so
that its transport is NVLink.

Once with rows stored straight into near nodes' rings, once with every row and word through
NVSHMEM's puts and signals.
"""

import dataclasses
import functools

import pytest
import test_internode_gpu as over_nic
import test_low_latency_internode_gpu as low_latency_over_nic
from cases import InternodeCase, direct, verify_each
from checked_runs import ROUNDTRIP
from checked_runs import check as check_on
from gpu_cases import internode_cases, on_own_device
from internode import model_case
from low_latency import LowLatencyCase, run_on_gpu
from low_latency import verify as verify_low_latency
from over_nvshmem import needs_nvshmem, run

from deep_comm import errors

pytestmark = needs_nvshmem


def shapes(num_ranks: int) -> list[tuple[int, int]]:
    """(nodes, ranks per node) of all the GPUs."""
    divisors = [nodes for nodes in range(2, num_ranks + 1) if num_ranks % nodes == 0]
    return [(nodes, num_ranks // nodes) for nodes in divisors]


def check(cases: list[InternodeCase], near: bool = True, **options) -> None:
    check_on(functools.partial(run, near=near), ROUNDTRIP, cases, **options)


@pytest.mark.parametrize("near", [True, False], ids=["stores", "puts"])
def test_every_rank_gets_its_rows_and_sums(num_ranks: int, near: bool) -> None:
    for shape in shapes(num_ranks):
        first_seed = 300 * shape[0] + shape[1]
        check(internode_cases(shape, first_seed, num_cases=16), near=near)


def test_asynchronous_calls_give_the_same(num_ranks: int) -> None:
    cases = internode_cases(shapes(num_ranks)[0], first_seed=1900, num_cases=6)
    check(cases, async_finish=True)


@pytest.mark.parametrize("near", [True, False], ids=["stores", "puts"])
def test_many_tokens_at_a_model_shape(num_ranks: int, near: bool) -> None:
    case = model_case(num_ranks, shapes(num_ranks)[0][1])
    # Of so many that words stand for several rows.
    many = dataclasses.replace(
        case, tokens=(4200,) * num_ranks, nvl_bytes=1 << 30, rdma_bytes=1 << 30, direct_bytes=0
    )
    check([dataclasses.replace(case, direct_bytes=0), direct(case), many], near=near)


@pytest.mark.parametrize("near", [True, False], ids=["stores", "puts"])
def test_a_hundred_calls_with_rings_of_few_slots(num_ranks: int, near: bool) -> None:
    num_nodes, ranks_per_node = shapes(num_ranks)[0]
    case = InternodeCase(
        tuple(40 + 7 * rank for rank in range(num_ranks)), hidden=512, experts=32, topk=4,
        num_sms=4, send_chunk=2, slots=3, rail_chunk=1, rail_slots=2, calls=100,
        ranks_per_node=ranks_per_node,
    )  # fmt: skip
    check([case], near=near)


def test_a_silent_rank_is_named_and_the_buffer_recovers(num_ranks: int) -> None:
    ranks_per_node = shapes(num_ranks)[0][1]
    over_nic.check_named(run(over_nic.silent_rank, num_ranks, num_ranks - 1, ranks_per_node))


def other_group(group) -> str:
    """After a first Buffer over all ranks, one over the first of them alone with itself."""
    import torch
    from torch import distributed

    import deep_comm

    options = dict(device=torch.device("cuda", torch.cuda.current_device()), ranks_per_node=1)
    with deep_comm.Buffer(group, 1 << 20, 1 << 20, **options):
        pass
    first = distributed.new_group([0, 1])
    if group.rank() > 1:
        return ""
    try:
        deep_comm.Buffer(first, 1 << 20, 1 << 20, **options)
    except errors.TopologyError as error:
        return str(error)
    return "no error"


def test_a_part_of_the_job_is_refused(num_ranks: int) -> None:
    if num_ranks < 3:
        pytest.skip("needs 3 CUDA devices")
    messages = run(other_group, num_ranks)
    assert all("not the NVSHMEM job" in message for message in messages[:2])


@pytest.mark.parametrize("near", [True, False], ids=["stores", "puts"])
def test_low_latency_pairs_give_the_same(num_ranks: int, near: bool) -> None:
    for shape in shapes(num_ranks):
        cases = [low_latency_over_nic.sampled_case(seed, shape) for seed in range(8)]
        results = run(run_on_gpu, num_ranks, cases, 30.0, near=near)
        verify_each(verify_low_latency, cases, results)
        case = LowLatencyCase(
            (24,) * num_ranks, 24, hidden=2048, experts=16, topk=4, use_fp8=True, calls=8,
            ranks_per_node=shape[1], hand_on=0,
        )  # fmt: skip
        replayed = run(on_own_device, num_ranks, low_latency_over_nic.replay, case, near=near)
        verify_low_latency(case, replayed)
