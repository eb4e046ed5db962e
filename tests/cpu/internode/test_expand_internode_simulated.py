"""Expanded dispatches and combines over two tiers under seeded schedules: rows put by a network of
every order or stored into near nodes, weak memory; and faults that must be found.
"""

import dataclasses
import random

import expanded
import pytest
from cases import InternodeCase
from schedules import find_fault, pass_without_fault, run_seeds, simulated
from test_internode_simulated import FAULTY, SEVERAL, direct, small_case

pytestmark = pytest.mark.usefixtures("poison")


def expanded_case(seed: int) -> InternodeCase:
    choose = random.Random(seed + 77)
    case = dataclasses.replace(small_case(seed), alignment=choose.choice((1, 2, 16)))
    return direct(case) if choose.random() < 0.6 else case


def test_every_schedule_gives_the_same_bits(way: str) -> None:
    run_seeds(range(7000, 7120), expanded_case, expanded.run_case, expanded.verify)


def test_a_rank_of_more_experts_than_a_warp_has_lanes(way: str) -> None:
    """Both warps of a block number the rows that one of them has placed."""
    case = direct(InternodeCase(
        (20, 30), hidden=16, experts=90, topk=6, num_sms=4, slots=2, send_chunk=1, rail_chunk=1,
        rail_slots=2, ranks_per_node=1, alignment=2,
    ))  # fmt: skip
    for seed in range(6):
        expanded.verify(case, simulated(case, expanded.run_case, seed))


RINGS = dataclasses.replace(FAULTY, alignment=2, seed=2)
PLACES = dataclasses.replace(SEVERAL, alignment=2, seed=2)


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (RINGS, "reorder_rail"),
        (RINGS, "skip_rail_credit"),
        (RINGS, "weaken_release"),
        (PLACES, "reorder_rail"),
        (PLACES, "skip_rail_fence"),
        (PLACES, "skip_bulk_wait"),
        # Received rows lie where peers write: they must not before this rank has copied them.
        (PLACES, "skip_entry_barrier"),
        (PLACES, "weaken_release"),
    ],
    ids=lambda value: value if isinstance(value, str) else "direct" if value.is_direct else "rings",
)
def test_a_protocol_with_a_step_left_out_fails(
    case: InternodeCase, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEP_COMM_RAIL_NEAR", "0")
    find_fault(fault, case, expanded.run_case, expanded.verify)


@pytest.mark.parametrize("case", [RINGS, PLACES], ids=["rings", "direct"])
def test_the_same_runs_pass_without_a_fault(case: InternodeCase, way: str) -> None:
    pass_without_fault(case, expanded.run_case, expanded.verify, num_seeds=12)


@pytest.mark.parametrize("stalled", [0, 3])
def test_a_rank_that_stalls_for_a_while_changes_nothing(stalled: int, way: str) -> None:
    for seed in range(3):
        stalls = [(stalled, 300 * seed, 4000)]
        expanded.verify(PLACES, simulated(PLACES, expanded.run_case, seed, stalls=stalls))
