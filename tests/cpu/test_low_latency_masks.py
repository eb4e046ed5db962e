"""Low-latency calls go on without a rank that falls silent: at every stage, and with its return."""

from __future__ import annotations

import random
import threading
import time

import forked
import pytest
import torch
from low_latency import LowLatencyCase, Pair, expert_rows, inputs_of, open_buffer
from low_latency_masks import (
    DEAD,
    STAGES,
    case_of,
    masks_of,
    notices_stop,
    run_until,
    survive,
    verify_any_stop,
    verify_survivors,
)
from payload import assert_same_bits
from torch import Tensor

import deep_comm
from deep_comm import ArgumentError, Buffer, MaskedOut, local, simulate
from deep_comm import reference_low_latency as reference


@pytest.mark.parametrize("stage", STAGES)
def test_processes_go_on_when_one_is_killed(stage: str) -> None:
    case = case_of(weights_ahead=stage != "in dispatch")
    ended = forked.outcomes(survive, case.num_ranks, case, stage, timeout_s=200)
    for outcome in ended:
        if outcome.rank != DEAD:
            assert outcome.error is None, f"{outcome.error}\n{outcome.traceback}"
    verify_survivors(case, [outcome.value for outcome in ended], stage)


class Gone(Exception):
    """The rank ends here; its threads go on elsewhere."""


def leave() -> None:
    raise Gone


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("variant", ["packed", "late", "compact", "one_rounding", "fp8"])
def test_every_schedule_goes_on_without_a_rank_that_leaves(stage: str, variant: str) -> None:
    case = case_of(
        weights_ahead=variant != "late",
        compact=variant == "compact",
        one_rounding=variant == "one_rounding",
        use_fp8=variant == "fp8",
        calls=4,
    )

    def main(group: simulate.SimulatedGroup) -> list:
        buffer = Buffer(
            group, 0, case.num_bytes, low_latency_mode=True, device="cpu", timeout_s=1000,
            enable_shrink=True,
        )  # fmt: skip
        try:
            return run_until(buffer, case, stage, leave)
        except Gone:
            return []

    for seed in range(4):
        results = simulate.run(main, case.num_ranks, seed, on_stuck="clock", timeout_s=60)
        try:
            verify_survivors(case, list(results), stage)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


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


@pytest.mark.parametrize("first_seed", range(0, 160, 40))
def test_a_rank_may_stop_at_any_step(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 40):
        found = stop(seed)
        assert found is None, f"seed {seed}: {found}"


def test_simulation_finds_live_ranks_that_are_masked_for_waiting() -> None:
    found = (stop(seed, ("skip_alive",)) for seed in range(600))  # one in fifty does
    assert any(what is not None and "MaskedOut" in what for what in found)


def run_with_late_rows(seed: int, faults: tuple[str, ...] = ()) -> None:
    """A rank sends combine's rows two calls late, into the half that the others use next."""
    case = LowLatencyCase(
        (4, 3, 4, 2), 4, hidden=64, experts=9, topk=3, calls=5, mode="hook", weights_ahead=True,
        one_rounding=True, seed=seed,
    )  # fmt: skip
    late, masked_in = 3, 1

    def main(group: simulate.SimulatedGroup) -> list:
        buffer = open_buffer(group, case, timeout_s=1000, enable_shrink=True)
        results = []
        for call in range(case.calls):
            if call == masked_in + 2:
                group.barrier()  # now it sends
                group.barrier()
            pair = Pair(buffer, case, call)
            pair.dispatch()()
            if buffer.rank == late and call == masked_in:
                group.barrier()
                pair.combine()
                group.barrier()
                return []
            pair.combine()()
            results.append((pair.received(), masks_of(buffer)))
        return results

    results = simulate.run(main, 4, seed, on_stuck="clock", timeout_s=60, faults=faults)
    assert verify_any_stop(case, list(results), late) == case.calls - masked_in


def test_rows_that_come_late_are_not_taken_for_those_of_another_rank() -> None:
    for seed in range(12):
        run_with_late_rows(seed)


def test_simulation_finds_rows_that_are_taken_for_those_of_another_rank() -> None:
    def finds(seed: int) -> bool:
        try:
            run_with_late_rows(seed, ("shared_rows",))
        except AssertionError as error:
            return "combined_x" in str(error) or "masked rank" in str(error)
        return False

    assert any(finds(seed) for seed in range(12))


def test_a_slow_rank_learns_that_it_is_out_and_comes_back_after_clean() -> None:
    case = case_of(calls=2, tokens=(5, 4, 6))
    went_on = threading.Semaphore(0)

    def main(group: local.ThreadGroup) -> list:
        with Buffer(
            group, 0, case.num_bytes, low_latency_mode=True, device="cpu", timeout_s=2.0,
            enable_shrink=True,
        ) as buffer:  # fmt: skip
            results = []
            for number in range(6):
                pair = Pair(buffer, case, number % 2)
                if buffer.rank == DEAD and number == 1:
                    assert all(went_on.acquire(timeout=60) for _ in range(2))  # both others
                    with pytest.raises(MaskedOut):
                        for _ in range(2):
                            pair.dispatch()()
                            pair.combine()()
                    group.barrier()
                    buffer.low_latency_clean_mask_buffer()
                elif number < 3 and not (buffer.rank == DEAD and number == 2):
                    pair.dispatch()()
                    pair.combine()()
                    results.append(pair.received())
                if number == 2 and buffer.rank != DEAD:
                    went_on.release()
                    group.barrier()
                    buffer.low_latency_clean_mask_buffer()
                if number >= 3:
                    pair.dispatch()()
                    pair.combine()()
                    mask = torch.ones(3, dtype=torch.int32)
                    buffer.low_latency_query_mask_buffer(mask)
                    assert mask.tolist() == [0, 0, 0]
                    results.append(pair.received())
            return results[-3:]

    results = local.run(main, 3, timeout_s=120)
    for number, call in enumerate((1, 0, 1)):
        xs, idxs, weights = zip(*(inputs_of(case, r, call) for r in range(3)), strict=True)
        dispatched = reference.low_latency_dispatch(
            xs, idxs, case.max_tokens, case.experts, topk_weights=weights
        )
        rows = [expert_rows(case, rank, call) for rank in range(3)]
        combined = reference.low_latency_combine(rows, dispatched, weights)
        for rank in range(3):
            assert_same_bits(results[rank][number].combined_x, combined[rank], f"rank {rank}")


def test_masks_by_hand() -> None:
    case = case_of(calls=1, mode="plain")

    def main(group: local.ThreadGroup) -> Tensor | None:
        with Buffer(
            group, 0, case.num_bytes, low_latency_mode=True, device="cpu", timeout_s=20,
            enable_shrink=True,
        ) as buffer:  # fmt: skip
            for wrong in (buffer.rank, 3, -1, "1"):
                with pytest.raises(ArgumentError, match="rank_to_mask"):
                    buffer.low_latency_update_mask_buffer(wrong, True)
            with pytest.raises(ArgumentError, match="mask_status"):
                buffer.low_latency_query_mask_buffer(torch.zeros(3))
            status = torch.zeros(3, dtype=torch.int32)
            if buffer.rank == DEAD:
                return None
            buffer.low_latency_update_mask_buffer(DEAD, True)
            buffer.low_latency_query_mask_buffer(status)
            assert status.tolist() == [0, 1, 0]
            started = time.monotonic()
            pair = Pair(buffer, case, 0)
            pair.dispatch()
            pair.combine()
            assert time.monotonic() - started < 10, "nobody is waited for"
            buffer.low_latency_update_mask_buffer(DEAD, False)
            buffer.low_latency_query_mask_buffer(status)
            assert status.tolist() == [0, 0, 0]
            return pair.combined_x

    combined = local.run(main, 3, timeout_s=60)
    assert combined[0] is not None and combined[2] is not None


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

    def main(group: local.ThreadGroup) -> None:
        with Buffer(
            group, 0, case.num_bytes, low_latency_mode=True, device="cpu", timeout_s=0.2
        ) as buffer:
            if buffer.rank != DEAD:
                with pytest.raises(deep_comm.PeerTimeout) as caught:
                    Pair(buffer, case, 0).dispatch()
                assert caught.value.peer == DEAD

    local.run(main, 3, timeout_s=60)
