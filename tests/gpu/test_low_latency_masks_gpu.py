"""tests/cpu/test_low_latency_masks.py on GPUs: a process that is killed, at every stage."""

import pytest
import torch
from low_latency_masks import DEAD, STAGES, case_of, survive, verify_survivors

from deep_comm import processes


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.gpu
def test_processes_go_on_when_one_is_killed(stage: str) -> None:
    if torch.cuda.device_count() < 3:
        pytest.skip("needs 3 CUDA devices")
    case = case_of(use_fp8=True, hidden=1024, weights_ahead=stage != "in dispatch")
    ended = processes.outcomes(
        survive, case.num_ranks, case, stage, True, devices=range(3), timeout_s=120
    )
    for outcome in ended:
        if outcome.rank != DEAD:
            assert outcome.error is None, f"{outcome.error}\n{outcome.traceback}"
    verify_survivors(case, [outcome.value for outcome in ended], stage)
