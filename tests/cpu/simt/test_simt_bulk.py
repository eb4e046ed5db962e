"""mbarriers and bulk copies: phases, bytes, groups; what waits promise, what their lack breaks."""

from __future__ import annotations

import numpy as np
import pytest
from simt_machine import Shape, native, run_direct, run_on, simulate, words

ONE = Shape(1, 1)


def test_mbarrier_phases(machine: str) -> None:
    memory = run_on(machine, "mbarrier_phases", shape=ONE)
    # fresh; one of two arrivals; complete; next phase; one arrival, with bytes; complete again
    assert memory[:8].tolist() == [1, 0, 0, 1, 0, 0, 1, 0]


@pytest.mark.parametrize("num_bytes", [16, 512, 7168])
def test_bulk_round_trip(machine: str, num_bytes: int) -> None:
    rounds = 5
    memory = words()
    data = memory[64:].view(np.uint8)
    source = np.random.default_rng(num_bytes).integers(0, 256, num_bytes * rounds, dtype=np.uint8)
    if 2 * source.size > data.size:
        memory = words(2 * source.size // 8 + 64)
        data = memory[64:].view(np.uint8)
    data[: source.size] = source
    shape = Shape(1, 64, 128 + num_bytes)
    run_on(machine, "bulk_round_trip", [num_bytes, rounds], shape=shape, memory=memory)
    np.testing.assert_array_equal(data[source.size : 2 * source.size], source + np.uint8(1))


def load_result(seed: int, wait: int) -> int:
    memory = words()
    memory[64:72] = 77
    return int(simulate("bulk_load_unwaited", [wait], seed=seed, memory=memory).check().memory[0])


def test_a_load_is_there_after_its_barrier_and_perhaps_not_before() -> None:
    assert {load_result(seed, 1) for seed in range(60)} == {77}
    assert {load_result(seed, 0) for seed in range(60)} == {77, 0xD5D5D5D5D5D5D5D5}


def store_reuse_is_right(kernel: str, params: list[int], seed: int, **options: object) -> bool:
    count = 8 if kernel == "bulk_store_reuse" else 16
    memory = simulate(kernel, params, seed=seed, shape=ONE, **options).check().memory
    return bool((memory[: 8 * count].reshape(count, 8) == 1000 + np.arange(count)[:, None]).all())


def test_shared_memory_may_be_reused_after_bulk_wait_read_and_not_before() -> None:
    assert all(store_reuse_is_right("bulk_store_reuse", [1], seed) for seed in range(60))
    assert not all(store_reuse_is_right("bulk_store_reuse", [0], seed) for seed in range(60))
    at_once = {"delay_bulk": False}
    assert all(store_reuse_is_right("bulk_store_reuse", [0], seed, **at_once) for seed in range(9))


def test_waits_leave_the_newest_groups_alone() -> None:
    assert all(store_reuse_is_right("bulk_groups", [], seed) for seed in range(60))


def test_the_fault_skip_bulk_wait_read_is_found() -> None:
    faults = {"faults": ["skip_bulk_wait_read"]}
    assert not all(store_reuse_is_right("bulk_groups", [], seed, **faults) for seed in range(60))


def stale_words(wait: int, release: int, **options: object) -> list[int]:
    return [
        int(
            simulate("bulk_message", [wait, release], num_ranks=2, seed=seed, **options)
            .check()
            .memory[8]
        )
        for seed in range(120)
    ]


def test_a_bulk_store_reaches_others_after_wait_and_release() -> None:
    assert sum(stale_words(1, 1)) == 0


def test_a_bulk_store_without_its_wait_is_found() -> None:
    assert sum(stale_words(0, 1)) > 0


def test_a_bulk_store_without_the_release_after_its_wait_is_found() -> None:
    assert sum(stale_words(1, 0)) > 0


def test_the_fault_skip_bulk_wait_is_found() -> None:
    """Either the peer reads old words, or the thread exits with its store under way."""
    with pytest.raises(native.MachineError, match="exits with bulk stores"):
        stale_words(1, 1, faults=["skip_bulk_wait"])


@pytest.mark.parametrize(
    "case, message",
    [
        (0, "bulk_store of 24 bytes: the size is a multiple of 16"),
        (1, "bulk_store of 32 bytes: the global address is not 16-aligned"),
        (2, "bulk_store of 32 bytes: the shared address is not 16-aligned"),
        (3, r"outside of the block's 512 bytes of shared memory \(offset 512\)"),
        (4, r"bulk_load of 32 bytes: outside .*\(offset 496\)"),
        (5, r"outside .*\(offset -16\)"),
        (6, "the mbarrier is not in the block's shared memory"),
        (7, "an mbarrier is 8 aligned bytes"),
        (8, "mbarrier_init with 0 arrivals"),
        (9, "arrives at an mbarrier that was not initialised"),
        (10, r"exits with bulk stores .*\(1 not committed, 0 groups"),
        (11, r"exits with bulk stores .*\(0 not committed, 1 groups"),
    ],
)
def test_broken_rules_of_bulk_copies_are_named(case: int, message: str) -> None:
    shape = Shape(1, 32, 512)
    with pytest.raises(native.MachineError, match=message):
        run_direct("bulk_errors", [case, 512], shape=shape)
    with pytest.raises(native.MachineError, match=message):
        simulate("bulk_errors", [case, 512], shape=shape).check()
