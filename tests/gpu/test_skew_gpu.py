"""test_skew.py on GPUs: a rank's stream is 50 ms late at every stage in turn."""

import pytest
from gpu_cases import on_own_device, run
from roundtrip import verify
from skew import STAGES, run_late


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_is_50_ms_late_changes_nothing(num_ranks: int, stage: str) -> None:
    by_rank = run(on_own_device, num_ranks, run_late, num_ranks, (stage,))
    for same in zip(*by_rank, strict=True):
        verify(same[0][0], [calls for _, calls in same])
