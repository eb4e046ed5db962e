"""A thousand calls with random sizes on few Buffers: nothing of a call may be left for the next one.

A call here is a layout, a dispatch, a cached dispatch and a combine, each compared with the reference bit for bit. Shapes,
routings, dtypes, rings and options change from call to call, within what the Buffer's memory holds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import internode
import matrix
import pytest
import roundtrip
import torch
from cases import Case
from internode import InternodeCase

import deep_comm
from deep_comm import local

CALLS_PER_TEST = 125
NVL_BYTES = 4 << 20

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def tokens_of(choose: random.Random, num_ranks: int) -> tuple[int, ...]:
    most = choose.choice((0, 1, 5, 17, 40))
    return tuple(choose.randint(0, most) for _ in range(num_ranks))


def common(choose: random.Random, num_ranks: int) -> dict[str, Any]:
    dtype, scales = choose.choice(matrix.PAYLOADS)
    slots = choose.choice((1, 2, 5, 16))
    return dict(
        hidden=choose.choice((16, 48, 112, 128, 512)),
        experts=choose.choice((num_ranks, 3, 2 * num_ranks + 3, 37)),
        topk=choose.choice((1, 2, 3, 8)),
        dtype=dtype,
        scales=scales,
        combine_dtype=choose.choice(DTYPES),
        routing=choose.choice(("random", "random", "skewed", "holes", "one_expert", "none", "duplicates")),
        idx_dtype=choose.choice((torch.int64, torch.int32)),
        slots=slots,
        send_chunk=choose.randint(1, slots),
        alignment=choose.choice((1, 4)),
        worst=choose.choice((0, 0, 1, 9)),
        zero_tail=choose.choice((False, True)),
        biases=choose.choice((0, 1, 2)),
        fused_layout=choose.choice((False, True)),
    )


def single_tier(choose: random.Random, num_ranks: int, number: int) -> Case:
    return Case(
        tokens_of(choose, num_ranks),
        **common(choose, num_ranks),
        num_sms=choose.choice((None, 1, 2, 3)),
        seed=number,
    )


def two_tier(ranks_per_node: int) -> Callable[[random.Random, int, int], InternodeCase]:
    def case_of(choose: random.Random, num_ranks: int, number: int) -> InternodeCase:
        rail_slots = choose.choice((2, 3, 8))
        return InternodeCase(
            tokens_of(choose, num_ranks),
            **common(choose, num_ranks),
            num_sms=choose.choice((None, 2, 4)),
            rail_slots=rail_slots,
            rail_chunk=choose.randint(1, rail_slots // 2),
            ranks_per_node=ranks_per_node,
            seed=number,
        )

    return case_of


def cases_of(
    make: Callable[[random.Random, int, int], Any], num_ranks: int, first: int
) -> list[Any]:
    choose = random.Random(first)
    return [make(choose, num_ranks, first + number) for number in range(CALLS_PER_TEST)]


def verified(cases: list[Any], results: list[list[Any]], verify: Callable[..., None]) -> None:
    for number, case in enumerate(cases):
        try:
            verify(case, [[calls[number]] for calls in results])
        except AssertionError as error:
            raise AssertionError(f"call {number} of {len(cases)}, {case}: {error}") from error


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_POISON", "1")


# 8 * CALLS_PER_TEST = 1000: rings alone, and with a receive region that outputs fit into, or only sometimes.
@pytest.mark.parametrize("first", range(0, 8000, 1000))
def test_a_thousand_calls_inside_a_node(first: int) -> None:
    num_ranks = (2, 5, 4, 3)[first // 1000 % 4]
    direct_bytes = (0, 1 << 21, 1 << 16)[first // 1000 % 3]
    cases = cases_of(single_tier, num_ranks, first)

    def fn(group: Any) -> list[roundtrip.Received]:
        with deep_comm.Buffer(
            group, NVL_BYTES, num_direct_bytes=direct_bytes, device="cpu", timeout_s=100
        ) as buffer:
            return [roundtrip.call_once(buffer, case, 0, buffer.device) for case in cases]

    verified(cases, local.run(fn, num_ranks, timeout_s=250), roundtrip.verify)


@pytest.mark.parametrize("first", range(0, 8000, 1000))
def test_a_thousand_calls_between_nodes(first: int) -> None:
    num_nodes, ranks_per_node = ((2, 2), (3, 1), (2, 3), (2, 1))[first // 1000 % 4]
    num_ranks = num_nodes * ranks_per_node
    cases = cases_of(two_tier(ranks_per_node), num_ranks, first)

    def fn(group: Any) -> list[internode.Received]:
        with deep_comm.Buffer(
            group, NVL_BYTES, 1 << 20, num_qps_per_rank=(1, 4, 24)[first // 1000 % 3], device="cpu",
            ranks_per_node=ranks_per_node, timeout_s=100,
        ) as buffer:  # fmt: skip
            return [internode.call_once(buffer, case, 0) for case in cases]

    verified(cases, local.run(fn, num_ranks, timeout_s=250), internode.verify)
