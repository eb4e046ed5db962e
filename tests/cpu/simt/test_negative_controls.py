"""A protocol with a step left out must fail under simulation, or the simulation proves nothing.

Each fault is a switch of the simulated machine (csrc/device/arch/arch.cuh, `Fault`). Some seed
among the first few must find it: as wrong bytes, a broken rule of the machine, or a run without
progress.

`weaken_fence`: the publishers' fence makes tails, heads and landed chunks releases. In the case
"direct" that is staged combine's, since direct dispatch has no fence beside its releases.
"""

import pytest
from cases import Case
from roundtrip import run_case, verify
from schedules import find_fault, pass_without_fault

NUM_SEEDS = 60

# Rings of two slots, few stages, several calls and a rank that works ahead of the others give each
# fault a chance.
CASES = {
    "rings": Case(
        (9, 6, 12), experts=6, topk=2, hidden=512, num_sms=1, slots=2, send_chunk=1, calls=2,
        nvl_bytes=1 << 18, smem_bytes=9168,
    ),
    "two_ranks": Case(
        (40, 33), experts=4, topk=2, hidden=64, num_sms=1, slots=8, send_chunk=1, calls=2,
        nvl_bytes=1 << 18,
    ),
    "direct": Case(
        (19, 16, 22), experts=6, topk=2, hidden=48, num_sms=1, slots=2, send_chunk=1, calls=2,
        nvl_bytes=1 << 20, direct_bytes=1 << 19, smem_bytes=9168,
    ),
    # Staged combine with a block that only adds.
    "three_blocks": Case(
        (19, 16, 22), experts=6, topk=2, hidden=48, num_sms=3, slots=2, send_chunk=1, calls=2,
        nvl_bytes=1 << 20, direct_bytes=1 << 19, smem_bytes=9168,
    ),
}  # fmt: skip

FAULTS = [
    ("rings", "weaken_release"), ("rings", "weaken_fence"), ("rings", "skip_credit"),
    ("rings", "skip_bulk_wait"), ("rings", "skip_bulk_wait_read"), ("rings", "skip_entry_barrier"),
    ("rings", "early_credit"), ("rings", "ignore_generation"), ("two_ranks", "weaken_release"),
    ("two_ranks", "weaken_fence"), ("two_ranks", "skip_credit"), ("two_ranks", "early_credit"),
    ("two_ranks", "skip_bulk_wait"), ("two_ranks", "skip_bulk_wait_read"),
    ("direct", "ignore_generation"),
    ("direct", "skip_exit_barrier"), ("direct", "weaken_release"), ("direct", "weaken_fence"),
    ("direct", "skip_bulk_wait"), ("direct", "skip_bulk_wait_read"),
    ("direct", "skip_entry_barrier"), ("three_blocks", "weaken_release"),
    ("three_blocks", "weaken_fence"), ("three_blocks", "skip_bulk_wait"),
    ("three_blocks", "skip_bulk_wait_read"), ("three_blocks", "skip_entry_barrier"),
    ("three_blocks", "skip_credit"), ("three_blocks", "early_generation"),
]  # fmt: skip

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize(("mode", "fault"), FAULTS)
def test_simulation_finds_the_fault(mode: str, fault: str) -> None:
    find_fault(fault, CASES[mode], run_case, verify, NUM_SEEDS)


@pytest.mark.parametrize("mode", CASES)
def test_the_same_runs_pass_without_a_fault(mode: str) -> None:
    pass_without_fault(CASES[mode], run_case, verify)
