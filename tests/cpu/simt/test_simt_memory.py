"""The weak memory of the simulated machine: what must hold for every seed, what must break for one.

A rule that could not break a test would not be modelled: every litmus test has its negative.
"""

from __future__ import annotations

import litmus
import pytest
from litmus import (
    ACQUIRE_CTA,
    ACQUIRE_GPU,
    ACQUIRE_SHUFFLE,
    ACQUIRE_SYS,
    ADD_SYS,
    FENCE_SYS,
    OTHER_BLOCK,
    OTHER_RANK,
    OTHER_WARP,
    RELAXED,
    RELAXED_STORE,
    RELEASE_CTA,
    RELEASE_GPU,
    RELEASE_SYS,
    Litmus,
)
from simt_machine import Shape, native, run_on, run_simulation, simulate

SEEDS = range(100)


def stale(test: Litmus, **options: object) -> int:
    """How many words the reader found old, over all seeds."""
    shape = Shape(test.num_blocks, test.num_threads, test.smem_bytes)
    runs = (
        simulate(
            test.kernel,
            test.params,
            num_ranks=test.num_ranks,
            seed=seed,
            shape=shape,
            allow_late_loads=True,
            **options,
        )
        for seed in SEEDS
    )
    return sum(int(run.check().memory[8]) for run in runs)


def message(
    publish: int, reader: int, observe: int = ACQUIRE_SYS, lane: int = 0, **options: object
) -> int:
    (test,) = litmus.messages([(publish, reader, observe, lane)])
    return stale(test, **options)


@pytest.mark.parametrize("test", litmus.FORBIDDEN, ids=str)
def test_no_schedule_shows_what_ptx_forbids(test: Litmus) -> None:
    assert stale(test) == 0


@pytest.mark.parametrize("test", litmus.ALLOWED, ids=str)
def test_some_schedule_shows_what_ptx_allows(test: Litmus) -> None:
    assert stale(test) > 0


def stale_after_releases(publish: int, reader: int, observe: int, by_atomic: bool) -> int:
    """Between the flag and its reader come more releases than the machine remembers."""
    params = [publish, reader, observe, 0, 9000, int(by_atomic)]
    return stale(Litmus("message_passing", params, 2, 2, 64))


@pytest.mark.parametrize("by_atomic", [False, True])
@pytest.mark.parametrize(
    ("publish", "reader", "observe"),
    [
        (RELEASE_CTA, OTHER_WARP, ACQUIRE_CTA),
        (RELEASE_GPU, OTHER_BLOCK, ACQUIRE_GPU),
        (RELEASE_SYS, OTHER_RANK, ACQUIRE_SYS),
    ],
)
def test_a_release_that_is_forgotten_reaches_whoever_acquires_it(
    publish: int, reader: int, observe: int, by_atomic: bool
) -> None:
    assert stale_after_releases(publish, reader, observe, by_atomic) == 0


@pytest.mark.parametrize("by_atomic", [False, True])
def test_a_release_that_is_forgotten_does_not_reach_who_reads_relaxed(by_atomic: bool) -> None:
    assert stale_after_releases(RELEASE_CTA, OTHER_WARP, RELAXED, by_atomic) > 0


def late(test: Litmus, **options: object) -> int:
    """How many runs say that a load could be late, with the words of the test as a credit."""
    shape = Shape(test.num_blocks, test.num_threads, test.smem_bytes)
    num_late = 0
    for seed in range(20):
        run = simulate("credit", test.params, num_ranks=2, seed=seed, shape=shape, **options)
        num_late += any("could be late" in str(error) for error in run.errors)
        assert num_late > 0 or run.check().memory[8] == 0  # and no load is early
    return num_late


MESSAGES = [test for test in litmus.FORBIDDEN if test.kernel == "message_passing"]
RACES = [test for test in litmus.ALLOWED if test.kernel == "message_passing"]


@pytest.mark.parametrize("test", MESSAGES, ids=str)
def test_what_orders_a_message_orders_a_credit(test: Litmus) -> None:
    assert late(test) == 0


@pytest.mark.parametrize("test", RACES, ids=str)
def test_a_load_that_could_be_late_is_an_error(test: Litmus) -> None:
    assert late(test) > 0
    assert late(test, allow_late_loads=True) == 0


def seen(kernel: str, params: list[int], num_ranks: int, num_results: int = 2) -> set[object]:
    """What the last ``num_results`` ranks have seen together, over all seeds."""
    outcomes = set()
    for seed in range(300):
        run = simulate(kernel, params, num_ranks=num_ranks, seed=seed, shape=Shape(1, 32, 0))
        ranks = range(num_ranks - num_results, num_ranks)
        outcomes.add(tuple(int(run.check().memory[8 + 2 * rank]) - 1 for rank in ranks))
    return outcomes


def test_shuffles_order_memory_where_the_switch_says_so() -> None:
    with_order = {"collectives_order_memory": True}
    assert message(RELEASE_SYS, OTHER_RANK, ACQUIRE_SHUFFLE, 7, **with_order) == 0


@pytest.mark.parametrize("fence", [0, 1])
def test_both_of_two_threads_may_miss_the_others_store(fence: int) -> None:
    # PTX forbids it with fence.sc alone, which no kernel here uses.
    assert seen("store_buffering", [fence], 2) == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_no_thread_sees_what_depends_on_its_own_later_store() -> None:
    # PTX allows (1, 1) if no dependency orders the store. Fibers run their code in order.
    assert seen("load_buffering", [], 2) == {(0, 0), (0, 1), (1, 0)}


@pytest.mark.parametrize("acquires", [0, 1])
def test_two_readers_may_see_two_stores_in_different_orders(acquires: int) -> None:
    assert (2, 2) in seen("independent_reads", [acquires], 4)


def test_the_faults_weaken_release_and_weaken_fence_are_found() -> None:
    assert message(RELEASE_SYS, OTHER_RANK, faults=["weaken_release"]) > 0
    assert message(ADD_SYS, OTHER_RANK, faults=["weaken_release"]) > 0
    assert message(FENCE_SYS, OTHER_RANK, faults=["weaken_fence"]) > 0


def test_without_weak_memory_stores_act_at_once() -> None:
    assert message(RELAXED_STORE, OTHER_RANK, RELAXED, weak_memory=False) == 0


def weakened(site: str) -> int:
    return message(FENCE_SYS, OTHER_RANK, weaken=site)


def test_a_site_is_weakened_by_its_name() -> None:
    simulation = native.Simulation(num_ranks=2, seed=0, note_sites=True)
    run_simulation(simulation, 2, "message_passing", [FENCE_SYS, OTHER_RANK, ACQUIRE_SYS, 0])
    sites = simulation.visited_sites()
    (fence,) = (site for site in sites if site.endswith(":fence_acq_rel_sys"))
    (acquire,) = (site for site in sites if site.endswith(":ld_acquire_sys"))
    assert fence.startswith("native/litmus.hpp:")
    for site in (fence, acquire):
        assert weakened(f"{site}:relaxed") > 0
        assert weakened(f"{site}:narrow") > 0
        assert weakened(f"{site.replace(':', ':9', 1)}:relaxed") == 0


def test_a_weakening_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="file:line:op:relaxed"):
        native.Simulation(num_ranks=1, seed=0, weaken="device/sync/await.cuh:14")


@pytest.mark.parametrize("seed", range(20))
def test_stores_to_one_address_keep_their_order_for_everybody(seed: int) -> None:
    run = simulate("coherence", [60], num_ranks=2, seed=seed, shape=Shape(2, 32, 0))
    assert run.check().memory[16] == 0


def stale_after_a_reader(params: list[int]) -> int:
    runs = (
        simulate("reads_passed_on", params, num_ranks=3, seed=seed, shape=Shape(1, 32, 0))
        for seed in range(300)
    )
    return sum(int(run.check().memory[16]) for run in runs)


def test_a_release_passes_on_what_its_thread_has_read() -> None:
    """PTX: Causality Order, by the observation order of strong loads."""
    assert stale_after_a_reader([0]) == 0
    assert stale_after_a_reader([1]) > 0


def test_a_store_that_loses_a_race_is_still_seen_by_its_thread_and_carries_what_is_before_it() -> (
    None
):
    """PTX: Coherence, and Causality Order of the readers."""
    for seed in range(400):
        run = simulate(
            "racing_stores", num_ranks=3, seed=seed, shape=Shape(1, 32, 0), allow_late_loads=True
        )
        assert run.check().memory[16:22:2].tolist() == [0, 0, 0], seed


@pytest.mark.parametrize("seed", range(20))
def test_a_thread_reads_its_own_stores_byte_by_byte(seed: int) -> None:
    assert simulate("own_stores", seed=seed).check().memory[0] == 0


def test_atomics_lose_nothing(machine: str) -> None:
    memory = run_on(machine, "atomics", shape=Shape(2, 64))
    total = 128
    assert memory[:6].tolist() == [
        total, 2 * total, (-total) & 0xFFFFFFFF, 0xFFFFFFFF, 3 * total, total,
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(10))
def test_a_grid_that_ends_has_stored_everything(seed: int) -> None:
    shape = Shape(2, 64)
    memory = simulate("across_grids", [0], seed=seed, shape=shape).check().memory
    assert (memory[64 : 64 + 2 * 128 : 2] == 7).all()
