"""64 ranks of 8 nodes under seeded schedules: dispatch, cached dispatch and combine of the
real kernels, bit for bit.

A seed takes about 3 s of one core, half of it for the reference; some 2.4
million switches between fibers.
"""

from __future__ import annotations

import random

import pytest
import torch
from cases import InternodeCase, Scales
from roundtrip import run_case, verify
from schedules import some_of

from deep_comm import simulate

NUM_NODES, RANKS_PER_NODE = 8, 8
NUM_RANKS = NUM_NODES * RANKS_PER_NODE


def case_of(seed: int) -> InternodeCase:
    """Few tokens, rings of few slots, so that credits come into play all the same."""
    choose = random.Random(seed)
    slots = choose.choice((1, 2))
    return InternodeCase(
        tuple(choose.choice((0, 1, 2, 4)) for _ in range(NUM_RANKS)), hidden=16,
        experts=choose.choice((NUM_RANKS, NUM_RANKS + 3, 40)), topk=choose.choice((2, 6)),
        scales=choose.choice((None, Scales(3, torch.float32, "column"))),
        routing=("random", "skewed", "holes", "one_expert", "duplicates", "random")[seed % 6],
        num_sms=choose.choice((2, 4)), slots=slots, send_chunk=1, rail_slots=2, rail_chunk=1,
        num_qps=choose.choice((1, 3)), biases=choose.choice((0, 1)), ranks_per_node=RANKS_PER_NODE,
        nvl_bytes=1 << 17, rdma_bytes=1 << 17, seed=seed,
    )  # fmt: skip


@pytest.mark.parametrize("seed", some_of(range(6)))
@pytest.mark.usefixtures("poison")
def test_every_schedule_of_sixty_four_ranks_gives_the_same_bits(seed: int) -> None:
    case = case_of(seed)
    results = simulate.run(lambda group: run_case(group, case), NUM_RANKS, seed, timeout_s=250)
    verify(case, results)
