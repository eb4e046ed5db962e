"""Cases under seeded schedules of the simulated machine: each seed has a case
and a schedule of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deep_comm import simulate

POLICIES = ("random", "fifo", "lifo", "starve", "priority")


def run_seeds(
    seeds: range,
    case_of: Callable[[int], Any],
    run_case: Callable[[simulate.SimulatedGroup, Any], Any],
    verify: Callable[[Any, Any], None],
) -> None:
    """Raises AssertionError naming the first seed that fails; run that one alone to replay it."""
    for seed in seeds:
        case = case_of(seed)
        try:
            results = simulate.run(
                lambda group, case=case: run_case(group, case), case.num_ranks, seed, timeout_s=60
            )
            verify(case, results)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {case}: {error}") from error


def run_policy(
    policy: str,
    case: Any,
    run_case: Callable[[simulate.SimulatedGroup, Any], Any],
    verify: Callable[[Any, Any], None],
) -> None:
    results = simulate.run(
        lambda group: run_case(group, case), case.num_ranks, 7, policy=policy, timeout_s=120
    )
    verify(case, results)
