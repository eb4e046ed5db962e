"""Cases under seeded schedules of the simulated machine, each seed a case and a schedule of its
own; and faults that some schedule must bring to light.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

from deep_comm import local, simulate
from deep_comm.errors import DeepCommError

RunCase = Callable[[simulate.SimulatedGroup, Any], Any]
Verify = Callable[[Any, Any], None]

# Every night, and for tools/mutate; otherwise a quarter of them, always the same.
ALL_SEEDS = os.environ.get("ALL_SEEDS") == "1"
T = TypeVar("T")

POLICIES = ("random", "fifo", "lifo", "starve", "priority")


def part_of(number: int) -> int:
    return number if ALL_SEEDS else min(number, max(4, number // 4))


def some_of(seeds: Sequence[T]) -> list[T]:
    chosen = random.Random(len(seeds)).sample(range(len(seeds)), part_of(len(seeds)))
    return [seeds[number] for number in sorted(chosen)]


def simulated(
    case: Any, run_case: RunCase, seed: int, **options: Any
) -> simulate.SimulationResults:
    return simulate.run(
        lambda group: run_case(group, case), case.num_ranks, seed, timeout_s=120, **options
    )


def on_threads(case: Any, run_case: RunCase, seed: int) -> list[Any]:
    """The same without a schedule: ``seed`` has made the case."""
    return local.run(lambda group: run_case(group, case), case.num_ranks, timeout_s=60)


def run_seeds(
    seeds: Sequence[int],
    case_of: Callable[[int], Any],
    run_case: RunCase,
    verify: Verify,
    run: Callable[[Any, RunCase, int], Any] = simulated,
) -> None:
    """Raises AssertionError naming the first seed that fails; run that one alone to replay it."""
    for seed in some_of(seeds):
        case = case_of(seed)
        try:
            verify(case, run(case, run_case, seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}, {case}: {error}") from error


def run_policy(
    policy: str,
    case: Any,
    run_case: RunCase,
    verify: Verify,
) -> None:
    verify(case, simulated(case, run_case, 7, policy=policy))


def notices(
    case: Any,
    run_case: RunCase,
    verify: Verify,
    seed: int,
    faults: Sequence[str] = (),
    **options: Any,
) -> str | None:
    """How the run with these faults fails, or None if it does not."""
    try:
        verify(case, simulated(case, run_case, seed, faults=faults, **options))
    except (AssertionError, DeepCommError, simulate.MachineError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def find_fault(
    fault: str, case: Any, run_case: RunCase, verify: Verify, num_seeds: int = 60
) -> None:
    """The negative control: fails unless one of these schedules brings the fault to light."""
    if not any(notices(case, run_case, verify, seed, (fault,)) for seed in range(num_seeds)):
        pytest.fail(f"{num_seeds} seeds ran with {fault} and none noticed")


def pass_without_fault(case: Any, run_case: RunCase, verify: Verify, num_seeds: int = 20) -> None:
    for seed in range(part_of(num_seeds)):
        found = notices(case, run_case, verify, seed)
        assert found is None, f"seed {seed}: {found}"
