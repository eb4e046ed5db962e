"""Low-latency calls go on without ranks that fall silent, inside a node and between nodes: one or a
whole node, at every stage, in the middle of a kernel, behind a NIC that stands still; and with
their return.
"""

from __future__ import annotations

import random
from typing import Any

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
    verify_any_stop,
    verify_outcomes,
)
from run_by import run_by
from schedules import some_of

import deep_comm
from deep_comm import (
    ArgumentError,
    Buffer,
    CallInterrupted,
    MaskedOut,
    PeerLost,
    local,
    simulate,
)

# Ranks that fall silent, in nodes of two.
ONE, NODE = (DEAD,), (2, 3)
VARIANTS = ("packed", "late", "compact", "one_rounding", "fp8")


not_stored = pytest.mark.parametrize("tier", ["node", "put"], indirect=True)


def nodes_case(**changes: Any) -> LowLatencyCase:
    settings = dict(
        tokens=(5, 4, 6, 3), experts=13, topk=4, ranks_per_node=2, num_qps=3,
        hand_on=1,  # which no call with masks does
    )  # fmt: skip
    return case_of(**{**settings, **changes})


def case_in(tier: str, **changes: Any) -> LowLatencyCase:
    return case_of(**changes) if tier == "node" else nodes_case(**changes)


@not_stored
@pytest.mark.parametrize("stage", STAGES)
def test_processes_go_on_when_some_are_killed(stage: str, tier: str) -> None:
    case = case_in(tier, weights_ahead=stage != "in dispatch")
    dead = NODE if tier != "node" and STAGES.index(stage) % 2 else ONE
    ended = forked.outcomes(survive, case.num_ranks, case, stage, False, dead, timeout_s=90)
    verify_outcomes(case, ended, stage, dead)


def leave(tier: str, stage: str, variant: str, seed: int) -> None:
    """One schedule of a shape from which ranks leave at that stage."""
    options: dict[str, Any] = dict(
        weights_ahead=variant != "late", compact=variant == "compact",
        one_rounding=variant == "one_rounding", use_fp8=variant == "fp8", calls=4,
    )  # fmt: skip
    dead = ONE
    if tier != "node":
        shapes = (((5, 4, 6, 3), 2), ((3, 4), 1), ((2, 3, 1, 4, 0, 2), 3))
        tokens, per_node = shapes[seed % len(shapes)]
        options.update(
            tokens=tokens, ranks_per_node=per_node, experts=2 * len(tokens) + 1, topk=3, seed=seed
        )
        dead = ONE if len(tokens) == 2 or seed % 2 == 0 else tuple(range(per_node))
    simulate_survivors(case_in(tier, **options), stage, seed, dead)


@not_stored
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_schedule_goes_on_without_ranks_that_leave(
    stage: str, variant: str, tier: str
) -> None:
    for seed in some_of(range(4 if tier == "node" else 8)):
        leave(tier, stage, variant, seed)


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("stage", STAGES)
def test_every_schedule_goes_on_without_ranks_whose_stores_reached(stage: str) -> None:
    for seed in range(2 * len(VARIANTS)):
        leave("stored", stage, VARIANTS[seed % len(VARIANTS)], seed)


@not_stored
def test_cleaning_is_a_barrier_that_masks_ranks_that_leave_before_it(tier: str) -> None:
    for seed in range(4):
        leave(tier, CLEAN, "late" if tier == "node" else "packed", seed)


# ---- a rank that stops at any step --------------------------------------------------------------


def stop(tier: str, seed: int, faults: tuple[str, ...] = ()) -> str | None:
    """A rank stops at some step; inside a node every other time for a while only. What is wrong
    with the others."""
    choose = random.Random(seed)
    more: dict[str, Any] = dict(one_rounding=seed % 3 == 0)
    if tier == "node":
        tokens = choose.choice(((3, 2, 4, 3), (3, 4), (1, 4, 2)))
    else:
        tokens, per_node = choose.choice((((3, 2, 4, 3), 2), ((3, 2, 4, 3), 1), ((1, 4, 2), 1)))
        more = dict(ranks_per_node=per_node, num_qps=3)
    case = LowLatencyCase(
        tokens, 4, hidden=64, experts=2 * len(tokens) + 1, topk=3, calls=4, seed=seed,
        weights_ahead=seed % 2 == 1, **more,
    )  # fmt: skip
    last_step = (30_000 if tier == "node" else 60_000) * case.num_ranks
    dead, step = choose.randrange(case.num_ranks), choose.randrange(200, last_step)
    num_steps = choose.choice((0, 0, 1000, 10_000)) if tier == "node" else 0
    return notices_stop(case, dead, step, seed, faults, num_steps)


def test_a_rank_may_stop_at_any_step(tier: str) -> None:
    for seed in some_of(range(160)):
        found = stop(tier, seed)
        assert found is None, f"seed {seed}: {found}"


@not_stored
def test_simulation_finds_live_ranks_that_are_masked_for_waiting(tier: str) -> None:
    num_seeds = 600 if tier == "node" else 160  # inside a node one in fifty does
    found = (stop(tier, seed, ("skip_alive",)) for seed in range(num_seeds))
    assert any(what is not None and "MaskedOut" in what for what in found)


def test_simulation_finds_blocks_that_do_not_agree(tier: str) -> None:
    num_seeds = 120 if tier == "node" else 60
    assert any(stop(tier, seed, ("skip_agreement",)) for seed in range(num_seeds))


# ---- ranks that are told by a vote --------------------------------------------------------------


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
        assert isinstance(ended[DEAD], MaskedOut), f"seed {seed}: {ended}"


def stall_nics(seed: int, stalled: tuple[int, ...], faults: tuple[str, ...] = ()) -> list:
    """Two pairs of calls; before the second these ranks' NICs stop. By rank: masks, or an error."""
    case = LowLatencyCase((3, 2, 4, 3), 4, hidden=64, topk=4, ranks_per_node=2, num_qps=2)

    def main(group: simulate.SimulatedGroup) -> list[int]:
        buffer = open_buffer(group, case, timeout_s=1000, enable_shrink=True)
        for call in (0, 1, 0, 1):
            if call == 1 and buffer.rank in stalled:
                group.simulation.stall_rail(buffer.rank)
            pair = Pair(buffer, case, call)
            pair.dispatch()
            pair.combine()
        return masks_of(buffer)

    return list(
        simulate.run(
            main, 4, seed, on_stuck="clock", timeout_s=60, return_errors=True, faults=faults
        )
    )


def test_a_rank_whose_nic_stands_still_is_masked_on_both_nodes() -> None:
    for seed in some_of(range(10)):
        ended = stall_nics(seed, (1,))
        assert isinstance(ended[1], MaskedOut), f"seed {seed}: {ended}"
        assert [ended[rank] for rank in (0, 2, 3)] == [[0, 1, 0, 0]] * 3, f"seed {seed}: {ended}"


def test_nodes_that_hear_nothing_of_each_other_go_on_by_themselves() -> None:
    for seed in range(6):
        ended = stall_nics(seed, (0, 1, 2, 3))
        assert ended == [[0, 0, 1, 1]] * 2 + [[1, 1, 0, 0]] * 2, f"seed {seed}: {ended}"


def test_simulation_finds_a_vote_that_is_not_told() -> None:
    assert not isinstance(come_late(0, ("skip_vote",))[DEAD], MaskedOut)
    ended = stall_nics(0, (1,), ("skip_vote",))
    assert not isinstance(ended[1], MaskedOut) or ended[0] != [0, 1, 0, 0], ended


# ---- rows that come late ------------------------------------------------------------------------


def put_rows_late(seed: int, faults: tuple[str, ...] = ()) -> None:
    """Combine's rows of rank 3 stay in its NIC until the others have gone on for two calls."""
    late = 3
    case = LowLatencyCase(
        (4, 3, 4, 2), 4, hidden=64, experts=9, topk=3, calls=6, ranks_per_node=2, num_qps=2,
        mode="hook", weights_ahead=True, seed=seed,
    )  # fmt: skip

    def main(group: simulate.SimulatedGroup) -> list:
        buffer = open_buffer(group, case, timeout_s=1000, enable_shrink=True)
        results = []
        for call in range(case.calls):
            if call == 2 or (call == 1 and buffer.rank == late):
                group.barrier()
                if buffer.rank == late:
                    buffer.runtime.quiet_rail()
                group.barrier()
            if buffer.rank == late and call == 1:
                return []
            pair = Pair(buffer, case, call)
            pair.dispatch()()
            if buffer.rank == late:
                group.simulation.stall_rail(late)
                pair.combine()  # sends
            else:
                pair.combine()()
                results.append((pair.received(), masks_of(buffer)))
        return results

    results = simulate.run(main, 4, seed, on_stuck="clock", timeout_s=60, faults=faults)
    assert verify_any_stop([case] * case.calls, list(results), late) == case.calls - 1


# Combine's rows of a rank, which sends them when the others have gone on; of those that are stored,
# to the same node or to the other.
LATE_ROWS = {
    "node": lambda seed, faults=(): send_rows_late(seed, None, faults),
    "put": put_rows_late,
    "stored": lambda seed, faults=(): send_rows_late(seed, 1 + seed % 2, faults),
}


def test_rows_that_come_late_are_not_taken_for_those_of_another_rank(tier: str) -> None:
    for seed in some_of(range(12)):
        LATE_ROWS[tier](seed)


def test_simulation_finds_rows_that_are_taken_for_those_of_another_rank(tier: str) -> None:
    assert any(notices_shared_rows(LATE_ROWS[tier], seed) for seed in range(12))


@pytest.mark.parametrize("stage", ["in dispatch", "in combine"])
def test_what_comes_late_harms_no_other_shape(stage: str, tier: str) -> None:
    for seed in some_of(range(16)):
        send_late_after_change(seed, stage, None if tier == "node" else 2)


def test_simulation_finds_places_that_depend_on_the_shape(tier: str) -> None:
    assert any(notices_late_rows(seed, None if tier == "node" else 2) for seed in range(8))


# ---- slow ranks, masks by hand, Buffers without masks -------------------------------------------


@not_stored
def test_a_slow_rank_learns_that_it_is_out_and_comes_back_after_clean(tier: str) -> None:
    come_back_after_clean(case_in(tier, calls=2))


@not_stored
def test_masks_by_hand(tier: str) -> None:
    mask_by_hand(case_in(tier, calls=1, mode="plain"))


def test_a_buffer_needs_another_reset_after_one_that_lost_a_rank() -> None:
    """Its hooks are forgotten, and the words of some ranks may be at rest."""
    case = case_of(calls=1, mode="hook")

    def main(group: local.ThreadGroup) -> bool:
        with open_buffer(group, case, timeout_s=20, enable_shrink=True) as buffer:
            pair = Pair(buffer, case, 0)
            hook = pair.dispatch()
            group.all_gather_object(None)
            if buffer.rank == DEAD:
                return False
            with pytest.raises(PeerLost):
                buffer.low_latency_clean_mask_buffer()
            with pytest.raises(ArgumentError, match="not after reset"):
                hook()
            with pytest.raises(CallInterrupted):
                pair.dispatch()
            buffer.reset(without=[DEAD])
            pair.dispatch()()
            return True

    assert local.run(main, case.num_ranks, timeout_s=60).count(True) == case.num_ranks - 1


@run_by(on_case, LowLatencyCase((4,), 4))
def test_masks_need_enable_shrink(buffer: Buffer, /) -> None:
    for call in (
        lambda: buffer.low_latency_update_mask_buffer(0, True),
        lambda: buffer.low_latency_query_mask_buffer(torch.zeros(1, dtype=torch.int32)),
        buffer.low_latency_clean_mask_buffer,
    ):
        with pytest.raises(ArgumentError, match="enable_shrink"):
            call()


def test_the_hint_between_nodes_has_room_for_masks() -> None:
    def hint(num_ranks: int, enable_shrink: bool) -> int:
        return Buffer.get_low_latency_rdma_size_hint(
            16, 256, num_ranks, 256, ranks_per_node=8, enable_shrink=enable_shrink
        )

    assert hint(64, True) == hint(64, False)
    assert hint(128, True) > hint(128, False)


def test_without_masks_a_silent_rank_is_still_an_error() -> None:
    case = case_of(calls=1, mode="plain")

    def main(buffer: deep_comm.Buffer) -> None:
        if buffer.rank != DEAD:
            with pytest.raises(deep_comm.PeerTimeout) as caught:
                Pair(buffer, case, 0).dispatch()
            assert caught.value.peer == DEAD

    on_case(main, case, timeout_s=0.2)
