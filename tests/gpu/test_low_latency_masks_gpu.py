"""test_low_latency_masks.py on GPUs: processes that are killed, at every stage, inside a node and
between logical nodes; and one that is slow.
"""

import time

import pytest
import torch
from low_latency import LowLatencyCase, Pair, open_buffer
from low_latency_masks import (
    CLEAN,
    DEAD,
    STAGES,
    case_of,
    masks_of,
    survive,
    verify_outcomes,
)

from deep_comm import MaskedOut, processes

# Ranks are killed, and two more stand by for them.
NUM_PROCESSES = 4 + 2
DEADLINE_S = 2.0
SHARING = (DEAD, 3)  # all ranks of the second of two devices
SHAPES = [(4, 2, (DEAD,)), (4, 2, (2, 3)), (3, 1, (DEAD,)), (2, 1, (DEAD,))]


@pytest.mark.parametrize("dead", [(DEAD,), SHARING], ids=["rank", "device"])
@pytest.mark.parametrize("stage", [*STAGES, CLEAN])
def test_processes_go_on_when_some_are_killed(
    pool: processes.Pool, stage: str, dead: tuple[int, ...]
) -> None:
    """With fewer devices than ranks some share one in turns, as in tests/gpu1."""
    case = case_of(
        tokens=(5, 4, 6, 3), experts=9, use_fp8=stage != "in combine", hidden=1024,
        weights_ahead=stage != "in dispatch", compact=stage == "after combine",
    )  # fmt: skip
    devices = [rank % min(torch.cuda.device_count(), 4) for rank in range(4)]
    ended = pool.outcomes(
        survive, 4, case, stage, True, dead, devices=devices, timeout_s=120, keep_survivors=True
    )
    verify_outcomes(case, ended, stage, dead)


def nodes_case(num_ranks: int, per_node: int, **changes: object) -> LowLatencyCase:
    settings = dict(
        tokens=(5, 4, 6, 3)[:num_ranks], ranks_per_node=per_node, hidden=1024,
        experts=2 * num_ranks + 1, topk=3,
    )  # fmt: skip
    return case_of(**{**settings, **changes})


def need_gpus(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices")


@pytest.mark.parametrize("num_ranks, per_node, dead", SHAPES)
@pytest.mark.parametrize("stage", [*STAGES, CLEAN])
@pytest.mark.gpu
def test_nodes_go_on_when_processes_are_killed(
    pool: processes.Pool, stage: str, num_ranks: int, per_node: int, dead: tuple[int, ...]
) -> None:
    need_gpus(num_ranks)
    case = nodes_case(
        num_ranks, per_node, use_fp8=stage != "in combine", weights_ahead=stage != "in dispatch"
    )
    ended = pool.outcomes(
        survive, num_ranks, case, stage, True, dead, DEADLINE_S, devices=range(num_ranks),
        timeout_s=180, keep_survivors=True,
    )  # fmt: skip
    verify_outcomes(case, ended, stage, dead)


def be_slow(group, case: LowLatencyCase) -> list[list[int]]:
    masks = []
    device = torch.device("cuda", torch.cuda.current_device())
    with open_buffer(group, case, device=device, timeout_s=1.0, enable_shrink=True) as buffer:

        def run_pair(call: int) -> None:
            pair = Pair(buffer, case, call)
            pair.dispatch()()
            pair.combine()()
            torch.cuda.synchronize()
            buffer.check()

        run_pair(0)
        if buffer.rank == DEAD:
            time.sleep(4.0)
            with pytest.raises(MaskedOut):
                for _ in range(2):
                    run_pair(0)
        else:
            run_pair(0)
        for call in (1, 0):
            masks.append(masks_of(buffer))
            buffer.low_latency_clean_mask_buffer()
            run_pair(call)
    return masks


@pytest.mark.gpu
def test_a_slow_rank_learns_that_it_is_out_and_comes_back_after_clean(
    pool: processes.Pool,
) -> None:
    need_gpus(4)
    case = nodes_case(4, 2, calls=2)
    for rank, masks in enumerate(pool.run(be_slow, 4, case, devices=range(4), timeout_s=180)):
        assert masks[1] == [0, 0, 0, 0]
        if rank != DEAD:
            assert masks[0] == [0, 1, 0, 0]
