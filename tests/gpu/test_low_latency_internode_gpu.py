"""test_low_latency_internode.py on GPUs: one host's GPUs as logical nodes, over the software
NIC; over NVSHMEM: test_nvshmem_gpu.py.
"""

import dataclasses
import random
import time

import pytest
import torch
from cases import verify_each
from gpu_cases import on_own_device, run
from graph_bodies import captured
from low_latency import LowLatencyCase, Pair, Range, open_buffer, run_on_gpu, run_pairs, verify

from deep_comm import errors


def shapes(num_ranks: int) -> list[tuple[int, int]]:
    """(nodes, ranks per node) of at most ``num_ranks`` GPUs, several nodes each."""
    wanted = [(2, 1), (3, 1), (2, 2), (4, 1), (2, 4), (4, 2)]
    return [shape for shape in wanted if shape[0] * shape[1] <= num_ranks]


RANGE = Range(
    max_tokens=(1, 16, 128), hidden=(8, 1160, 7168), hidden_fp8=(128, 2048, 7168),
    experts=(3, 19, 64), topk=(1, 4, 8),
)  # fmt: skip


def sampled_case(seed: int, shape: tuple[int, int]) -> LowLatencyCase:
    choose = random.Random(seed * 64 + shape[0] * 8 + shape[1])
    return RANGE.draw(
        choose, shape[0] * shape[1], zero_copy=False, calls=2, ranks_per_node=shape[1],
        hand_on=choose.choice((0, 8, 1000)), seed=seed,
    )  # fmt: skip


def test_every_rank_gets_its_rows_and_sums(num_ranks: int) -> None:
    for shape in shapes(num_ranks):
        cases = [sampled_case(seed, shape) for seed in range(16)]
        results = run(run_on_gpu, shape[0] * shape[1], cases, 30.0)
        verify_each(verify, cases, results)


def see_through() -> None:
    """Waits for the stream as users of the software NIC have to behind a replay: a thread that
    waits in a copy to pageable memory holds up the NIC.
    """
    event = torch.cuda.Event()
    event.record()
    while not event.query():
        time.sleep(1e-5)


def replay(group, device: torch.device, case: LowLatencyCase) -> list:
    """One graph of a pair, replayed with changing inputs, eager pairs in between."""
    results = []
    with open_buffer(group, case, device=device, timeout_s=30.0) as buffer:
        buffer.runtime.low_latency_hand_on_tokens = case.hand_on
        pair = Pair(buffer, case, 0)
        pair.run()
        graph, _ = captured(pair.run, group)
        for call in range(case.calls):
            pair.become(call)
            graph.replay()
            see_through()
            results.append(pair.received())
            if call % 3 == 0:
                run_pairs(buffer, dataclasses.replace(case, calls=1))
    return results


@pytest.mark.parametrize("hand_on", [0, 1000])
def test_graphs_replay_with_changing_routing(num_ranks: int, hand_on: int) -> None:
    shape = shapes(num_ranks)[-1]
    case = LowLatencyCase(
        (24,) * (shape[0] * shape[1]), 24, hidden=2048, experts=16, topk=4, use_fp8=True,
        calls=8, ranks_per_node=shape[1], hand_on=hand_on,
    )  # fmt: skip
    verify(case, run(on_own_device, case.num_ranks, replay, case))


def silent_rank(group, device: torch.device, case: LowLatencyCase, silent: int):
    with open_buffer(group, case, device=device, timeout_s=3.0) as buffer:
        pair = Pair(buffer, case, 0)
        pair.dispatch()
        torch.cuda.synchronize()
        named = None
        if buffer.rank != silent:
            try:
                pair.combine()
                torch.cuda.synchronize()
                buffer.check()
            except errors.PeerTimeout as error:
                named = error.peer
        else:
            time.sleep(8.0)
        buffer.reset()
        return named, run_pairs(buffer, case)


def test_a_silent_rank_is_named_and_the_buffer_recovers(num_ranks: int) -> None:
    shape = shapes(num_ranks)[-1]
    num = shape[0] * shape[1]
    case = LowLatencyCase((12,) * num, 16, hidden=1024, experts=16, topk=4, ranks_per_node=shape[1])
    results = run(on_own_device, num, silent_rank, case, num - 1)
    assert [named for named, _ in results] == [num - 1] * (num - 1) + [None]
    verify(case, [pairs for _, pairs in results])
