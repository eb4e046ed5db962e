"""Two tiers under seeded schedules: late and reordered puts, weak memory; and
faults that must be found.
"""

import dataclasses
import random

import pytest
import torch
from cases import ROUTINGS, InternodeCase, Scales
from roundtrip import run_case, verify
from schedules import find_fault, pass_without_fault, run_seeds, simulated

SHAPES = [(2, 2), (2, 4), (4, 2), (3, 3), (8, 1), (2, 1), (3, 2)]

pytestmark = pytest.mark.usefixtures("poison")


def small_case(seed: int) -> InternodeCase:
    choose = random.Random(seed)
    num_nodes, ranks_per_node = SHAPES[seed % len(SHAPES)]
    num_ranks = num_nodes * ranks_per_node
    slots, rail_slots = choose.choice((1, 2, 3)), choose.choice((2, 3, 5))
    return InternodeCase(
        tuple(choose.choice((0, 1, 3, 6, 9)) for _ in range(num_ranks)),
        hidden=choose.choice((16, 32, 48)), experts=choose.choice((num_ranks, 2 * num_ranks + 1)),
        topk=choose.choice((1, 2, 4)), dtype=choose.choice((torch.bfloat16, torch.uint8)),
        scales=choose.choice((None, None, Scales(3, torch.float32, "column"))),
        routing=choose.choice(ROUTINGS), num_sms=choose.choice((2, 2, 4)),
        send_chunk=choose.randint(1, slots), slots=slots,
        rail_chunk=choose.randint(1, rail_slots // 2), rail_slots=rail_slots,
        num_qps=choose.choice((1, 2, 5)), worst=choose.choice((0, 0, 2)),
        biases=choose.choice((0, 1)), fused_layout=choose.choice((False, True)),
        calls=choose.choice((1, 2)), nvl_bytes=1 << 17, rdma_bytes=1 << 18,
        ranks_per_node=ranks_per_node, seed=seed,
    )  # fmt: skip


def test_every_schedule_gives_the_same_bits() -> None:
    run_seeds(range(240), small_case, run_case, verify)


@pytest.mark.parametrize("seed", range(6))
def test_full_rings_on_both_tiers(seed: int) -> None:
    """Enough rows for every role to wait for credit; small cases end before that. Of three slots
    each is filled by combine's two reducing warps in turn.
    """
    case = InternodeCase(
        (40,) * 6, hidden=32, experts=12, topk=4, num_sms=4, send_chunk=1, slots=2, rail_chunk=1,
        rail_slots=2 + seed % 2, nvl_bytes=1 << 18, rdma_bytes=1 << 18, seed=seed,
        ranks_per_node=(2, 3, 1)[seed % 3],
    )  # fmt: skip
    verify(case, simulated(case, run_case, seed))


def test_counts_of_more_experts_than_a_warp_has_lanes() -> None:
    """And of tokens that two blocks count, each of other experts."""
    case = InternodeCase(
        (16, 9, 12, 5), hidden=16, experts=160, topk=3, num_sms=2, slots=4, send_chunk=2,
        rail_slots=4, rail_chunk=2, nvl_bytes=1 << 18, rdma_bytes=1 << 18, ranks_per_node=2,
    )  # fmt: skip
    run_seeds(range(4), lambda seed: dataclasses.replace(case, seed=seed), run_case, verify)


def test_rows_stored_into_near_nodes_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stores reach the other nodes (NVLink between them), nothing is put: the
    orders that hold are others.
    """
    monkeypatch.setenv("DEEP_COMM_RAIL_NEAR", "1")
    run_seeds(range(1000, 1080), small_case, run_case, verify)


def halves_of(case: InternodeCase, seed: int) -> InternodeCase:
    """The same with rows that are too long for a stage in shared memory."""
    return dataclasses.replace(
        case, hidden=512, nvl_bytes=1 << 21, direct_bytes=1 << 20, rdma_bytes=1 << 21,
        smem_bytes=12000, seed=seed,
    )  # fmt: skip


# Rings of two slots, several calls and unequal ranks give each fault a chance.
FAULTY = InternodeCase(
    (9, 6, 12, 5), experts=4, topk=3, hidden=48, num_sms=2, slots=2, send_chunk=1, calls=2,
    rail_slots=2, rail_chunk=1, nvl_bytes=1 << 17, rdma_bytes=1 << 18, ranks_per_node=2,
)  # fmt: skip
FAULTS = [
    "reorder_rail",  # a signal overtakes the rows before it
    "skip_rail_credit",  # slots are filled again before they have been read
    "early_rail_credit",  # credits go back before the reads
    "skip_rail_fence",  # the NIC reads slots whose stores it cannot see yet
    "skip_entry_barrier",  # a kernel writes where peers still run the one before
    "ignore_generation",  # words of the kernel before are taken for this one's
    "weaken_release",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_simulation_finds_the_fault(fault: str) -> None:
    find_fault(fault, FAULTY, run_case, verify)


@pytest.mark.parametrize(
    "fault", ["skip_rail_credit", "early_rail_credit", "skip_entry_barrier", "weaken_release"]
)
def test_simulation_finds_the_fault_between_near_nodes(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEP_COMM_RAIL_NEAR", "1")
    find_fault(fault, FAULTY, run_case, verify)


def test_the_same_runs_pass_without_a_fault() -> None:
    pass_without_fault(FAULTY, run_case, verify)


@pytest.mark.parametrize("stalled", [0, 1, 2, 3])
def test_a_rank_that_stalls_for_a_while_changes_nothing(stalled: int) -> None:
    for seed in range(3):
        results = simulated(FAULTY, run_case, seed, stalls=[(stalled, 300 * seed, 4000)])
        verify(FAULTY, results)
