"""Block barriers, exits, many blocks; and the size of things that can be launched."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from simt_machine import Shape, run_direct, run_on, words


@pytest.mark.parametrize("num_threads", [64, 96, 40])
def test_sync_block_holds_every_thread(machine: str, num_threads: int) -> None:
    memory = run_on(machine, "block_rounds", [20], shape=Shape(2, num_threads))
    assert memory[0] == 0


@pytest.mark.parametrize("num_threads", [64, 96])
def test_sync_block_any_tells_every_thread_what_one_has_said(
    machine: str, num_threads: int
) -> None:
    assert run_on(machine, "any_rounds", [25], shape=Shape(2, num_threads))[0] == 0


@pytest.mark.parametrize("num_stay", [1, 32, 63])
def test_sync_block_does_not_wait_for_threads_that_have_exited(machine: str, num_stay: int) -> None:
    memory = run_on(machine, "sync_after_exit", [num_stay], shape=Shape(1, 96))
    assert memory[:3].tolist() == [num_stay] * 3
    assert memory[9] == 0


@pytest.mark.parametrize("num_threads", [64, 160])
def test_arrive_and_sync_make_a_producer_and_consumers(machine: str, num_threads: int) -> None:
    memory = run_on(machine, "producer_consumer", [25], shape=Shape(1, num_threads))
    assert memory[0] == 0


def test_named_barriers_of_parts_of_a_block_are_independent(machine: str) -> None:
    assert run_on(machine, "named_pairs", shape=Shape(2, 256))[0] == 0


def test_all_blocks_of_a_grid_are_resident(machine: str) -> None:
    memory = run_on(machine, "grid_barrier", shape=Shape(7, 64))
    assert memory[:2].tolist() == [7, 7 * 64]


def test_threads_that_spin_on_each_other_without_a_hint_get_their_turns(machine: str) -> None:
    memory = run_on(machine, "spin_on_each_other", shape=Shape(2, 32))
    assert memory[0] == 64


def test_thousands_of_threads() -> None:
    memory = run_direct("grid_barrier", shape=Shape(16, 1024, 64))
    assert memory[:2].tolist() == [16, 16 * 1024]


def test_the_full_shared_memory_of_a_block() -> None:
    run_direct("identity", shape=Shape(2, 32, 227 * 1024))


@pytest.mark.parametrize(
    "shape, field",
    [
        (Shape(0, 32), "num_blocks"),
        (Shape(1, 0), "num_threads"),
        (Shape(1, 1025), "num_threads"),
        (Shape(1, 32, 227 * 1024 + 1), "smem_bytes"),
    ],
)
def test_impossible_grids_are_refused(shape: Shape, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        run_direct("identity", shape=shape)


def test_os_threads_run_grids_side_by_side() -> None:
    """Two direct grids that wait for each other, as ranks of one process do."""
    memory = words()
    num_ranks = 4
    shared = dict(shape=Shape(2, 64), memory=memory)
    with ThreadPoolExecutor(num_ranks) as pool:
        runs = [
            pool.submit(run_direct, "token_ring", [num_ranks, 50], **shared, rank=rank)
            for rank in range(num_ranks)
        ]
    assert all(run.result() is memory for run in runs)
    assert memory[0] == num_ranks * 2 * 64
