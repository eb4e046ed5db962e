"""Low-latency calls between nodes go on without ranks that fall silent: one, a whole node, in the
middle of a kernel, behind a NIC that stands still; and with their return.
"""

from __future__ import annotations

import random
from typing import Any

import forked
import pytest
from low_latency import LowLatencyCase, Pair, open_buffer
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
from schedules import some_of

from deep_comm import Buffer, MaskedOut, simulate

# Ranks that fall silent, in nodes of two.
ONE, NODE = (DEAD,), (2, 3)


def nodes_case(**changes: Any) -> LowLatencyCase:
    settings = dict(
        tokens=(5, 4, 6, 3, 0, 6), experts=13, topk=4, ranks_per_node=2, num_qps=3,
        hand_on=1,  # which no call with masks does
    )  # fmt: skip
    return case_of(**{**settings, **changes})


@pytest.mark.parametrize("stage", STAGES)
def test_processes_go_on_when_some_are_killed(stage: str) -> None:
    dead = (ONE, NODE)[STAGES.index(stage) % 2]
    case = nodes_case(weights_ahead=stage != "in dispatch", tokens=(5, 4, 6, 3))
    ended = forked.outcomes(survive, case.num_ranks, case, stage, False, dead, timeout_s=90)
    verify_outcomes(case, ended, stage, dead)


VARIANTS = ("packed", "late", "compact", "one_rounding", "fp8")


def leave(stage: str, variant: str, seed: int) -> None:
    """One schedule of a shape from which ranks leave at that stage."""
    shapes = (((5, 4, 6, 3), 2), ((3, 4), 1), ((2, 3, 1, 4, 0, 2), 3))
    tokens, per_node = shapes[seed % len(shapes)]
    dead = ONE if len(tokens) == 2 or seed % 2 == 0 else tuple(range(per_node))
    case = nodes_case(
        tokens=tokens, ranks_per_node=per_node, experts=2 * len(tokens) + 1, calls=4,
        topk=3, weights_ahead=variant != "late", compact=variant == "compact",
        one_rounding=variant == "one_rounding", use_fp8=variant == "fp8", seed=seed,
    )  # fmt: skip
    simulate_survivors(case, stage, seed, dead)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stage", STAGES)
def test_every_schedule_goes_on_without_ranks_that_leave(stage: str, variant: str) -> None:
    for seed in some_of(range(8)):
        leave(stage, variant, seed)


def test_cleaning_is_a_barrier_that_masks_ranks_that_leave_before_it() -> None:
    for seed in range(3):
        leave(CLEAN, "packed", seed)


# ---- a rank that stops at any step --------------------------------------------------------------


def stopped_case(seed: int) -> tuple[LowLatencyCase, int, int]:
    """A case, the rank that stops, and after which step."""
    choose = random.Random(seed)
    tokens, per_node = choose.choice((((3, 2, 4, 3), 2), ((3, 2, 4, 3), 1), ((1, 4, 2), 1)))
    case = LowLatencyCase(
        tokens, 4, hidden=64, experts=2 * len(tokens) + 1, topk=3, calls=4, ranks_per_node=per_node,
        num_qps=3, seed=seed, weights_ahead=seed % 2 == 1,
    )  # fmt: skip
    return case, choose.randrange(case.num_ranks), choose.randrange(200, 60_000 * len(tokens))


def stop(seed: int, faults: tuple[str, ...] = ()) -> str | None:
    case, dead, step = stopped_case(seed)
    return notices_stop(case, dead, step, seed, faults)


def test_a_rank_may_stop_at_any_step(way: str) -> None:
    for seed in some_of(range(160)):
        found = stop(seed)
        assert found is None, f"seed {seed}: {found}"


# ---- slow ranks, NICs that stand still, masks by hand --------------------------------------------


def test_a_slow_rank_learns_that_it_is_out_and_comes_back_after_clean() -> None:
    come_back_after_clean(nodes_case(calls=2, tokens=(5, 4, 6, 2)))


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


def test_masks_by_hand() -> None:
    mask_by_hand(nodes_case(calls=1, mode="plain", tokens=(5, 4, 6, 2)))


def test_the_hint_has_room_for_masks() -> None:
    def hint(num_ranks: int, enable_shrink: bool) -> int:
        return Buffer.get_low_latency_rdma_size_hint(
            16, 256, num_ranks, 256, ranks_per_node=8, enable_shrink=enable_shrink
        )

    assert hint(64, True) == hint(64, False)
    assert hint(128, True) > hint(128, False)


# ---- rows that come late, and negative controls --------------------------------------------------


def run_with_late_rows(seed: int, faults: tuple[str, ...] = ()) -> None:
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


def test_rows_that_come_late_are_not_taken_for_those_of_another_rank() -> None:
    for seed in some_of(range(12)):
        run_with_late_rows(seed)


def test_simulation_finds_rows_that_are_taken_for_those_of_another_rank() -> None:
    assert any(notices_shared_rows(run_with_late_rows, seed) for seed in range(12))


@pytest.mark.parametrize("stage", ["in dispatch", "in combine"])
def test_what_comes_late_harms_no_other_shape(stage: str, way: str) -> None:
    for seed in some_of(range(16)):
        send_late_after_change(seed, stage, 2)


def test_simulation_finds_places_that_depend_on_the_shape(way: str) -> None:
    assert any(notices_late_rows(seed, 2) for seed in range(8))


def test_simulation_finds_blocks_that_do_not_agree(way: str) -> None:
    assert any(stop(seed, ("skip_agreement",)) for seed in range(60))


def test_simulation_finds_live_ranks_that_are_masked_for_waiting() -> None:
    found = (stop(seed, ("skip_alive",)) for seed in range(160))
    assert any(what is not None and "MaskedOut" in what for what in found)


def test_simulation_finds_a_vote_that_is_not_told() -> None:
    ended = stall_nics(0, (1,), ("skip_vote",))
    assert not isinstance(ended[1], MaskedOut) or ended[0] != [0, 1, 0, 0], ended


# ---- the same where stores reach the other nodes: no NIC holds anything back --------------------


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_RAIL_NEAR", "1")


def store_late_rows(seed: int, faults: tuple[str, ...] = ()) -> None:
    """Combine's rows of a rank, of the same node or of the other, which stores them when the others
    have gone on."""
    send_rows_late(seed, 1 + seed % 2, faults)


@pytest.mark.usefixtures("near")
def test_rows_that_are_stored_late_are_not_taken_for_those_of_another_rank() -> None:
    for seed in some_of(range(12)):
        store_late_rows(seed)


@pytest.mark.usefixtures("near")
def test_simulation_finds_stored_rows_that_are_taken_for_those_of_another_rank() -> None:
    assert any(notices_shared_rows(store_late_rows, seed) for seed in range(12))


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("stage", STAGES)
def test_every_schedule_goes_on_without_ranks_whose_stores_reached(stage: str) -> None:
    for seed in range(2 * len(VARIANTS)):
        leave(stage, VARIANTS[seed % len(VARIANTS)], seed)
