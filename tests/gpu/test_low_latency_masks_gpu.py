"""test_low_latency_masks.py on GPUs: processes that are killed, at every stage.

With fewer devices than ranks some share one in turns, as in tests/gpu1.
"""

from collections.abc import Iterator

import pytest
import torch
from low_latency_masks import CLEAN, DEAD, STAGES, case_of, survive, verify_outcomes

from deep_comm import processes

NUM_RANKS = 4
SHARING = (DEAD, 3)  # all ranks of the second of two devices


@pytest.fixture(scope="module")
def pool() -> Iterator[processes.Pool]:
    """Of this file: ranks are killed, and two more stand by for them."""
    with processes.Pool(NUM_RANKS + 2) as pool:
        yield pool


@pytest.mark.parametrize("dead", [(DEAD,), SHARING], ids=["rank", "device"])
@pytest.mark.parametrize("stage", [*STAGES, CLEAN])
def test_processes_go_on_when_some_are_killed(
    pool: processes.Pool, stage: str, dead: tuple[int, ...]
) -> None:
    case = case_of(
        tokens=(5, 4, 6, 3), experts=9, use_fp8=stage != "in combine", hidden=1024,
        weights_ahead=stage != "in dispatch", compact=stage == "after combine",
    )  # fmt: skip
    devices = [rank % min(torch.cuda.device_count(), NUM_RANKS) for rank in range(NUM_RANKS)]
    ended = pool.outcomes(
        survive, NUM_RANKS, case, stage, True, dead, devices=devices, timeout_s=120,
        keep_survivors=True,
    )  # fmt: skip
    verify_outcomes(case, ended, stage, dead)
