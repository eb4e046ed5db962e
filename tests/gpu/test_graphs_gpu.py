"""CUDA graphs of dispatch, experts and combine: replayed with other
routings, between eager calls.
"""

import time

import over_nvshmem
import pytest
import torch
from gpu_cases import run
from graph_bodies import Step, check, expected, fill, make_step, run_step

import deep_comm
from deep_comm.ranks.rendezvous import Rendezvous

NUM_REPLAYS = 9


def _buffer(
    group, direct_bytes: int, device: torch.device, per_node: int | None = None
) -> deep_comm.Buffer:
    rdma_bytes = 0 if per_node is None else 64 << 20
    return deep_comm.Buffer(
        group, 192 << 20, rdma_bytes, num_direct_bytes=direct_bytes, device=device, timeout_s=60,
        ranks_per_node=per_node,
    )  # fmt: skip


def _cached(buffer: deep_comm.Buffer, step: Step, config) -> torch.Tensor:
    """One more operation in the graph, so that graphs of odd and even
    numbers of kernels are met.
    """
    return buffer.dispatch(step.x, handle=step.handle, config=config)[0]


def _settle(buffer: deep_comm.Buffer) -> None:
    """Behind a replay, whose kernels may need this process's CUDA calls: a software NIC's are."""
    event = torch.cuda.Event()
    event.record()
    while not event.query():
        time.sleep(0.0002)
    torch.cuda.synchronize()


def _replays(
    group, direct_bytes: int, num_steps: int, num_cached: int, per_node: int | None = None
) -> bool:
    """A graph of ``num_steps`` steps (three kernels each) and ``num_cached`` cached dispatches."""
    device = torch.device("cuda", torch.cuda.current_device())
    config = deep_comm.Config(8, 4, 16)
    rank, ranks = group.rank(), group.size()
    with _buffer(group, direct_bytes, device, per_node) as buffer:
        rounding = buffer.ranks_per_node if buffer.num_nodes > 1 else 1
        steps = [make_step(device) for _ in range(num_steps)]
        eager = make_step(device)
        run_step(buffer, eager, config)  # whatever the first call makes
        torch.cuda.synchronize()
        group.barrier()
        graph = torch.cuda.CUDAGraph()
        again = []
        with torch.cuda.graph(graph):
            for step in steps:
                run_step(buffer, step, config)
            again = [_cached(buffer, steps[-1], config) for _ in range(num_cached)]
        for call in range(NUM_REPLAYS):
            for number, step in enumerate(steps):
                fill(step, rank, 10 * call + number)
            graph.replay()
            _settle(buffer)
            for step in steps:
                check(buffer, step, Rendezvous(group).all_gather_object)
            count = int(steps[-1].handle.num_recv_tokens_tensor)
            for rows in again:
                assert torch.equal(rows[:count], steps[-1].recv_x[:count])
            # Eager calls between replays, of every kind: with a host wait, without, cached.
            fill(eager, rank, 500 + call)
            if call % 3 == 0:
                run_step(buffer, eager, config)
                check(buffer, eager, Rendezvous(group).all_gather_object)
            elif call % 3 == 1:
                received, idx, weights, _, handle, _ = buffer.dispatch(
                    eager.x, topk_idx=eager.idx, topk_weights=eager.weights, num_experts=10,
                    config=config,
                )  # fmt: skip
                rows = _cached(
                    buffer, Step(eager.x, eager.idx, eager.weights, handle=handle), config
                )
                assert torch.equal(rows, received)
        # Replays in a row, with nothing between them.
        fill(steps[-1], rank, 999)
        for _ in range(5):
            graph.replay()
        _settle(buffer)
        assert torch.equal(steps[-1].combined, expected(steps[-1], ranks, rounding))
        buffer.check()
    return True


@pytest.mark.parametrize("direct_bytes", [0, 128 << 20])
@pytest.mark.parametrize(("num_steps", "num_cached"), [(1, 0), (1, 1), (2, 1), (3, 0)])
def test_a_graph_replays_with_other_routings(
    num_ranks: int, direct_bytes: int, num_steps: int, num_cached: int
) -> None:
    assert all(run(_replays, num_ranks, direct_bytes, num_steps, num_cached))


@pytest.mark.parametrize("direct_bytes", [0, 128 << 20])
def test_between_nodes_as_well(num_ranks: int, direct_bytes: int) -> None:
    """Over the software NIC."""
    ranks = num_ranks - num_ranks % 2
    assert all(run(_replays, ranks, direct_bytes, 2, 1, ranks // 2))


@over_nvshmem.needs_nvshmem
@pytest.mark.parametrize("near", [True, False], ids=["stores", "puts"])
def test_over_nvshmem(num_ranks: int, near: bool) -> None:
    for direct_bytes, per_node in ((128 << 20, num_ranks // 2), (0, 1)):
        assert all(over_nvshmem.run(_replays, num_ranks, direct_bytes, 2, 1, per_node, near=near))


def _two_graphs(group) -> bool:
    """Graphs of one and two steps in turn: generations have another parity at each replay."""
    device = torch.device("cuda", torch.cuda.current_device())
    config = deep_comm.Config(8, 4, 16)
    with _buffer(group, 128 << 20, device) as buffer:
        parts = [[make_step(device)], [make_step(device), make_step(device)]]
        run_step(buffer, make_step(device), config)
        torch.cuda.synchronize()
        group.barrier()
        graphs = []
        for part in parts:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for step in part:
                    run_step(buffer, step, config)
            graphs.append(graph)
        for call in range(10):
            part, graph = parts[call % 3 % 2], graphs[call % 3 % 2]
            for number, step in enumerate(part):
                fill(step, group.rank(), 7 * call + number)
            graph.replay()
            torch.cuda.synchronize()
            for step in part:
                check(buffer, step, Rendezvous(group).all_gather_object)
        buffer.check()
    return True


def test_two_graphs_take_turns(num_ranks: int) -> None:
    assert all(run(_two_graphs, num_ranks))
