"""The weak memory of the simulated machine: what must hold for every seed, what must break for one.

A rule that could not break a test would not be modelled: every litmus test has its negative.
"""

from __future__ import annotations

import pytest
from simt_machine import Shape, on_every_machine, run_on, simulate

SEEDS = range(100)
OTHER_RANK, OTHER_BLOCK, OTHER_WARP, OTHER_LANE = range(4)
(
    RELAXED_STORE,
    RELEASE_CTA,
    RELEASE_GPU,
    RELEASE_SYS,
    FENCE_GPU,
    FENCE_SYS,
    RELAXED_ADD,
    ADD_GPU,
    ADD_SYS,
    CAS_SYS,
) = range(10)


def stale(kernel: str, params: list[int], shape: Shape, **options: object) -> int:
    """How many words the reader found old, over all seeds."""
    runs = (
        simulate(kernel, params, num_ranks=2, seed=seed, shape=shape, **options) for seed in SEEDS
    )
    return sum(int(run.check().memory[8]) for run in runs)


def message(publish: int, reader: int, **options: object) -> int:
    return stale("message_passing", [publish, reader], Shape(2, 64, 0), **options)


@pytest.mark.parametrize(
    "publish, reader",
    [
        (RELEASE_SYS, OTHER_RANK),
        (FENCE_SYS, OTHER_RANK),
        (ADD_SYS, OTHER_RANK),
        (CAS_SYS, OTHER_RANK),
        (RELEASE_GPU, OTHER_BLOCK),
        (FENCE_GPU, OTHER_BLOCK),
        (ADD_GPU, OTHER_BLOCK),
        (RELEASE_SYS, OTHER_BLOCK),
        (RELEASE_CTA, OTHER_WARP),
        (RELEASE_CTA, OTHER_LANE),
    ],
)
def test_a_release_of_enough_scope_carries_the_message(publish: int, reader: int) -> None:
    assert message(publish, reader) == 0


@pytest.mark.parametrize(
    "publish, reader",
    [
        (RELAXED_STORE, OTHER_RANK),
        (RELAXED_STORE, OTHER_BLOCK),
        (RELAXED_STORE, OTHER_LANE),
        (RELAXED_ADD, OTHER_RANK),
        (RELEASE_CTA, OTHER_RANK),
        (RELEASE_CTA, OTHER_BLOCK),
        (RELEASE_GPU, OTHER_RANK),
        (FENCE_GPU, OTHER_RANK),
        (ADD_GPU, OTHER_RANK),
    ],
)
def test_a_missing_or_narrow_release_is_found(publish: int, reader: int) -> None:
    assert message(publish, reader) > 0


def test_the_faults_weaken_release_and_weaken_fence_are_found() -> None:
    assert message(RELEASE_SYS, OTHER_RANK, faults=["weaken_release"]) > 0
    assert message(ADD_SYS, OTHER_RANK, faults=["weaken_release"]) > 0
    assert message(FENCE_SYS, OTHER_RANK, faults=["weaken_fence"]) > 0


def test_without_weak_memory_stores_act_at_once() -> None:
    assert message(RELAXED_STORE, OTHER_RANK, weak_memory=False) == 0


NOTHING, SYNC_WARP, PARTIAL_SYNC_WARP, SYNC_BLOCK, NAMED_BARRIER = range(5)


@pytest.mark.parametrize("meet", [SYNC_WARP, PARTIAL_SYNC_WARP, SYNC_BLOCK, NAMED_BARRIER])
def test_a_release_carries_what_the_thread_saw_through_barriers(meet: int) -> None:
    assert stale("cumulativity", [meet], Shape(1, 64, 0)) == 0


def test_a_release_does_not_carry_what_the_thread_never_met() -> None:
    assert stale("cumulativity", [NOTHING], Shape(1, 64, 0)) > 0


def test_a_release_carries_what_its_thread_acquired() -> None:
    assert stale("relay", [], Shape(2, 32, 0)) == 0


@pytest.mark.parametrize("seed", range(20))
def test_stores_to_one_address_keep_their_order_for_everybody(seed: int) -> None:
    run = simulate("coherence", [60], num_ranks=2, seed=seed, shape=Shape(2, 32, 0))
    assert run.check().memory[16] == 0


@pytest.mark.parametrize("seed", range(20))
def test_a_thread_reads_its_own_stores_byte_by_byte(seed: int) -> None:
    assert simulate("own_stores", seed=seed).check().memory[0] == 0


@on_every_machine
def test_atomics_lose_nothing(machine: str) -> None:
    memory = run_on(machine, "atomics", shape=Shape(2, 64))
    total = 128
    assert memory[:6].tolist() == [
        total,
        2 * total,
        (-total) & 0xFFFFFFFF,
        0xFFFFFFFF,
        3 * total,
        total,
    ]


@pytest.mark.parametrize("seed", range(10))
def test_a_grid_that_ends_has_stored_everything(seed: int) -> None:
    shape = Shape(2, 64)
    memory = simulate("across_grids", [0], seed=seed, shape=shape).check().memory
    assert (memory[64 : 64 + 2 * 128 : 2] == 7).all()
