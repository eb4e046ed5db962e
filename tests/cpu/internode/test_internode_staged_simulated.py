"""Combine's staged mode between nodes under seeded schedules; and faults that must be found."""

import dataclasses
import random

import found_seeds
import pytest
import torch
from cases import InternodeCase
from roundtrip import buffer_of, call_once, run_case, verify
from schedules import find_fault, pass_without_fault, run_seeds
from test_internode_simulated import halves_of, small_case

from deep_comm import simulate

pytestmark = pytest.mark.usefixtures("poison")


def staged_case(seed: int) -> InternodeCase:
    choose = random.Random(seed + 33)
    rail_slots = choose.choice((2, 4, 9))
    return dataclasses.replace(
        small_case(seed),
        combine_dtype=choose.choice((torch.bfloat16, torch.bfloat16, torch.float32)),
        rail_chunk=choose.randint(1, rail_slots // 2), rail_slots=rail_slots, nvl_bytes=1 << 19,
        direct_bytes=1 << 18, is_direct=True,
    )  # fmt: skip


def test_every_schedule_gives_the_same_bits() -> None:
    run_seeds(range(160), staged_case, run_case, verify)


def test_sums_stored_into_near_nodes_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_RAIL_NEAR", "1")
    run_seeds(range(1000, 1040), staged_case, run_case, verify)


# Several rows a chunk, several calls and unequal ranks give each fault a chance. Between nodes is
# memory for rings alone: dispatch takes those, and faults of combine's own show.
FAULTY = InternodeCase(
    (9, 6, 12, 5), experts=4, topk=3, hidden=48, num_sms=4, slots=2, send_chunk=1, calls=2,
    rail_slots=4, rail_chunk=2, nvl_bytes=1 << 19, direct_bytes=1 << 18, rdma_bytes=1 << 12,
    ranks_per_node=2,
)  # fmt: skip
# Between near nodes that memory is enough for places, which need no slots to send from.
NEAR = dataclasses.replace(FAULTY, is_direct=True)
FAULTS = [
    "skip_arrival",  # rows and sums are added whether they have come or not
    "reorder_rail",  # the word of a chunk overtakes the sums before it
    "skip_rail_fence",  # the NIC reads sums whose stores it cannot see yet
    "weaken_fence",  # words of rows and sums are not behind them
    "skip_bulk_wait",  # rows are published before they have landed
    "skip_entry_barrier",  # a kernel writes where peers still run the one before
    "ignore_generation",  # words of the kernel before are taken for this one's
    "early_rail_done",  # a call could return while its kernel still needs the NIC
]


def test_more_items_than_the_publisher_is_told_of_at_once() -> None:
    """A warp waits until the publisher has read an entry before it fills it again."""
    case = InternodeCase(
        (600, 3, 2, 3), hidden=16, experts=4, topk=2, num_sms=2, slots=2, send_chunk=1,
        rail_chunk=2, rail_slots=4, nvl_bytes=1 << 21, direct_bytes=1 << 20, rdma_bytes=1 << 21,
        ranks_per_node=2, is_direct=True,
    )  # fmt: skip
    run_seeds(range(3), lambda seed: dataclasses.replace(case, seed=seed), run_case, verify)


@pytest.mark.parametrize("fault", FAULTS)
def test_simulation_finds_the_fault(fault: str) -> None:
    find_fault(fault, FAULTY, run_case, verify)


@pytest.mark.parametrize("fault", ["skip_arrival", "weaken_fence", "skip_entry_barrier"])
def test_simulation_finds_the_fault_between_near_nodes(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEP_COMM_RAIL_NEAR", "1")
    find_fault(fault, NEAR, run_case, verify)


@pytest.mark.parametrize("is_near", [False, True])
def test_the_same_runs_pass_without_a_fault(is_near: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_RAIL_NEAR", str(int(is_near)))
    pass_without_fault(NEAR if is_near else FAULTY, run_case, verify, 10)


def test_rows_in_pieces_return() -> None:
    run_seeds(range(3), lambda seed: halves_of(FAULTY, seed), run_case, verify)


def test_chunks_that_several_blocks_fill_are_stored_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_RAIL_NEAR", "1")
    case = dataclasses.replace(NEAR, rail_chunk=4, rail_slots=8, rdma_bytes=1 << 15)
    run_seeds(
        found_seeds.CHUNKS, lambda seed: dataclasses.replace(case, seed=seed), run_case, verify
    )


@pytest.mark.parametrize("without", [0, 3])
def test_all_ranks_take_the_rings_if_one_has_no_room(without: int) -> None:
    """Nothing but memory of its own differs on that rank: it keeps its region's blocks."""

    def fn(group):
        with buffer_of(group, FAULTY, "cpu") as buffer:
            kept = None
            if buffer.rank == without:
                kept = buffer._context.region.allocate(FAULTY.direct_bytes)
            assert buffer.rank != without or kept is not None
            calls = [call_once(buffer, FAULTY, call) for call in range(FAULTY.calls)]
            del kept
            return calls

    for seed in range(4):
        verify(FAULTY, simulate.run(fn, 4, seed, timeout_s=120))
