"""Low-latency pairs under seeded schedules, inside a node and between nodes: weak memory, late and
reordered puts; and with steps left out.
"""

import dataclasses
import random

import pytest
import schedules
from low_latency import (
    LowLatencyCase,
    Pair,
    Range,
    found_in_dispatches,
    open_buffer,
    run_case,
    run_pairs,
    verify,
)
from schedules import POLICIES, run_policy, run_seeds

from deep_comm import PeerTimeout, simulate
from deep_comm.settings import env

SHAPES = [(2, 2), (2, 4), (4, 2), (3, 3), (8, 1), (2, 1), (2, 2), (3, 2)]

pytestmark = pytest.mark.usefixtures("poison")


def node_case(seed: int) -> LowLatencyCase:
    few = Range(
        max_tokens=(1, 3, 5), hidden=(8, 32, 1024), hidden_fp8=(128,), experts=(2, 5, 8),
        topk=(1, 2, 4), modes=("plain", "hook", "late"),
    )  # fmt: skip
    choose = random.Random(seed)
    num_ranks = choose.choice((1, 2, 2, 3, 4))
    return few.draw(choose, num_ranks, calls=choose.choice((2, 4)), seed=seed)


def nodes_case(seed: int) -> LowLatencyCase:
    few = Range(
        max_tokens=(1, 3, 5), hidden=(8, 32, 520), hidden_fp8=(128, 640), experts=(3,),
        topk=(1, 2, 4), modes=("plain", "hook", "late"),
    )  # fmt: skip
    choose = random.Random(seed)
    num_nodes, ranks_per_node = SHAPES[seed % len(SHAPES)]
    num_ranks = num_nodes * ranks_per_node
    return few.draw(
        choose,
        num_ranks,
        experts=choose.choice((3, num_ranks, 2 * num_ranks + 1)),
        calls=choose.choice((2, 4)),
        ranks_per_node=ranks_per_node,
        num_qps=choose.choice((1, 2, 5)),
        hand_on=choose.choice((0, 0, 3, 100)),  # ranks may decide differently
        seed=seed,
    )


SEEDS = {"node": range(250), "put": range(200), "stored": range(1000, 1080)}


def test_every_schedule_gives_the_same_bits(tier: str) -> None:
    case_of = node_case if tier == "node" else nodes_case
    run_seeds(SEEDS[tier], case_of, run_case, verify)


EIGHT = LowLatencyCase((3, 0, 2, 4, 1, 4, 2, 3), 4, hidden=128, experts=19, topk=3, use_fp8=True)
OF_POLICIES = {
    "node": EIGHT,
    "put": dataclasses.replace(EIGHT, ranks_per_node=4),
    "stored": LowLatencyCase(
        (3, 0, 2, 4), 4, hidden=128, experts=7, topk=3, use_fp8=True, ranks_per_node=2, hand_on=1
    ),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_the_same_bits(policy: str, tier: str) -> None:
    run_policy(policy, OF_POLICIES[tier], run_case, verify)


def test_sixty_four_ranks_of_eight_nodes() -> None:
    case = LowLatencyCase(
        (2,) * 63 + (0,), 2, hidden=16, experts=130, topk=4, ranks_per_node=8, num_qps=2, calls=3,
        hand_on=1,
    )  # fmt: skip
    verify(case, simulate.run(lambda group: run_case(group, case), 64, 1, timeout_s=300))


# ---- faults -------------------------------------------------------------------------------------

# Some pairs with a stalled rank: a half is used again while somebody may still read it.
NODE = LowLatencyCase((3, 5, 4), 5, hidden=64, experts=6, calls=6, weights_ahead=True)
NODES = LowLatencyCase(
    (3, 5, 4, 2), 5, hidden=64, experts=8, topk=4, calls=6, ranks_per_node=2, num_qps=3, hand_on=4
)
CASES = {"node": NODE, "put": NODES, "stored": NODES}


def notices(case: LowLatencyCase, seed: int, faults: tuple[str, ...] = ()) -> str | None:
    """How the run with these faults fails, or None if it does not."""
    stalls = [(seed % case.num_ranks, 500 + 137 * seed, 4000)]
    return schedules.notices(case, run_case, verify, seed, faults, stalls=stalls)


@pytest.mark.parametrize(
    ("tier", "fault", "num_seeds"),
    [
        # There is no release behind the payload that could be missing: every word says of itself
        # that it has come, if it is awaited, and if its place was zero before.
        ("node", "skip_arrival", 40),  # words are taken before they have come
        ("node", "skip_clear", 40),  # and stay where they are
        ("node", "ignore_generation", 20),  # words of an earlier operation are taken for this one's
        ("put", "skip_arrival", 60),
        ("put", "skip_clear", 60),
        ("put", "skip_rail_fence", 60),  # the NIC reads staging whose stores it cannot see yet
        ("put", "ignore_generation", 60),
        ("stored", "skip_arrival", 60),
        ("stored", "skip_clear", 60),
    ],
    indirect=["tier"],
)
def test_simulation_finds_the_fault(tier: str, fault: str, num_seeds: int) -> None:
    assert any(notices(CASES[tier], seed, (fault,)) for seed in range(num_seeds))


@pytest.mark.parametrize(
    ("tier", "faults"),
    [
        ("node", ()),
        ("put", ()),
        # A signal that overtakes the puts before it, which the rail otherwise never lets happen.
        ("put", ("reorder_rail",)),
        # Nothing is put: no NIC has to see what is staged.
        ("stored", ("skip_rail_fence",)),
    ],
    indirect=["tier"],
)
def test_the_same_runs_pass_without_a_fault_or_with_one_that_does_no_harm(
    tier: str, faults: tuple[str, ...]
) -> None:
    for seed in range(12):
        found = notices(CASES[tier], seed, faults)
        assert found is None, f"seed {seed}: {found}"


def test_simulation_finds_a_word_that_travels_as_a_zero() -> None:
    """x[1] has a block of zeros: a reader waits for ever for what looks like nothing."""
    case = LowLatencyCase((3, 2), 3, hidden=128, ranks_per_node=1, calls=1)
    found = notices(case, 1, ("plain_words",))
    assert found is not None and found.startswith("SimulationStuck"), found


TWO_IN_FLIGHT = LowLatencyCase((4, 4), 4, hidden=64, experts=4, mode="late")
BETWEEN_NODES = dataclasses.replace(TWO_IN_FLIGHT, ranks_per_node=1)


@pytest.mark.parametrize(
    ("tier", "fault"),
    [
        ("node", "skip_credit"),
        ("node", "early_credit"),
        ("put", "skip_rail_credit"),
        ("put", "early_rail_credit"),
        ("stored", "skip_rail_credit"),
    ],
    indirect=["tier"],
)
def test_simulation_finds_halves_and_staging_that_are_used_too_early(tier: str, fault: str) -> None:
    case = TWO_IN_FLIGHT if tier == "node" else BETWEEN_NODES
    assert any(found_in_dispatches(case, seed, (fault,)) for seed in range(60))


@pytest.mark.parametrize(("case", "num_seeds"), [(TWO_IN_FLIGHT, 60), (BETWEEN_NODES, 20)])
def test_dispatches_without_combines_pass_without_a_fault(
    case: LowLatencyCase, num_seeds: int
) -> None:
    # Without the credit's acquire seeds 37 and 42 fail inside a node.
    for seed in range(num_seeds):
        found = found_in_dispatches(case, seed, ())
        assert found is None, f"seed {seed}: {found}"


# Rows of dispatch go through a stage in shared memory where a block has no more than one: whole
# ones, and strips of columns; (5) is more than there are blocks.
STAGED = LowLatencyCase((3, 5, 2), 5, hidden=1024, experts=6, use_fp8=True, calls=3)
STRIPS = LowLatencyCase((1, 0, 1), 1, hidden=1024, experts=6, use_fp8=True, calls=3)


@pytest.mark.parametrize("use_fp8", [False, True])
@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_staged_rows_arrive(
    num_blocks: int, use_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.NUM_SMS.name, str(num_blocks))
    for case in (STAGED, STRIPS):
        for seed in range(3):
            found = notices(dataclasses.replace(case, use_fp8=use_fp8), seed)
            assert found is None, f"seed {seed}: {found}"


def test_simulation_finds_a_stage_that_goes_while_it_is_read() -> None:
    assert any(notices(STAGED, seed, ("skip_bulk_wait_read",)) for seed in range(20))


@pytest.mark.parametrize(
    "case",
    [
        # A block counts 256: its share begins behind the first batch, or in the middle of the
        # second.
        LowLatencyCase((70, 3), 70, hidden=8, experts=24, topk=8, calls=1),
        # Between nodes two warps count them, and two entries of a lane name ranks to forward to.
        LowLatencyCase(
            (2, 1, 2, 1, 2, 1, 2, 1), 2, hidden=8, experts=80, topk=40, routing="skewed",
            hand_on=1, ranks_per_node=4,
        ),
    ],
    ids=["of a block", "of a token"],
)  # fmt: skip
def test_more_selections_than_are_counted_at_once(case: LowLatencyCase) -> None:
    schedules.pass_without_fault(case, run_case, verify, 3)


# ---- ranks that stay away -----------------------------------------------------------------------


@pytest.mark.parametrize("silent", [1, 2])
@pytest.mark.parametrize(
    ("ranks_per_node", "stage"), [(None, "dispatch"), (2, "dispatch"), (2, "combine")]
)
def test_a_rank_that_stays_away_is_named_on_all_nodes(
    ranks_per_node: int | None, stage: str, silent: int
) -> None:
    case = LowLatencyCase((3,) * 6, 4, experts=6, topk=4, ranks_per_node=ranks_per_node)

    def main(group: simulate.SimulatedGroup) -> None:
        buffer = open_buffer(group, case, timeout_s=1000)
        pair = Pair(buffer, case, 0)
        if stage == "combine":
            pair.dispatch()
        if group.rank() != silent:
            getattr(pair, stage)()

    for seed in range(6):
        errors = simulate.run(main, 6, seed=seed, on_stuck="clock", return_errors=True)
        assert errors[silent] is None
        for rank, error in enumerate(errors):
            if rank == silent:
                continue
            assert isinstance(error, PeerTimeout)
            assert error.peer == silent, f"rank {rank} seed {seed}: {error}"
            assert error.kernel == f"low_latency_{stage}" and error.rank == rank


def test_a_reset_after_a_timeout_makes_the_group_usable_again() -> None:
    case = LowLatencyCase((3, 2, 4, 1), 4, hidden=64, ranks_per_node=2, calls=3)

    def main(group: simulate.SimulatedGroup) -> list:
        with open_buffer(group, case, timeout_s=1000) as buffer:
            pair = Pair(buffer, case, 0)
            pair.dispatch()
            if buffer.rank != 3:
                with pytest.raises(PeerTimeout):
                    pair.combine()
            buffer.reset()
            return run_pairs(buffer, case)

    for seed in range(6):
        verify(case, simulate.run(main, 4, seed=seed, on_stuck="clock"))
