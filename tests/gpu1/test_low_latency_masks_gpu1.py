"""test_low_latency_masks.py on one GPU, which all ranks share; one is killed."""

import pytest
from low_latency_masks import CLEAN, STAGES, case_of, survive, verify_outcomes

from deep_comm import processes


@pytest.mark.parametrize("stage", [*STAGES, CLEAN])
def test_processes_go_on_when_one_is_killed(stage: str) -> None:
    case = case_of(hidden=1024, weights_ahead=stage != "in dispatch")
    ended = processes.outcomes(
        survive, case.num_ranks, case, stage, True, devices=[0] * case.num_ranks, timeout_s=120
    )
    verify_outcomes(case, ended, stage)
