"""Low-latency pairs under seeded schedules with weak memory, and with steps left out."""

import dataclasses
import random

import pytest
import schedules
import torch
from low_latency import LowLatencyCase, Range, found_in_dispatches, open_buffer, run_case, verify
from schedules import POLICIES, run_policy, run_seeds

from deep_comm import PeerTimeout, simulate
from deep_comm.settings import env

pytestmark = pytest.mark.usefixtures("poison")


RANGE = Range(
    max_tokens=(1, 3, 5), hidden=(8, 32, 1024), hidden_fp8=(128,), experts=(2, 5, 8),
    topk=(1, 2, 4), modes=("plain", "hook", "late"),
)  # fmt: skip


def small_case(seed: int) -> LowLatencyCase:
    choose = random.Random(seed)
    num_ranks = choose.choice((1, 2, 2, 3, 4))
    return RANGE.draw(choose, num_ranks, calls=choose.choice((2, 4)), seed=seed)


def test_every_schedule_gives_the_same_bits() -> None:
    run_seeds(range(250), small_case, run_case, verify)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_eight_ranks(policy: str) -> None:
    case = LowLatencyCase((3, 0, 2, 4, 1, 4, 2, 3), 4, hidden=128, experts=19, topk=3, use_fp8=True)
    run_policy(policy, case, run_case, verify)


# Five pairs with a stalled rank: a half is used again while somebody may still read it.
CASE = LowLatencyCase((3, 5, 4), 5, hidden=64, experts=6, calls=6, weights_ahead=True)


def notices(seed: int, faults: tuple[str, ...], case: LowLatencyCase) -> str | None:
    stalls = [(seed % 3, 500 + 137 * seed, 4000)]
    return schedules.notices(case, run_case, verify, seed, faults, stalls=stalls)


@pytest.mark.parametrize("fault", ["skip_arrival", "skip_clear"])
def test_simulation_finds_words_that_are_read_early_or_left_behind(fault: str) -> None:
    """There is no release behind the payload that could be missing: every word says of itself that
    it has come, if it is awaited, and if its place was zero before."""
    assert any(notices(seed, (fault,), CASE) for seed in range(40))


TWO_IN_FLIGHT = LowLatencyCase((4, 4), 4, hidden=64, experts=4, mode="late")


@pytest.mark.parametrize("fault", ["skip_credit", "early_credit"])
def test_simulation_finds_a_half_that_is_used_too_early(fault: str) -> None:
    assert any(found_in_dispatches(TWO_IN_FLIGHT, seed, (fault,)) for seed in range(60))


def test_simulation_finds_words_of_an_earlier_operation() -> None:
    assert any(notices(seed, ("ignore_generation",), CASE) for seed in range(20))


def test_dispatches_without_combines_pass_without_a_fault() -> None:
    # Without the credit's acquire seeds 37 and 42 fail.
    for seed in range(60):
        found = found_in_dispatches(TWO_IN_FLIGHT, seed, ())
        assert found is None, f"seed {seed}: {found}"


def test_the_same_runs_pass_without_a_fault() -> None:
    for seed in range(10):
        found = notices(seed, (), CASE)
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
            found = notices(seed, (), dataclasses.replace(case, use_fp8=use_fp8))
            assert found is None, f"seed {seed}: {found}"


def test_simulation_finds_a_stage_that_goes_while_it_is_read() -> None:
    assert any(notices(seed, ("skip_bulk_wait_read",), STAGED) for seed in range(20))


def test_more_selections_than_a_block_counts_at_once() -> None:
    """It counts 256: its share begins behind the first batch, or in the middle of the second."""
    case = LowLatencyCase((70, 3), 70, hidden=8, experts=24, topk=8, calls=1)
    for seed in range(3):
        found = schedules.notices(case, run_case, verify, seed)
        assert found is None, f"seed {seed}: {found}"


def test_a_rank_that_stays_away_is_named_in_virtual_time() -> None:
    case = LowLatencyCase((3, 3, 3), 4)

    def main(group: simulate.SimulatedGroup) -> None:
        buffer = open_buffer(group, case, timeout_s=1000)
        if group.rank() != 1:
            x, idx = torch.zeros(2, 128, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64)
            buffer.low_latency_dispatch(x, idx, 4, 3, use_fp8=False)

    errors = simulate.run(main, 3, seed=3, on_stuck="clock", return_errors=True)
    assert errors[1] is None
    for error in (errors[0], errors[2]):
        assert isinstance(error, PeerTimeout)
        assert error.peer == 1 and error.kernel == "low_latency_dispatch"
