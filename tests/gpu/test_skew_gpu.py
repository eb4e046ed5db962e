"""test_skew.py on GPUs: a rank's stream is 50 ms late at every stage in turn."""

import pytest
import torch
from gpu_cases import run
from roundtrip import verify
from skew import STAGES, run_late


def late(group, num_ranks: int, stage: str) -> list:
    return run_late(group, torch.device("cuda", torch.cuda.current_device()), num_ranks, (stage,))


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_is_50_ms_late_changes_nothing(num_ranks: int, stage: str) -> None:
    by_rank = run(late, num_ranks, num_ranks, stage)
    for same in zip(*by_rank, strict=True):
        verify(same[0][0], [calls for _, calls in same])
