"""Dispatch and combine under hundreds of seeded schedules, with weak memory and late copies.

Each seed has a case of its own and a scheduling policy of its own. A failure names the seed; run
that seed alone to replay it step by step.
"""

import dataclasses
import random
from typing import Any

import pytest
import torch
from cases import ROUTINGS, Case, Scales
from roundtrip import Received, call_once, run_calls, run_case, verify
from schedules import POLICIES, run_policy, run_seeds, simulated

import deep_comm

pytestmark = pytest.mark.usefixtures("poison")


def small_case(seed: int) -> Case:
    """A case of few tokens: schedules differ most where rings are full and ranks wait."""
    choose = random.Random(seed)
    num_ranks = choose.choice((1, 2, 2, 3, 3, 4, 5))
    slots = choose.choice((1, 1, 2, 3, 5))
    return Case(
        tuple(choose.choice((0, 1, 3, 6, 9)) for _ in range(num_ranks)),
        hidden=choose.choice((16, 32, 48)), experts=choose.choice((2, 5, 8)),
        topk=choose.choice((1, 2, 4)), dtype=choose.choice((torch.bfloat16, torch.uint8)),
        scales=choose.choice((None, None, Scales(3, torch.float32, "column"))),
        routing=choose.choice(ROUTINGS), num_sms=choose.choice((1, 1, 2)),
        send_chunk=choose.randint(1, slots), slots=slots, worst=choose.choice((0, 0, 2)),
        biases=choose.choice((0, 1)), fused_layout=choose.choice((False, True)),
        calls=choose.choice((1, 2)), nvl_bytes=1 << 18,
        direct_bytes=choose.choice((0, 1 << 12, 1 << 17, 1 << 17)),
        smem_bytes=choose.choice((None, 11000)), seed=seed,
    )  # fmt: skip


def test_every_schedule_gives_the_same_bits() -> None:
    run_seeds(range(780), small_case, run_case, verify)


def staged_case(seed: int) -> Case:
    """Staged combine, more blocks than senders, tokens of more than one window."""
    choose = random.Random(seed)
    num_ranks = choose.choice((2, 3, 4))
    return Case(
        tuple(choose.choice((0, 2, 17, 26)) for _ in range(num_ranks)),
        hidden=choose.choice((16, 512, 1024)),  # teams of one warp and of two
        experts=choose.choice((2, 5, 8)),
        topk=choose.choice((1, 2, 4)),
        routing=choose.choice(ROUTINGS),
        num_sms=choose.choice((3, 4)),
        send_chunk=1,
        slots=1,
        worst=choose.choice((0, 2)),
        biases=choose.choice((0, 2)),
        calls=2,
        nvl_bytes=1 << 21,
        direct_bytes=1 << 20,
        smem_bytes=choose.choice((None, 10000)),
        seed=seed,
    )


def test_staged_combine_with_blocks_that_only_add() -> None:
    run_seeds(range(200), staged_case, run_case, verify)


def weights_case(seed: int) -> Case:
    """Weights of fewer and of more selections than a warp has lanes, of up to eight ranks."""
    choose = random.Random(seed)
    num_ranks = choose.choice((2, 3, 5, 8))
    return Case(
        tuple(choose.choice((0, 1, 4, 11)) for _ in range(num_ranks)),
        hidden=choose.choice((16, 512)), experts=choose.choice((2, 8, 80)),
        topk=choose.choice((1, 3, 5, 8, 31, 32, 33, 64)), routing=choose.choice(ROUTINGS),
        num_sms=choose.choice((1, 3)), send_chunk=1, slots=1, biases=choose.choice((0, 1, 2)),
        by_selections=choose.choice((False, True)), calls=2, nvl_bytes=1 << 21,
        direct_bytes=choose.choice((0, 1 << 20)), seed=seed,
    )  # fmt: skip


def test_weights_of_any_number_of_selections() -> None:
    run_seeds(range(160), weights_case, run_case, verify)


def pieces_case(seed: int) -> Case:
    """Direct dispatch of rows that four stages of a warp have no room for: few blocks cut them."""
    choose = random.Random(seed)
    num_ranks = choose.choice((2, 3, 4))
    return Case(
        tuple(choose.choice((0, 1, 7, 12)) for _ in range(num_ranks)),
        hidden=choose.choice((512, 776, 1024)), experts=choose.choice((2, 5, 8)),
        topk=choose.choice((1, 2, 4)), dtype=choose.choice((torch.bfloat16, torch.float32)),
        routing=choose.choice(ROUTINGS), num_sms=choose.choice((1, 2, 3)), send_chunk=1, slots=1,
        fused_layout=choose.choice((False, True)), calls=2, nvl_bytes=1 << 21, direct_bytes=1 << 20,
        smem_bytes=choose.choice((10240, 12000)), seed=seed,
    )  # fmt: skip


def test_rows_in_pieces_and_whole() -> None:
    run_seeds(range(120), pieces_case, run_case, verify)


@pytest.mark.parametrize("fused", [False, True])
def test_channels_of_more_tokens_than_a_warp_has_lanes(fused: bool) -> None:
    """Two warps number a channel's tokens together, and a block several channels."""
    case = Case(
        (150, 70), hidden=16, experts=50, topk=2, num_sms=4, slots=2, send_chunk=1,
        nvl_bytes=1 << 18, fused_layout=fused,
    )  # fmt: skip
    for seed in range(4):
        verify(case, simulated(case, run_case, seed))


def test_more_chunks_than_the_publisher_is_told_of_at_once() -> None:
    """A sender waits until the publisher has read an entry before it fills it again."""
    case = Case(
        (600, 3), hidden=16, experts=4, topk=2, num_sms=3, slots=1, send_chunk=1,
        nvl_bytes=1 << 22, direct_bytes=1 << 21,
    )  # fmt: skip
    run_seeds(range(3), lambda seed: dataclasses.replace(case, seed=seed), run_case, verify)


def with_barriers(group: Any, case: Case) -> list[Received]:
    def one(buffer: deep_comm.Buffer, call: int) -> Received:
        buffer.barrier()
        return call_once(buffer, case, call)

    return run_calls(group, case, "cpu", one)


def test_barriers_stand_between_the_calls_of_every_schedule() -> None:
    run_seeds(range(800, 840), small_case, with_barriers, verify)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_eight_ranks(policy: str) -> None:
    case = Case(
        (6, 0, 3, 9, 1, 4, 2, 5), hidden=32, experts=19, topk=3, slots=2, send_chunk=1, num_sms=1,
        nvl_bytes=1 << 18,
    )  # fmt: skip
    run_policy(policy, case, run_case, verify)


def test_a_seed_replays_its_run_step_by_step() -> None:
    case = small_case(11)
    first, second = (simulated(case, run_case, 11) for _ in range(2))
    assert first.num_steps == second.num_steps
    assert first.time_ns == second.time_ns


@pytest.mark.parametrize("stalled", [0, 1, 2])
def test_a_rank_that_stalls_for_a_while_changes_nothing(stalled: int) -> None:
    case = Case(
        (7, 4, 9), experts=6, hidden=16, num_sms=1, slots=1, send_chunk=1, nvl_bytes=1 << 18
    )
    for seed in range(6):
        verify(case, simulated(case, run_case, seed, stalls=[(stalled, 200 * seed, 3000)]))


@pytest.mark.parametrize("seed", range(12))
def test_two_ranks_with_full_rings(seed: int) -> None:
    """Several warps at every end, and more rows in work than a ring has slots."""
    choose = random.Random(seed)
    case = Case(
        (64, choose.choice((64, 37))), hidden=choose.choice((64, 72)), experts=4, topk=2,
        send_chunk=choose.choice((1, 2, 4)), slots=choose.choice((6, 24)), num_sms=1, calls=2,
        nvl_bytes=1 << 20, direct_bytes=0, smem_bytes=choose.choice((None, 11000)), seed=seed,
    )  # fmt: skip
    verify(case, simulated(case, run_case, seed))


@pytest.mark.parametrize("seed", range(12))
def test_eight_ranks_with_full_rings(seed: int) -> None:
    """Enough rows a ring for every warp to be at work at once; small cases end before that."""
    case = Case(
        (64,) * 8, hidden=64, experts=32, topk=4, send_chunk=4, slots=16, num_sms=1,
        nvl_bytes=1 << 20, seed=seed,
    )  # fmt: skip
    verify(case, simulated(case, run_case, seed))
