"""Expanded dispatches and combines over two tiers under seeded schedules: rows put by a network of
every order or stored into near nodes, weak memory; and faults that must be found.
"""

import dataclasses
import random

import expanded
import pytest
from internode import InternodeCase
from test_internode_direct_simulated import SEVERAL, direct
from test_internode_simulated import FAULTY, SEEDS_PER_TEST, small_case

from deep_comm import simulate
from deep_comm.errors import DeepCommError

NUM_SEEDS = 320


pytestmark = pytest.mark.usefixtures("poison")


def expanded_case(seed: int) -> InternodeCase:
    choose = random.Random(seed + 77)
    case = dataclasses.replace(small_case(seed), alignment=choose.choice((1, 2, 16)))
    return direct(case) if choose.random() < 0.6 else case


def check(case: InternodeCase, seed: int, **options: object) -> None:
    results = simulate.run(
        lambda group: expanded.run_case(group, case), case.num_ranks, seed, timeout_s=120, **options
    )
    expanded.verify(case, results)


@pytest.mark.parametrize("first_seed", range(7000, 7000 + NUM_SEEDS, SEEDS_PER_TEST))
def test_every_schedule_gives_the_same_bits(first_seed: int, way: str) -> None:
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        case = expanded_case(seed)
        try:
            check(case, seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {case}: {error}") from error


RINGS = dataclasses.replace(FAULTY, alignment=2, seed=2)
PLACES = dataclasses.replace(SEVERAL, alignment=2, seed=2)


def notices(case: InternodeCase, seed: int, faults: tuple[str, ...]) -> str | None:
    try:
        check(case, seed, faults=faults)
    except (AssertionError, DeepCommError, simulate.MachineError) as error:
        return f"{type(error).__name__}: {error}"
    return None


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
    for seed in range(60):
        if notices(case, seed, (fault,)) is not None:
            return
    pytest.fail(f"60 seeds did not notice {fault}")


@pytest.mark.parametrize("case", [RINGS, PLACES], ids=["rings", "direct"])
def test_the_same_runs_pass_without_a_fault(case: InternodeCase, way: str) -> None:
    for seed in range(12):
        found = notices(case, seed, ())
        assert found is None, f"seed {seed}: {found}"


@pytest.mark.parametrize("stalled", [0, 3])
def test_a_rank_that_stalls_for_a_while_changes_nothing(stalled: int, way: str) -> None:
    for seed in range(3):
        check(PLACES, seed, stalls=[(stalled, 300 * seed, 4000)])
