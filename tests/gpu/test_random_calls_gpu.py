"""test_random_calls.py on GPUs: fewer calls, the same way."""

from __future__ import annotations

from typing import Any

import pytest
import roundtrip
import torch
from gpu_cases import run
from random_calls import cases_of, single_tier, two_tier, verified

import deep_comm

BYTES = 64 << 20  # a default config on a GPU has more channels than on the host


def _inside(group: Any, cases: list[Any], direct_bytes: int) -> list[roundtrip.Received]:
    device = torch.device("cuda", torch.cuda.current_device())
    with deep_comm.Buffer(group, BYTES, num_direct_bytes=direct_bytes, device=device) as buffer:
        return [roundtrip.call_once(buffer, case, 0) for case in cases]


def _between(group: Any, cases: list[Any]) -> list[roundtrip.Received]:
    device = torch.device("cuda", torch.cuda.current_device())
    with deep_comm.Buffer(group, BYTES, BYTES, device=device, ranks_per_node=1) as buffer:
        return [roundtrip.call_once(buffer, case, 0) for case in cases]


@pytest.mark.parametrize("direct_bytes", [0, 1 << 22, 1 << 16])
def test_random_calls_inside_a_node(num_ranks: int, direct_bytes: int) -> None:
    cases = cases_of(single_tier, num_ranks, direct_bytes)
    verified(cases, run(_inside, num_ranks, cases, direct_bytes), roundtrip.verify)


def test_random_calls_between_nodes(num_ranks: int) -> None:
    cases = cases_of(two_tier(1), num_ranks, 7)
    verified(cases, run(_between, num_ranks, cases), roundtrip.verify)
