"""Two-tier cases that follow from a seed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import matrix
import pytest
import roundtrip
import torch
from cases import SHAPES, Inputs, InternodeCase
from roundtrip import Received, call_once, verify

import deep_comm
from deep_comm import local

ROUTINGS = ("random", "random", "skewed", "holes", "one_expert", "none", "duplicates")


def random_case(seed: int, shape: tuple[int, int] | None = None) -> InternodeCase:
    """A case that follows from the seed; ``shape``: (nodes, ranks per node)."""
    choose = random.Random(seed)
    num_nodes, ranks_per_node = SHAPES[seed % len(SHAPES)] if shape is None else shape
    load = choose.choice(list(matrix.TOKENS.values()))
    num_ranks = num_nodes * ranks_per_node
    slots, rail_slots = choose.choice((1, 2, 5, 16)), choose.choice((2, 3, 8, 24))
    dtype, scales = choose.choice(matrix.PAYLOADS)
    return InternodeCase(
        tuple(min(40, load(rank, num_ranks)) for rank in range(num_ranks)),
        hidden=choose.choice((16, 80, 128)),
        experts=choose.choice((num_ranks, 2 * num_ranks + 3, 64, 3)),
        topk=choose.choice((1, 2, 5, 8)), dtype=dtype,
        combine_dtype=choose.choice((torch.bfloat16, torch.float16, torch.float32)),
        routing=choose.choice(ROUTINGS), idx_dtype=choose.choice((torch.int64, torch.int32)),
        scales=scales, num_sms=choose.choice((None, 2, 4, 6)), send_chunk=choose.randint(1, slots),
        slots=slots, rail_chunk=choose.randint(1, rail_slots // 2), rail_slots=rail_slots,
        num_qps=choose.choice((1, 2, 3, 24)), alignment=choose.choice((1, 1, 8)),
        worst=choose.choice((0, 0, 3)), zero_tail=choose.choice((False, True)),
        biases=choose.choice((0, 1, 2)), by_selections=choose.choice((False, True)),
        fused_layout=choose.choice((False, True)), calls=choose.choice((1, 2)),
        ranks_per_node=ranks_per_node, seed=seed,
    )  # fmt: skip


def model_case(
    num_ranks: int, ranks_per_node: int, first_tokens: int = 512, **changes: Any
) -> InternodeCase:
    """Of a model's size, with what GPUs take by default; each rank has some tokens more."""
    settings = dict(
        hidden=7168, experts=64, topk=8, biases=1, calls=3, nvl_bytes=512 << 20,
        rdma_bytes=512 << 20, num_sms=24, send_chunk=6, slots=64, rail_chunk=6, rail_slots=64,
    )  # fmt: skip
    tokens = tuple(first_tokens + 97 * rank for rank in range(num_ranks))
    return InternodeCase(tokens, ranks_per_node=ranks_per_node, **{**settings, **changes})


SKEWED: dict[str, Sequence[int]] = {
    "one node": range(4, 6), "own node": (), "one rank": [5], "not node 0": range(2, 6),
}  # fmt: skip
"""Experts of the three nodes of two ranks, of SKEWED_CASE, that all tokens choose; () the own."""
SKEWED_CASE = InternodeCase(
    (23, 9, 31, 14, 0, 27), experts=6, topk=2, num_sms=4, slots=2, send_chunk=1,
    rail_slots=2, rail_chunk=1, ranks_per_node=2,
)  # fmt: skip


def skew_routing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = roundtrip.make_inputs

    def skewed(case: Any, rank: int, call: int) -> Inputs:
        inputs = plain(case, rank, call)
        experts = torch.tensor([*(SKEWED[name] or (rank - rank % 2, rank - rank % 2 + 1))])
        return dataclasses.replace(inputs, topk_idx=experts[inputs.topk_idx % len(experts)])

    monkeypatch.setattr(roundtrip, "make_inputs", skewed)


def hundred_calls(
    seed: int, num_nvl_bytes: int, worst: Sequence[int] = (0,), **options: Any
) -> None:
    """Cases of changing shapes on one Buffer of two nodes of two ranks, one call of each, checked.
    ``options``: of the Buffer; with num_direct_bytes outputs may lie in the receive region."""
    choose = random.Random(seed)
    cases = [
        InternodeCase(
            tuple(choose.choice((0, 1, 4, 13)) for _ in range(4)),
            hidden=choose.choice((16, 32, 256)),
            experts=choose.choice((4, 7, 12)),
            topk=choose.choice((1, 3)),
            num_sms=choose.choice((2, 4)),
            slots=choose.choice((1, 3)),
            send_chunk=1,
            rail_slots=choose.choice((2, 5)),
            rail_chunk=1,
            worst=choose.choice(worst),
            is_direct="num_direct_bytes" in options,
            seed=number,
        )
        for number in range(100)
    ]

    def fn(group: Any) -> list[Received]:
        with deep_comm.Buffer(
            group, num_nvl_bytes, 1 << 20, device="cpu", ranks_per_node=2, **options
        ) as buffer:
            return [call_once(buffer, case, 0) for case in cases]

    results = local.run(fn, 4, timeout_s=200)
    for number, case in enumerate(cases):
        verify(case, [[calls[number]] for calls in results])
