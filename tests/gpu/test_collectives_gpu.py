"""deep_comm.tp and deep_comm.symmetric between GPUs, in CUDA graphs as well."""

from __future__ import annotations

import functools
import os

import collectives
import gpu_cases
import pytest
import torch
from collectives import FLOATS, NORM, OPS, Call, CollectiveCase, make, verify
from gpu_cases import on_own_device
from graph_bodies import captured

from deep_comm import errors, tp
from deep_comm.symmetric import SymmetricMemory

REPLAYS = 1000


run = functools.partial(gpu_cases.run, on_own_device, variables={}, timeout_s=100)


@pytest.mark.parametrize("op", OPS)
def test_results_have_the_bits_of_the_reference(op: str, num_ranks: int) -> None:
    rows = (num_ranks, 3 * num_ranks, 64 * num_ranks, 1024 * num_ranks)
    calls = tuple(
        Call(op, (count, columns), dtype, 32, offset)
        for count in rows
        for columns, offset in ((1, 0), (7, 1), (1024, 0))
        for dtype in FLOATS
    )
    case = CollectiveCase(num_ranks, calls, staging_bytes=num_ranks**2 << 22 | 1 << 21)
    verify(case, run(num_ranks, collectives.run_on_gpu, case))


def _replayed(group, device: torch.device, op: str) -> bool:
    """A graph of three calls, replayed between eager calls, with another x each time."""
    rank, ranks = group.rank(), group.size()
    call = Call(op, (16 * ranks, 512), torch.float32, 8)
    with SymmetricMemory(group, 0, staging_bytes=8 << 20, device=device, timeout_s=30) as memory:
        x = torch.zeros(call.shape, device=device)
        total = torch.zeros((), dtype=torch.int64, device=device)

        def step() -> torch.Tensor:
            x.add_(1)
            return make(call, x, memory)

        step()
        graph, outs = captured(lambda: [step() for _ in range(3)], group)
        x.fill_(rank)
        group.barrier()
        for number in range(REPLAYS):
            graph.replay()
            for idx, out in enumerate(outs):
                count = 3 * number + number // 100 + idx + 1
                if op == "all_gather":
                    wanted = torch.arange(ranks, device=device) + count
                    wanted = wanted.repeat_interleave(call.shape[0])[:, None].float()
                else:
                    wanted = float(sum(range(ranks)) + ranks * count)
                total += (out != wanted).sum()
            if number % 100 == 99:
                step()
        torch.cuda.synchronize()
        memory.check()
        group.barrier()
        return total.item() == 0


@pytest.mark.parametrize("op", OPS[:4])
def test_a_graph_can_be_replayed_between_eager_calls(op: str, num_ranks: int) -> None:
    assert all(run(num_ranks, _replayed, op))


def test_what_was_stored_before_a_signal_is_seen_after_the_wait(num_ranks: int) -> None:
    collectives.verify_ring(run(num_ranks, collectives.ring, 50), 50)


def _silent(group, device: torch.device) -> str:
    with SymmetricMemory(group, 0, staging_bytes=1 << 21, device=device, timeout_s=2) as memory:
        x = torch.ones(1000, device=device)
        named = ""
        if group.rank() != 1:
            tp.all_reduce(x, memory)
            torch.cuda.synchronize()
            try:
                memory.check()
            except errors.PeerTimeout as error:
                named = f"PeerTimeout {error.peer}"
        group.barrier()
        memory.reset()
        total = tp.all_reduce(x, memory)
        torch.cuda.synchronize()
        memory.check()
        return named if bool((total == group.size()).all()) else "wrong after reset"


def test_a_silent_rank_is_named_and_reset_takes_it_back(num_ranks: int) -> None:
    named = run(num_ranks, _silent)
    assert named == ["PeerTimeout 1" if rank != 1 else "" for rank in range(num_ranks)]


@pytest.mark.skipif(
    os.environ.get("ALLOW_MULTICAST") != "1",
    reason="shared hosts forbid multicast; ALLOW_MULTICAST=1 says that this host is not one",
)
@pytest.mark.parametrize("op", (*OPS[1:4], NORM))
def test_a_switch_takes_the_sums(op: str, num_ranks: int) -> None:
    calls = tuple(
        Call(op, (rows * num_ranks, 1024), dtype, 32) for rows in (1, 3, 512) for dtype in FLOATS
    )
    case = CollectiveCase(num_ranks, calls, staging_bytes=64 << 20, multicast=True)
    collectives.verify_near(case, run(num_ranks, collectives.run_on_gpu, case))


def test_sums_with_a_residual_are_normalised(num_ranks: int) -> None:
    case = collectives.norms_on_gpus(num_ranks)
    verify(case, run(num_ranks, collectives.run_on_gpu, case))
