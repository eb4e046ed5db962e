"""Low-latency calls go on without a rank that falls silent: at every stage, and with its return."""

from __future__ import annotations

import random

import forked
import pytest
import torch
from low_latency import LowLatencyCase, Pair, on_case, open_buffer
from low_latency_masks import (
    CLEAN,
    DEAD,
    STAGES,
    case_of,
    come_back_after_clean,
    mask_by_hand,
    masks_of,
    notices_late_rows,
    notices_shared_rows,
    notices_stop,
    send_late_after_change,
    send_rows_late,
    simulate_survivors,
    survive,
    verify_outcomes,
)
from schedules import some_of

import deep_comm
from deep_comm import ArgumentError, Buffer, local, simulate


@pytest.mark.parametrize("stage", STAGES)
def test_processes_go_on_when_one_is_killed(stage: str) -> None:
    case = case_of(weights_ahead=stage != "in dispatch")
    ended = forked.outcomes(survive, case.num_ranks, case, stage, timeout_s=200)
    verify_outcomes(case, ended, stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("variant", ["packed", "late", "compact", "one_rounding", "fp8"])
def test_every_schedule_goes_on_without_a_rank_that_leaves(stage: str, variant: str) -> None:
    case = case_of(
        weights_ahead=variant != "late", compact=variant == "compact",
        one_rounding=variant == "one_rounding", use_fp8=variant == "fp8", calls=4,
    )  # fmt: skip
    for seed in range(4):
        simulate_survivors(case, stage, seed)


def test_cleaning_is_a_barrier_that_masks_a_rank_that_leaves_before_it() -> None:
    for seed in range(4):
        simulate_survivors(case_of(calls=4), CLEAN, seed)


def stop(seed: int, faults: tuple[str, ...] = ()) -> str | None:
    """A rank stops at some step, every other time for good. What is wrong with the others."""
    choose = random.Random(seed)
    tokens = choose.choice(((3, 2, 4, 3), (3, 4), (1, 4, 2)))
    case = LowLatencyCase(
        tokens, 4, hidden=64, experts=2 * len(tokens) + 1, topk=3, calls=4, seed=seed,
        weights_ahead=seed % 2 == 1, one_rounding=seed % 3 == 0,
    )  # fmt: skip
    dead, step = choose.randrange(case.num_ranks), choose.randrange(200, 30_000 * case.num_ranks)
    num_steps = choose.choice((0, 0, 1000, 10_000))
    return notices_stop(case, dead, step, seed, faults, num_steps)


def test_a_rank_may_stop_at_any_step() -> None:
    for seed in some_of(range(160)):
        found = stop(seed)
        assert found is None, f"seed {seed}: {found}"


def test_simulation_finds_live_ranks_that_are_masked_for_waiting() -> None:
    found = (stop(seed, ("skip_alive",)) for seed in range(600))  # one in fifty does
    assert any(what is not None and "MaskedOut" in what for what in found)


def test_simulation_finds_blocks_that_do_not_agree() -> None:
    assert any(stop(seed, ("skip_agreement",)) for seed in range(120))


def come_late(seed: int, faults: tuple[str, ...] = ()) -> list:
    """A rank dispatches when the others have gone on without it: first what they had sent, then for
    ever. By rank: masks, or an error."""
    case = case_of(calls=2, mode="plain")

    def main(group: simulate.SimulatedGroup) -> list[int]:
        buffer = open_buffer(group, case, timeout_s=1000, enable_shrink=True)
        for is_late in (False, True):
            for call in range(case.calls) if is_late == (buffer.rank == DEAD) else ():
                Pair(buffer, case, call).dispatch()
            group.barrier()
        return masks_of(buffer)

    return list(simulate.run(main, 3, seed, on_stuck="clock", return_errors=True, faults=faults))


def test_a_vote_tells_a_rank_that_it_is_out() -> None:
    for seed in range(6):
        ended = come_late(seed)
        assert isinstance(ended[DEAD], deep_comm.MaskedOut), f"seed {seed}: {ended}"


def test_simulation_finds_a_vote_that_is_not_told() -> None:
    assert not isinstance(come_late(0, ("skip_vote",))[DEAD], deep_comm.MaskedOut)


def run_with_late_rows(seed: int, faults: tuple[str, ...] = ()) -> None:
    send_rows_late(seed, None, faults)


def test_rows_that_come_late_are_not_taken_for_those_of_another_rank() -> None:
    for seed in some_of(range(12)):
        run_with_late_rows(seed)


def test_simulation_finds_rows_that_are_taken_for_those_of_another_rank() -> None:
    assert any(notices_shared_rows(run_with_late_rows, seed) for seed in range(12))


@pytest.mark.parametrize("stage", ["in dispatch", "in combine"])
def test_what_comes_late_harms_no_other_shape(stage: str) -> None:
    for seed in some_of(range(16)):
        send_late_after_change(seed, stage, None)


def test_simulation_finds_places_that_depend_on_the_shape() -> None:
    assert any(notices_late_rows(seed, None) for seed in range(8))


def test_a_slow_rank_learns_that_it_is_out_and_comes_back_after_clean() -> None:
    come_back_after_clean(case_of(calls=2, tokens=(5, 4, 6)))


def test_masks_by_hand() -> None:
    mask_by_hand(case_of(calls=1, mode="plain"))


def test_masks_need_enable_shrink() -> None:
    def main(group: local.ThreadGroup) -> None:
        with pytest.raises(ArgumentError, match="enable_shrink"):
            Buffer(group, 1 << 20, device="cpu", enable_shrink=True)
        with Buffer(group, 0, 1 << 20, low_latency_mode=True, device="cpu") as buffer:
            for call in (
                lambda: buffer.low_latency_update_mask_buffer(0, True),
                lambda: buffer.low_latency_query_mask_buffer(torch.zeros(1, dtype=torch.int32)),
                buffer.low_latency_clean_mask_buffer,
            ):
                with pytest.raises(ArgumentError, match="enable_shrink"):
                    call()

    local.run(main, 1, timeout_s=60)


def test_without_masks_a_silent_rank_is_still_an_error() -> None:
    case = case_of(calls=1, mode="plain")

    def main(buffer: deep_comm.Buffer) -> None:
        if buffer.rank != DEAD:
            with pytest.raises(deep_comm.PeerTimeout) as caught:
                Pair(buffer, case, 0).dispatch()
            assert caught.value.peer == DEAD

    on_case(main, case, timeout_s=0.2)
