"""Launches that begin while the one before them in their stream runs."""

from __future__ import annotations

import numpy as np
import pytest
from simt_machine import Shape, launch, native, run_direct, run_ranks, words

SHAPE = Shape(3, 64)
POLICIES = ["random", "fifo", "lifo", "starve", "priority"]
DATA, LAST, SEEN = 64, 128, 256


def run_pair(
    first: tuple[int, int],
    second: tuple[int, ...],
    *,
    seed: int = 0,
    policy: str = "any",
    begin: str = "beside",
    kernel: str = "second_of_pair",
    third: str | None = None,
    **options: object,
) -> tuple[np.ndarray, BaseException | None]:
    memory = words()
    simulation = native.Simulation(num_ranks=1, seed=seed, policy=policy, **options)

    def body() -> None:
        launch(simulation, memory, "first_of_pair", first, shape=SHAPE)
        launch(simulation, memory, kernel, second, shape=SHAPE, begin=begin)
        if third is not None:
            launch(simulation, memory, "third_of_pair", shape=SHAPE, begin=third)
        native.synchronize(simulation, 0, 0)

    (error,) = run_ranks(simulation, [body])
    return memory, error


def seen(memory: np.ndarray, what: int = 0) -> list[int]:
    begin = SEEN + 32 * what
    return memory[begin : begin + SHAPE.num_blocks].tolist()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_launch_begins_when_all_blocks_before_it_allow_it(policy: str) -> None:
    """The first launch cannot end before the second has begun."""
    for seed in range(5):
        memory, error = run_pair((1, 1), (1, 1, 0), seed=seed, policy=policy)
        assert error is None
        assert seen(memory) == [1, 1, 1]


@pytest.mark.parametrize(("allows", "begin"), [(0, "beside"), (1, "behind")])
def test_otherwise_it_begins_when_that_one_has_ended(allows: int, begin: str) -> None:
    _, error = run_pair((allows, 1), (1, 0 if begin == "behind" else 1, 0), begin=begin)
    assert isinstance(error, native.SimulationStuck)
    assert "kernel 'first_of_pair' rank 0 block 0 warp 0 lane 0: waits for a word" in str(error)
    assert "second_of_pair" not in str(error)
    memory, error = run_pair((allows, 0), (1, 0 if begin == "behind" else 1, 0), begin=begin)
    assert error is None
    assert seen(memory) == [1, 1, 1]


def test_a_pair_that_waits_in_a_circle_is_stuck_and_both_are_listed() -> None:
    _, error = run_pair((1, 1), (0,), kernel="second_reads_constants", policy="fifo")
    assert isinstance(error, native.SimulationStuck)
    text = str(error)
    assert "kernel 'first_of_pair' rank 0 block 2 warp 0 lane 0: waits for a word" in text
    assert "kernel 'second_reads_constants' rank 0 block 2 warp 0 lane 0: waits for a word" in text
    assert "block 2 warp 1 lanes 0-31: waits for the end of the launch before" in text


def test_words_order_what_the_first_has_stored() -> None:
    for seed in range(40):
        memory, error = run_pair((1, 0), (1, 1, 0), seed=seed)
        assert error is None
        assert seen(memory) == [1, 1, 1]


def test_without_a_word_old_values_are_read() -> None:
    runs = [run_pair((1, 0), (0, 1, 0), seed=seed) for seed in range(40)]
    assert all(error is None for _, error in runs)
    assert any(seen(memory) != [1, 1, 1] for memory, _ in runs)


def test_a_word_that_releases_nothing_is_found() -> None:
    runs = [run_pair((1, 0), (1, 1, 0), seed=seed, faults=["weaken_release"]) for seed in range(40)]
    assert any(seen(memory) != [1, 1, 1] for memory, _ in runs)


def test_the_end_orders_everything() -> None:
    for seed in range(40):
        memory, error = run_pair((1, 0), (0, 1, 0), seed=seed)
        assert error is None
        assert seen(memory, 1) == [1, 1, 1]


def test_before_the_end_what_has_no_word_may_be_old() -> None:
    runs = [run_pair((1, 0), (1, 1, 1), seed=seed) for seed in range(40)]
    assert all(error is None for _, error in runs)
    assert any(seen(memory, 1) != [1, 1, 1] for memory, _ in runs)


def test_a_thread_that_never_awaits_the_end_is_found() -> None:
    _, error = run_pair((1, 0), (1, 0, 0))
    assert isinstance(error, native.MachineError)
    assert "exits without await_earlier_launch" in str(error)


def test_a_launch_that_allows_the_next_one_too_soon_is_found() -> None:
    _, error = run_pair((1, 0), (), kernel="second_allows_too_soon")
    assert isinstance(error, native.MachineError)
    assert "allow_later_launch before await_earlier_launch" in str(error)


def test_constants_that_the_first_stores_are_found() -> None:
    errors = [
        run_pair((1, 1), (1,), kernel="second_reads_constants", seed=seed)[1] for seed in range(10)
    ]
    assert all("ld_nc reads memory that was written" in str(error) for error in errors)


def test_the_next_launch_comes_after_both() -> None:
    for seed in range(20):
        memory, error = run_pair((1, 1), (1, 1, 0), seed=seed, third="behind")
        assert error is None
        assert seen(memory, 2) == [2, 2, 2]


@pytest.mark.parametrize("begin", ["early", "beside"])
def test_the_next_launch_awaits_the_pair_if_it_may_begin_before(begin: str) -> None:
    _, error = run_pair((1, 1), (1, 1, 0), third=begin)
    assert isinstance(error, native.MachineError)
    assert "await_earlier_launch" in str(error)


def test_a_killed_rank_takes_both_with_it() -> None:
    memory = words()
    simulation = native.Simulation(num_ranks=2, seed=3)

    def victim() -> None:
        launch(simulation, memory, "first_of_pair", (1, 1), shape=SHAPE)
        launch(simulation, memory, "second_reads_constants", (0,), shape=SHAPE, begin="beside")
        simulation.exchange(0, b"")
        simulation.kill(0)

    def other() -> None:
        launch(simulation, memory, "wait_for_clock", (200_000,), rank=1)
        native.synchronize(simulation, 1, 0)
        text = simulation.describe()
        assert "first_of_pair" in text and "second_reads_constants" in text
        simulation.exchange(1, b"")
        launch(simulation, memory, "set_word", (5, 0, 0), rank=1)
        native.synchronize(simulation, 1, 0)

    assert run_ranks(simulation, [victim, other]) == [None, None]
    assert memory[0] == 5
    assert "of_pair" not in simulation.describe()


def test_one_after_the_other_outside_of_a_simulation() -> None:
    memory = run_direct("first_of_pair", (1, 0), shape=SHAPE)
    run_direct("second_of_pair", (1, 1, 0), shape=SHAPE, memory=memory)
    assert seen(memory) == seen(memory, 1) == [1, 1, 1]
