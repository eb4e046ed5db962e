"""Many calls with random sizes on few Buffers: nothing of a call may be left for the next one.

A call here is a layout, a dispatch, a cached dispatch and a combine, each compared with the
reference bit for bit. Shapes, routings, dtypes, rings and options change from call to call, within
what the Buffer's memory holds.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import expanded
import pytest
import quantised
import roundtrip
import torch
from cases import Case
from on_buffers import on_buffers
from random_calls import NVL_BYTES, cases_of, single_tier, two_tier, verified
from schedules import part_of

import deep_comm

pytestmark = pytest.mark.usefixtures("poison")

# Plain calls; and fewer of the other kinds.
RUNS = [
    *((roundtrip, first) for first in range(0, 6000, 1000)),
    *((kind, first) for kind in (expanded, quantised) for first in range(8000, 10000, 1000)),
]


def of_kind(kind: ModuleType, cases: list[Case]) -> list[Any]:
    """Cases of one kind of calls: those that cast want rows to cast."""
    if kind is not quantised:
        return cases
    rows: dict[str, Any] = dict(dtype=torch.bfloat16, scales=None)
    forms = (quantised.FORMS[number % len(quantised.FORMS)] for number in range(len(cases)))
    return [
        quantised.Formed(
            dataclasses.replace(case, hidden=128 + case.hidden // 128 * 128, **rows), form
        )
        for case, form in zip(cases, forms, strict=True)
    ]


def run(kind: ModuleType, cases: list[Case], num_ranks: int, **options: Any) -> None:
    wanted = of_kind(kind, cases[: part_of(len(cases))])

    def fn(buffer: deep_comm.Buffer) -> list[Any]:
        return [kind.call_once(buffer, case, 0) for case in wanted]

    verified(wanted, on_buffers(fn, num_ranks, NVL_BYTES, timeout_s=100, **options), kind.verify)


@pytest.mark.parametrize(("kind", "first"), RUNS, ids=lambda it: getattr(it, "__name__", str(it)))
def test_many_calls_inside_a_node(kind: ModuleType, first: int) -> None:
    """Rings alone, and with a receive region that outputs fit into, or only sometimes."""
    num_ranks = (2, 5, 4, 3)[first // 1000 % 4]
    direct_bytes = (0, 1 << 21, 1 << 16)[first // 1000 % 3]
    cases = cases_of(single_tier, num_ranks, first)
    run(kind, cases, num_ranks, num_direct_bytes=direct_bytes)


@pytest.mark.parametrize(("kind", "first"), RUNS, ids=lambda it: getattr(it, "__name__", str(it)))
def test_many_calls_between_nodes(
    kind: ModuleType, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows put by the rail, or stored."""
    monkeypatch.setenv("DEEP_COMM_RAIL_NEAR", str(first // 1000 % 2))
    num_nodes, ranks_per_node = ((2, 2), (3, 1), (2, 3), (2, 1))[first // 1000 % 4]
    num_ranks = num_nodes * ranks_per_node
    cases = cases_of(two_tier(ranks_per_node), num_ranks, first)
    num_qps = (1, 4, 24)[first // 1000 % 3]
    run(
        kind, cases, num_ranks, num_rdma_bytes=1 << 20, num_qps_per_rank=num_qps,
        ranks_per_node=ranks_per_node,
    )  # fmt: skip
