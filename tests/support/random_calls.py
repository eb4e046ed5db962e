"""Calls with random sizes, one after the other on one Buffer: how they are
drawn, the same on all targets.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import matrix
import torch
from cases import Case, InternodeCase

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
        routing=choose.choice(
            ("random", "random", "skewed", "holes", "one_expert", "none", "duplicates")
        ),
        idx_dtype=choose.choice((torch.int64, torch.int32)),
        slots=slots,
        send_chunk=choose.randint(1, slots),
        alignment=choose.choice((1, 4)),
        worst=choose.choice((0, 0, 1, 9)),
        zero_tail=choose.choice((False, True)),
        biases=choose.choice((0, 1, 2)),
        by_selections=choose.choice((False, True)),
        fused_layout=choose.choice((False, True)),
    )


def single_tier(choose: random.Random, num_ranks: int, number: int) -> Case:
    return Case(
        tokens_of(choose, num_ranks), **common(choose, num_ranks),
        num_sms=choose.choice((None, 1, 2, 3)), has_weights=number % 5 > 0, seed=number,
    )  # fmt: skip


def two_tier(ranks_per_node: int) -> Callable[[random.Random, int, int], InternodeCase]:
    def case_of(choose: random.Random, num_ranks: int, number: int) -> InternodeCase:
        rail_slots = choose.choice((2, 3, 8))
        return InternodeCase(
            tokens_of(choose, num_ranks), **common(choose, num_ranks),
            num_sms=choose.choice((None, 2, 4)), rail_slots=rail_slots,
            rail_chunk=choose.randint(1, rail_slots // 2), ranks_per_node=ranks_per_node,
            has_weights=number % 5 > 0, seed=number,
        )  # fmt: skip

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
