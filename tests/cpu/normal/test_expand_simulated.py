"""Expanded dispatches and combines under seeded schedules, with weak memory and late copies."""

import dataclasses
import random

import expanded
import pytest
from cases import Case
from schedules import POLICIES, find_fault, pass_without_fault, run_policy, run_seeds
from test_simulated_end_to_end import small_case

from deep_comm import simulate
from deep_comm.errors import PeerTimeout

NUM_FAULT_SEEDS = 60

pytestmark = pytest.mark.usefixtures("poison")


def expanded_case(seed: int) -> Case:
    choose = random.Random(seed + 77)
    return dataclasses.replace(
        small_case(seed),
        alignment=choose.choice((1, 2, 16)),
        nvl_bytes=1 << 20,
        # None at all, too little for most, enough.
        direct_bytes=choose.choice((0, 1 << 13, 1 << 19, 1 << 19)),
    )


def test_every_schedule_gives_the_same_bits() -> None:
    run_seeds(range(360), expanded_case, expanded.run_case, expanded.verify)


# Stages with room for a few pieces of a row.
RINGS = Case(
    (9, 6, 12), experts=6, topk=3, hidden=144, num_sms=2, slots=2, send_chunk=1, calls=2,
    nvl_bytes=1 << 20, direct_bytes=0, smem_bytes=9000, seed=2,
)  # fmt: skip
DIRECT = dataclasses.replace(RINGS, tokens=(19, 16, 22), hidden=48, direct_bytes=1 << 19)
# One block, a rank without tokens and one with a single one.
ONE_BLOCK = dataclasses.replace(DIRECT, tokens=(17, 0, 1), num_sms=1)
# Chunks of two tokens, the last of one.
MANY_TOKENS = dataclasses.replace(
    DIRECT, tokens=(2051, 3), topk=2, hidden=8, num_sms=4, calls=1, nvl_bytes=1 << 22
)


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (RINGS, "weaken_release"),
        (RINGS, "skip_credit"),
        (RINGS, "skip_bulk_wait"),
        (DIRECT, "weaken_release"),
        (DIRECT, "weaken_fence"),
        (DIRECT, "skip_bulk_wait"),
        (DIRECT, "skip_entry_barrier"),
        # Of the sums beside combine: it does not wait for its own rows; a chunk of several rows is
        # announced when the first one is complete; combine ends without them, or its rings begin;
        # words of the call before.
        (RINGS, "skip_launch_wait"),
        (DIRECT, "skip_sums"),
        (DIRECT, "early_sums"),
        (ONE_BLOCK, "skip_sums"),
        (DIRECT, "skip_launch_wait"),
        (DIRECT, "ignore_generation"),
        # Of the copies beside dispatch.
        (DIRECT, "early_landed"),
        (ONE_BLOCK, "early_landed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.usefixtures("poison")  # memory of the run before holds the sums that are missing here
def test_a_protocol_with_a_step_left_out_fails(case: Case, fault: str) -> None:
    find_fault(fault, case, expanded.run_case, expanded.verify, NUM_FAULT_SEEDS)


@pytest.mark.parametrize("case", [RINGS, DIRECT, ONE_BLOCK], ids=("rings", "direct", "one_block"))
def test_the_same_runs_pass_without_a_fault(case: Case) -> None:
    pass_without_fault(case, expanded.run_case, expanded.verify)


@pytest.mark.parametrize(
    ("tokens", "missing"), [((14, 0, 0), (1, 2)), ((14,), (0,))], ids=("peers", "own")
)
def test_sums_that_never_come_are_named(tokens: tuple[int, ...], missing: tuple[int, ...]) -> None:
    """Those of a peer first, then the own ones. Ranks without tokens miss nothing in this call."""
    case = dataclasses.replace(DIRECT, tokens=tokens)

    def one(group: simulate.SimulatedGroup) -> PeerTimeout:
        with pytest.raises(PeerTimeout) as caught:
            expanded.run_case(group, case)
        return caught.value

    for seed in range(4):
        first, *others = simulate.run(
            one, case.num_ranks, seed, faults=("lost_sums",), on_stuck="clock", timeout_s=120
        )
        assert (first.kernel, first.stage, first.word) == ("combine", "reduce", "landed")
        assert first.peer in missing
        assert all(error.peer == 0 for error in others)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", [ONE_BLOCK, MANY_TOKENS], ids=["one block", "many tokens"])
def test_rows_are_copied_while_others_land(case: Case, policy: str) -> None:
    run_policy(policy, case, expanded.run_case, expanded.verify)


@pytest.mark.parametrize("policy", POLICIES)
def test_behind_the_dispatch_the_same_bits(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_EARLY_LAUNCHES", "0")
    run_policy(policy, DIRECT, expanded.run_case, expanded.verify)
