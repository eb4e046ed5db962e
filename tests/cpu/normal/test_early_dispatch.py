"""Rows may begin to move before the host knows how many come: docs/design/0009."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Case
from on_buffers import on_buffers
from roundtrip import run_case, verify
from schedules import some_of
from small_calls import routing_bytes

import deep_comm
from deep_comm import errors, simulate

H, E = 64, 8
FIRST_GUESS = 2  # launches of a dispatch whose outputs were reserved well: notify and dispatch


def inputs(num_tokens: int) -> dict[str, Any]:
    """Every token to two experts of two ranks."""
    x = torch.arange(num_tokens * H).view(num_tokens, H).bfloat16()
    idx = torch.tensor([[0, E - 1]]).expand(num_tokens, 2).clone()
    return dict(x=x, topk_idx=idx, topk_weights=torch.ones(num_tokens, 2), num_experts=E)


def launches_of(buffer: deep_comm.Buffer, **arguments: Any) -> tuple[int, Any]:
    assert buffer.runtime is not None
    before = buffer.runtime.num_launches
    result = buffer.dispatch(**arguments)
    return buffer.runtime.num_launches - before, result


def lies_in_region(buffer: deep_comm.Buffer, tensor: torch.Tensor) -> bool:
    heap = buffer._context.heap
    assert tensor.numel() > 0  # or it has no place
    return heap.base <= tensor.data_ptr() < heap.base + heap.num_bytes


def test_layout_counts_and_rows_take_two_launches() -> None:
    def rank_main(buffer):
        free = buffer._context.region.num_free_bytes
        launches, received = launches_of(buffer, **inputs(10 + buffer.rank))
        assert lies_in_region(buffer, received[0])
        # Reserved for more rows than came, kept for those that came.
        # Rows, indices and weights, each in whole lines.
        output = sum(-(-21 * row // 128) * 128 for row in (2 * H, 2 * 8, 2 * 4))
        assert received[0].shape[0] == 21
        # The source tokens are one line.
        used = output + routing_bytes(received[4]) + 128
        assert free - buffer._context.region.num_free_bytes == used
        return launches

    assert (
        on_buffers(rank_main, 2, 2 << 20, num_direct_bytes=1 << 20, timeout_s=20)
        == [FIRST_GUESS] * 2
    )


def test_without_a_region_nothing_is_launched_in_hope() -> None:
    def rank_main(buffer):
        return launches_of(buffer, **inputs(30))[0]

    assert on_buffers(rank_main, 3, 2 << 20, num_direct_bytes=0, timeout_s=20) == [2] * 3


@pytest.mark.parametrize("seed", some_of(range(40)))
def test_schedules_of_calls_whose_guess_is_wrong(seed: int) -> None:
    """Ranks of few tokens receive many: the decision of notify falls, and
    the next call's is another.
    """
    tokens = ((1, 9, 0), (0, 0, 12), (2, 7, 1), (11, 1))[seed % 4]
    case = Case(
        tokens, hidden=16, experts=5, topk=2, num_sms=2 + 2 * (seed % 2), slots=3, send_chunk=1,
        calls=3, fused_layout=seed % 3 != 0, nvl_bytes=1 << 18, direct_bytes=1 << 17,
        seed=seed, routing=("random", "skewed", "one_expert")[seed % 3],
    )  # fmt: skip
    verify(
        case,
        simulate.run(lambda group: run_case(group, case), case.num_ranks, seed, timeout_s=60),
    )


@pytest.mark.parametrize("seed", some_of(range(60)))
def test_a_bad_index_reaches_slow_ranks_although_fast_ones_go_on(seed: int) -> None:
    """The next notify's words must not hide from a slow rank that this one failed."""

    def rank_main(group):
        with deep_comm.Buffer(
            group, 1 << 18, num_direct_bytes=1 << 17, device="cpu", timeout_s=20
        ) as buffer:
            arguments = inputs(3)
            good = arguments["topk_idx"].clone()
            if group.rank() == 1:
                arguments["topk_idx"][2, 1] = E
            with pytest.raises(errors.ExpertIndexError):
                buffer.dispatch(**arguments)
            arguments["topk_idx"] = good
            received = buffer.dispatch(**arguments)
            combined = buffer.combine(received[0], received[4])[0]
            assert torch.equal(combined, 2 * arguments["x"])

    simulate.run(rank_main, 3, seed, timeout_s=60)
