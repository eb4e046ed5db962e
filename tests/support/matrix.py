"""A sparse matrix of cases: every value of every dimension appears often, every pair sometimes.

Dimensions are dealt like decks of cards, each shuffled by the seed and started again when empty, so
that a value cannot be missing by chance. The same matrix runs on every target.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from cases import Case, Scales

# Tokens of each rank, by shape of the load.
TOKENS: dict[str, Callable[[int, int], int]] = {
    "equal": lambda rank, ranks: 17,
    "one": lambda rank, ranks: 1,
    "empty_ranks": lambda rank, ranks: 0 if rank % 2 == 0 else 9 + rank,
    "rising": lambda rank, ranks: 5 * rank + 3,
    "one_full": lambda rank, ranks: 60 if rank == ranks - 1 else 0,
    "many": lambda rank, ranks: 96 + 11 * rank,
}

# dtype of the payload and the scale rows beside it.
PAYLOADS: list[tuple[torch.dtype, Scales | None]] = [
    (torch.bfloat16, None), (torch.float16, None), (torch.float32, None), (torch.int64, None),
    (torch.uint8, None), (torch.int8, Scales(7, torch.float32, "row")),
    (torch.int8, Scales(1, torch.float32, "padded")),
    (torch.float8_e4m3fn, Scales(8, torch.float32, "column")),
    (torch.float8_e4m3fn, Scales(3, torch.int32, "column")),
    (torch.uint8, Scales(5, torch.uint8, "padded")),
]  # fmt: skip

# num_sms, rows per publication of a tail, slots of a ring; None: the default config.
RINGS: list[tuple[int, int, int] | None] = [
    None, (1, 1, 1), (1, 4, 16), (2, 3, 7), (3, 1, 2), (1, 8, 8), (4, 2, 5),
]  # fmt: skip

DIMENSIONS: dict[str, Sequence[Any]] = {
    "ranks": [1, 2, 3, 4, 5, 6, 7, 8],
    "tokens": list(TOKENS),
    "hidden": [16, 32, 48, 112, 128, 1024, 2880],
    "experts": [1, 3, 8, 32, 37, 64, 256],
    "topk": [1, 2, 3, 4, 8, 16],
    "payload": PAYLOADS,
    "combine_dtype": [torch.bfloat16, torch.bfloat16, torch.float16, torch.float32],
    "routing": ["random", "random", "skewed", "holes", "one_expert", "none", "duplicates"],
    "idx_dtype": [torch.int64, torch.int64, torch.int32],
    "ring": RINGS,
    "alignment": [1, 4, 128],
    "worst": [0, 0, 1, 9],
    "zero_tail": [False, True],
    "biases": [0, 1, 2],
    "by_selections": [False, True],
    "fused_layout": [False, True],
    # The default of small buffers is rings; a small region overflows into them.
    "direct_bytes": [None, 8 << 20, 1 << 16],
    "smem_bytes": [None, None, 40000],
}


def _deck(values: Sequence[Any], shuffler: random.Random) -> Iterator[Any]:
    while True:
        cards = list(values)
        shuffler.shuffle(cards)
        yield from cards


def sample(num_cases: int, seed: int, **fixed: Sequence[Any]) -> list[Case]:
    """``num_cases`` cases; ``fixed`` replaces the values of a dimension."""
    shuffler = random.Random(seed)
    decks = {name: _deck(fixed.get(name, values), shuffler) for name, values in DIMENSIONS.items()}
    cases = []
    for number in range(num_cases):
        card = {name: next(deck) for name, deck in decks.items()}
        ranks = card["ranks"]
        dtype, scales = card["payload"]
        ring = card["ring"]
        shape = TOKENS[card["tokens"]]
        cases.append(
            Case(
                tokens=tuple(shape(rank, ranks) for rank in range(ranks)),
                hidden=card["hidden"],
                experts=card["experts"],
                topk=card["topk"],
                dtype=dtype,
                scales=scales,
                combine_dtype=card["combine_dtype"],
                routing=card["routing"],
                idx_dtype=card["idx_dtype"],
                num_sms=ring[0] if ring else None,
                send_chunk=ring[1] if ring else 4,
                slots=ring[2] if ring else 16,
                alignment=card["alignment"],
                worst=card["worst"],
                zero_tail=card["zero_tail"],
                biases=card["biases"],
                by_selections=card["by_selections"],
                fused_layout=card["fused_layout"],
                direct_bytes=card["direct_bytes"],
                smem_bytes=card["smem_bytes"],
                seed=seed * 1000 + number,
            )
        )
    return cases


# What users run or what sits at a border, each for a reason.
SPECIAL: dict[str, Case] = {
    "smallest row, bfloat16": Case(
        (5, 3), hidden=8, experts=2, topk=1, num_sms=1, slots=1, send_chunk=1
    ),
    "smallest row, float32": Case(
        (4, 6, 2), hidden=4, experts=3, dtype=torch.float32, combine_dtype=torch.float32
    ),
    "largest row": Case((6, 5, 7, 4), hidden=16384, experts=8, dtype=torch.float32),
    "DeepSeek shape, few tokens": Case((12, 8), hidden=7168, experts=256, topk=8, alignment=128),
    "FP8 with 128-element blocks": Case(
        (20, 30, 10, 0), hidden=2048, experts=64, topk=8, dtype=torch.float8_e4m3fn,
        scales=Scales(16, torch.float32, "column"), alignment=128,
    ),
    "bfloat16 with scales": Case((9, 4), scales=Scales(2, torch.float64, "padded")),
    "896 experts, top-16": Case((10,) * 7, hidden=256, experts=896, topk=16),
    "top-64": Case((3, 2), hidden=16, experts=128, topk=64, dtype=torch.uint8),
    "nobody has a token": Case((0, 0, 0), experts=6),
    "one rank, one token": Case((1,), experts=1, topk=1),
    "tokens do not fill the channels": Case((2, 1, 3, 0), num_sms=8, slots=2, send_chunk=1),
    "all tokens to one expert of eight ranks": Case((40,) * 8, routing="one_expert", experts=8),
    # A row's scales begin anywhere in a line, and a warp stores them line by line; more than a warp
    # holds go another way.
    **{
        f"{num} scales a row, {mode}": Case(
            (11, 14), hidden=256, experts=4, topk=3, dtype=torch.uint8, num_sms=2,
            scales=Scales(num, torch.float32 if num % 2 else torch.int32),
            direct_bytes=direct_bytes,
        )
        for num in (31, 32, 33, 56, 63, 97, 128, 129)
        for mode, direct_bytes in (("direct", 8 << 20), ("rings", 0))
    },
    "more selections than a warp has lanes, rings": Case(
        (9, 14, 0), hidden=64, experts=80, topk=40, num_sms=2, slots=2, send_chunk=2
    ),
}  # fmt: skip
