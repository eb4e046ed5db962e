"""test_absent.py on GPUs: processes that are killed, and normal mode without them.

With fewer devices than ranks some share one in turns, as in tests/gpu1.
"""

import pytest
import torch
from absent import Plan, survive, verify_survivors
from cases import Case

from deep_comm import processes

CASE = Case((37, 20, 64, 33), hidden=1024, experts=10, topk=3, calls=2, nvl_bytes=8 << 20)


@pytest.mark.parametrize(
    "plan", [Plan(CASE, (1,)), Plan(CASE, (0, 3), (3,), form="fp8")], ids=["one", "two_in_turn"]
)
def test_processes_go_on_when_some_are_killed(plan: Plan) -> None:
    devices = [rank % min(torch.cuda.device_count(), 4) for rank in range(plan.num_ranks)]
    ended = processes.outcomes(
        survive, plan.num_ranks, plan, 3.0, True, devices=devices, timeout_s=120
    )
    verify_survivors(plan, ended)
