"""test_low_latency_internode.py on GPUs: one host's GPUs as logical nodes, over the software
NIC; over NVSHMEM: test_nvshmem_gpu.py.
"""

import dataclasses
import random
import time

import pytest
import torch
from cases import verify_each
from gpu_cases import run
from low_latency import LowLatencyCase, Pair, Range, expert_rows, inputs_of, run_pairs, verify

import deep_comm
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


def open_buffer(group, case: LowLatencyCase, num_bytes: int, timeout_s: float = 30.0):
    return deep_comm.Buffer(
        group, 0, num_bytes, low_latency_mode=True, timeout_s=timeout_s,
        device=torch.device("cuda", torch.cuda.current_device()),
        ranks_per_node=case.ranks_per_node,
    )  # fmt: skip


def run_cases(group, cases: list[LowLatencyCase]) -> list:
    results = []
    with open_buffer(group, cases[0], max(case.num_bytes for case in cases)) as buffer:
        for case in cases:
            buffer.runtime.low_latency_hand_on_tokens = case.hand_on
            results.append(run_pairs(buffer, case))
    return results


def test_every_rank_gets_its_rows_and_sums(num_ranks: int) -> None:
    for shape in shapes(num_ranks):
        cases = [sampled_case(seed, shape) for seed in range(16)]
        results = run(run_cases, shape[0] * shape[1], cases)
        verify_each(verify, cases, results)


def see_through() -> None:
    """Waits for the stream as users of the software NIC have to behind a replay: a thread that
    waits in a copy to pageable memory holds up the NIC.
    """
    event = torch.cuda.Event()
    event.record()
    while not event.query():
        time.sleep(1e-5)


def replay(group, case: LowLatencyCase) -> list:
    """One graph of a pair, replayed with changing inputs, eager pairs in between."""
    results = []
    with open_buffer(group, case, case.num_bytes) as buffer:
        buffer.runtime.low_latency_hand_on_tokens = case.hand_on
        pair = Pair(buffer, case, 0)
        pair.dispatch()
        pair.combine()
        torch.cuda.synchronize()
        group.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            pair.dispatch()
            pair.combine()
        for call in range(case.calls):
            x, idx, weights = inputs_of(case, buffer.rank, call)
            pair.x.copy_(x)
            pair.idx.copy_(idx)
            pair.weights.copy_(weights)
            pair.call = call
            pair.rows.copy_(expert_rows(case, buffer.rank, call))
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
    verify(case, run(replay, case.num_ranks, case))


def silent_rank(group, case: LowLatencyCase, silent: int):
    with open_buffer(group, case, case.num_bytes, timeout_s=3.0) as buffer:
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
    results = run(silent_rank, num, case, num - 1)
    assert [named for named, _ in results] == [num - 1] * (num - 1) + [None]
    verify(case, [pairs for _, pairs in results])
