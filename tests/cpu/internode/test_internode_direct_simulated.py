"""Dispatch between nodes to final places, every row with a slot of its own: under simulated
schedules, with rows put by a network of every order or stored into near nodes.
"""

import dataclasses

import cases
import pytest
from cases import InternodeCase
from roundtrip import run_case, verify
from schedules import find_fault, pass_without_fault, run_seeds, simulated
from test_internode_simulated import FAULTY, halves_of, small_case

pytestmark = pytest.mark.usefixtures("poison")


def direct(case: InternodeCase) -> InternodeCase:
    return cases.direct(dataclasses.replace(case, nvl_bytes=1 << 19, rdma_bytes=1 << 19))


def test_every_schedule_gives_the_same_bits(way: str) -> None:
    run_seeds(range(2000, 2120), lambda seed: direct(small_case(seed)), run_case, verify)


# Chunks of several rows that different blocks fill, two calls, unequal ranks.
SEVERAL = direct(dataclasses.replace(FAULTY, num_sms=4, rail_chunk=2, rail_slots=4))


@pytest.mark.parametrize(
    "fault",
    [
        "reorder_rail",  # the word overtakes the rows
        "skip_rail_fence",  # the NIC reads slots whose stores it cannot see yet
        "skip_bulk_wait",  # rows are told of before they have landed
        "skip_entry_barrier",  # slots and outputs are filled while the kernel before reads them
        "weaken_release",
        "early_rail_done",  # a call could return while its kernel still needs the NIC
        "skip_exit_barrier",  # a call returns before its rows are there
        "ignore_generation",  # words of the kernel before announce this one's rows
        "early_generation",  # a block that begins late is of the next generation
    ],
)
def test_simulation_finds_the_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_RAIL_NEAR", "0")
    find_fault(fault, SEVERAL, run_case, verify)


def test_more_tokens_than_the_publisher_is_told_of_at_once() -> None:
    """A sender waits until the publisher has read an entry before it fills it again."""
    case = cases.direct(
        InternodeCase(
            (600, 3), hidden=16, experts=4, topk=2, num_sms=2, slots=2, send_chunk=1,
            rail_chunk=2, rail_slots=4, nvl_bytes=1 << 21, rdma_bytes=1 << 21, ranks_per_node=1,
        )
    )  # fmt: skip
    run_seeds(range(3), lambda seed: dataclasses.replace(case, seed=seed), run_case, verify)


@pytest.mark.parametrize(
    "fault", ["skip_rail_fence", "skip_bulk_wait", "skip_entry_barrier", "weaken_release"]
)
def test_simulation_finds_the_fault_between_near_nodes(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEP_COMM_RAIL_NEAR", "1")
    find_fault(fault, SEVERAL, run_case, verify)


def test_the_same_runs_pass_without_a_fault(way: str) -> None:
    pass_without_fault(SEVERAL, run_case, verify)


def test_rows_in_pieces_arrive(way: str) -> None:
    """Through stages in shared memory that hold half a row."""
    run_seeds(range(3), lambda seed: halves_of(SEVERAL, seed), run_case, verify)


def test_simulation_finds_a_stage_that_is_loaded_while_it_is_read(way: str) -> None:
    find_fault("skip_bulk_wait_read", halves_of(SEVERAL, 0), run_case, verify)


@pytest.mark.parametrize("stalled", [0, 1, 2, 3])
def test_a_rank_that_stalls_for_a_while_changes_nothing(stalled: int, way: str) -> None:
    for seed in range(3):
        results = simulated(SEVERAL, run_case, seed, stalls=[(stalled, 300 * seed, 4000)])
        verify(SEVERAL, results)


def test_sixty_four_ranks_of_eight_nodes(way: str) -> None:
    case = InternodeCase(
        (2,) * 64, hidden=16, experts=64, topk=4, num_sms=2, slots=2, send_chunk=1, rail_chunk=1,
        rail_slots=2, ranks_per_node=8, nvl_bytes=1 << 18, direct_bytes=3 << 16, rdma_bytes=1 << 18,
        is_direct=True,
    )  # fmt: skip
    verify(case, simulated(case, run_case, 1))
