"""A thousand calls with random sizes on few Buffers: nothing of a call may
be left for the next one.

A call here is a layout, a dispatch, a cached dispatch and a combine, each compared with the
reference bit for bit. Shapes, routings, dtypes, rings and options change from call to call, within
what the Buffer's memory holds.
"""

from __future__ import annotations

from typing import Any

import pytest
import roundtrip
from random_calls import NVL_BYTES, cases_of, single_tier, two_tier, verified

import deep_comm
from deep_comm import local


# 8 * random_calls.CALLS_PER_TEST = 1000: rings alone, and with a receive region that outputs fit
# into, or only sometimes.
@pytest.mark.parametrize("first", range(0, 8000, 1000))
def test_a_thousand_calls_inside_a_node(first: int) -> None:
    num_ranks = (2, 5, 4, 3)[first // 1000 % 4]
    direct_bytes = (0, 1 << 21, 1 << 16)[first // 1000 % 3]
    cases = cases_of(single_tier, num_ranks, first)

    def fn(group: Any) -> list[roundtrip.Received]:
        with deep_comm.Buffer(
            group, NVL_BYTES, num_direct_bytes=direct_bytes, device="cpu", timeout_s=100
        ) as buffer:
            return [roundtrip.call_once(buffer, case, 0) for case in cases]

    verified(cases, local.run(fn, num_ranks, timeout_s=250), roundtrip.verify)


pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("first", range(0, 8000, 1000))
def test_a_thousand_calls_between_nodes(first: int) -> None:
    num_nodes, ranks_per_node = ((2, 2), (3, 1), (2, 3), (2, 1))[first // 1000 % 4]
    num_ranks = num_nodes * ranks_per_node
    cases = cases_of(two_tier(ranks_per_node), num_ranks, first)

    def fn(group: Any) -> list[roundtrip.Received]:
        with deep_comm.Buffer(
            group, NVL_BYTES, 1 << 20, num_qps_per_rank=(1, 4, 24)[first // 1000 % 3], device="cpu",
            ranks_per_node=ranks_per_node, timeout_s=100,
        ) as buffer:  # fmt: skip
            return [roundtrip.call_once(buffer, case, 0) for case in cases]

    verified(cases, local.run(fn, num_ranks, timeout_s=250), roundtrip.verify)
