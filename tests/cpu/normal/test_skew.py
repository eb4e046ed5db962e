"""Ranks that come late, that get everything, or that have nothing to do."""

from __future__ import annotations

import pytest
from cases import Case
from roundtrip import run_case, verify
from skew import STAGES, run_late

from deep_comm import local, simulate

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_is_50_ms_late_changes_nothing(stage: str) -> None:
    by_rank = local.run(lambda group: run_late(group, "cpu", 3, (stage,)), 3, timeout_s=200)
    for same in zip(*by_rank, strict=True):
        verify(same[0][0], [calls for _, calls in same])


@pytest.mark.parametrize("routing", ["random", "one_expert", "skewed"])
@pytest.mark.parametrize("direct_bytes", [0, 1 << 17])
def test_a_rank_that_stops_anywhere_for_a_while_changes_nothing(
    routing: str, direct_bytes: int
) -> None:
    """Inside every kernel: stops are spread over the whole run, on every rank."""
    case = Case(
        (7, 0, 9), experts=6, hidden=16, topk=2, num_sms=2, slots=1, send_chunk=1, routing=routing,
        nvl_bytes=1 << 18, direct_bytes=direct_bytes, fused_layout=True, seed=5,
    )  # fmt: skip

    def run(stalls: list[tuple[int, int, int]]) -> simulate.SimulationResults:
        return simulate.run(lambda g: run_case(g, case), 3, 17, stalls=stalls, timeout_s=60)

    num_steps = run([]).num_steps
    for position in range(12):
        stall = (position % 3, position * num_steps // 12, 4000)
        verify(case, run([stall]))
