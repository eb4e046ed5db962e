"""Buffer.barrier: every rank has come before any goes on, inside a node and between nodes."""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import schedules
import torch
from run_by import run_by

import deep_comm
from deep_comm import errors, local

NUM_ROUNDS = 3


@dataclass(frozen=True)
class BarrierCase:
    num_ranks: int
    ranks_per_node: int | None = None
    board: list[int] = dataclasses.field(default_factory=list, compare=False)


def buffer_of(group: Any, case: BarrierCase, **options: Any) -> deep_comm.Buffer:
    return deep_comm.Buffer(
        group, 1 << 20, 1 << 20 if case.ranks_per_node else 0, device="cpu",
        ranks_per_node=case.ranks_per_node, **options,
    )  # fmt: skip


def run_case(group: Any, case: BarrierCase) -> list[list[int]]:
    """What a rank sees of all others' rounds after each barrier."""
    case.board[:] = [0] * case.num_ranks
    seen = []
    with buffer_of(group, case) as buffer:
        buffer.barrier()  # all have emptied the board
        for number in range(1, NUM_ROUNDS + 1):
            case.board[group.rank()] = number
            buffer.barrier()
            seen.append(list(case.board))
            buffer.barrier()
    return seen


def verify(case: BarrierCase, results: Any) -> None:
    for rank, seen in enumerate(results):
        wanted = [[number] * case.num_ranks for number in range(1, NUM_ROUNDS + 1)]
        assert seen == wanted, f"rank {rank} saw {seen}"


CASES = [BarrierCase(1), BarrierCase(2), BarrierCase(5), BarrierCase(8), BarrierCase(4, 2)]
CASES += [BarrierCase(3, 1), BarrierCase(6, 3)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_ranks_have_come_before_one_goes_on(case: BarrierCase) -> None:
    for seed in range(4):
        schedules.run_seeds(range(seed, seed + 1), lambda seed: case, run_case, verify)


@pytest.mark.parametrize("case", [BarrierCase(3), BarrierCase(4, 2)], ids=str)
def test_a_barrier_that_does_not_wait_is_noticed(case: BarrierCase) -> None:
    schedules.find_fault("skip_entry_barrier", case, run_case, verify)


@pytest.mark.parametrize("ranks_per_node", [None, 1])
def test_another_operation_is_a_mismatch_on_all_ranks(ranks_per_node: int | None) -> None:
    def fn(group: Any) -> None:
        with buffer_of(group, BarrierCase(2, ranks_per_node), timeout_s=20.0) as buffer:
            x = torch.ones(3, 64, dtype=torch.bfloat16)
            idx = torch.zeros(3, 1, dtype=torch.int64)
            if group.rank() == 0:
                buffer.barrier()
            else:
                buffer.dispatch(x, topk_idx=idx, topk_weights=torch.ones(3, 1), num_experts=2)

    ended = local.run(fn, 2, timeout_s=60, return_errors=True)
    assert [type(error) for error in ended] == [errors.ConfigMismatch] * 2, ended


@pytest.mark.parametrize("ranks_per_node", [None, 1])
def test_a_rank_that_does_not_come_is_named(ranks_per_node: int | None) -> None:
    is_over = threading.Event()

    def fn(group: Any) -> None:
        with buffer_of(group, BarrierCase(3, ranks_per_node), timeout_s=0.5) as buffer:
            if group.rank() == 1:
                is_over.wait(30)
                return
            try:
                buffer.barrier()
            finally:
                is_over.set()

    ended = local.run(fn, 3, timeout_s=60, return_errors=True)
    for rank in (0, 2):
        assert isinstance(ended[rank], errors.PeerTimeout) and ended[rank].peer == 1, ended


@run_by(local.run, 3, timeout_s=60)
def test_it_counts_as_a_call_among_others(group: Any, /) -> None:
    """Generations go on: rows of calls before and after it are right."""
    rank = group.rank()
    with deep_comm.Buffer(group, 4 << 20, device="cpu") as buffer:
        for number in range(4):
            x = torch.full((5, 64), float(10 * rank + number), dtype=torch.bfloat16)
            idx = torch.full((5, 1), (rank + 1) % 3)
            recv_x, *_, handle, _ = buffer.dispatch(
                x, topk_idx=idx, topk_weights=torch.ones(5, 1), num_experts=3
            )
            buffer.barrier()
            assert (recv_x == float(10 * ((rank - 1) % 3) + number)).all()
            combined, _, _ = buffer.combine(recv_x, handle)
            buffer.barrier()
            assert torch.equal(combined, x)
