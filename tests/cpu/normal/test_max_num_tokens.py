"""Every rank learns, from the exchange itself, the most tokens that any rank had."""

import random
from typing import Any

import forked
import pytest
import torch
from on_buffers import on_buffers
from run_by import run_by

import deep_comm
from deep_comm import ArgumentError, PeerTimeout, local, simulate

HIDDEN, EXPERTS, TOPK, MAX_TOKENS = 16, 6, 2, 9
NUM_RDMA_BYTES = deep_comm.Buffer.get_low_latency_rdma_size_hint(MAX_TOKENS, HIDDEN, 4, EXPERTS)


def _inputs(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.ones(num_tokens, HIDDEN, dtype=torch.bfloat16)
    idx = (torch.arange(num_tokens * TOPK) % EXPERTS).view(num_tokens, TOPK)
    return x, idx, torch.ones(num_tokens, TOPK)


def learned(group: Any, steps: list[list[int]], nowhere: bool = False) -> list[int]:
    """What this rank learns in steps of alternating kinds; steps[i][r]: tokens of rank r."""
    found = []
    with deep_comm.Buffer(
        group, 1 << 18, NUM_RDMA_BYTES, low_latency_mode=True, device="cpu", timeout_s=30
    ) as buffer:
        for step, tokens in enumerate(steps):
            x, idx, weights = _inputs(tokens[buffer.rank])
            if nowhere:
                idx = torch.full_like(idx, -1)
            if step % 3 == 0:
                handle = buffer.dispatch(
                    x, topk_idx=idx, topk_weights=weights, num_experts=EXPERTS
                )[4]
                assert handle is not None and handle.max_num_tokens is not None
                found.append(handle.max_num_tokens)
                continue
            *_, hook = buffer.low_latency_dispatch(
                x, idx, MAX_TOKENS, EXPERTS, use_fp8=False, topk_weights=weights,
                return_recv_hook=step % 3 == 1, report_num_tokens=True,
            )  # fmt: skip
            if hook is not None:
                hook()
            found.append(buffer.wait_low_latency_num_tokens())
    return found


def _steps(seed: int, num_ranks: int, count: int) -> list[list[int]]:
    choose = random.Random(seed)
    return [[choose.randint(0, MAX_TOKENS) for _ in range(num_ranks)] for _ in range(count)]


@pytest.mark.parametrize("nowhere", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_threads_learn_the_maximum(num_ranks: int, nowhere: bool) -> None:
    steps = _steps(num_ranks, num_ranks, 12)
    expected = [max(tokens) for tokens in steps]
    assert (
        local.run(lambda group: learned(group, steps, nowhere), num_ranks, timeout_s=60)
        == [expected] * num_ranks
    )


def test_processes_learn_the_maximum() -> None:
    steps = _steps(17, 3, 7)
    assert forked.run(learned, 3, steps, timeout_s=100) == [[max(tokens) for tokens in steps]] * 3


def test_every_schedule_tells_the_maximum() -> None:
    for seed in range(60):
        num_ranks = 1 + seed % 4
        steps = _steps(seed, num_ranks, 5)
        results = simulate.run(
            lambda group, steps=steps: learned(group, steps), num_ranks, seed, timeout_s=60
        )
        assert list(results) == [[max(tokens) for tokens in steps]] * num_ranks, f"seed {seed}"


def test_a_dispatch_in_worst_case_mode_does_not_wait_and_does_not_know() -> None:
    def main(buffer: deep_comm.Buffer) -> Any:
        x, idx, weights = _inputs(3)
        return buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, num_experts=EXPERTS, num_worst_tokens=8
        )[4].max_num_tokens

    assert on_buffers(main, 2, 1 << 18, timeout_s=30) == [None, None]


@run_by(on_buffers, 2, 1 << 18, NUM_RDMA_BYTES, low_latency_mode=True, timeout_s=0.3)
def test_asking_without_a_report_and_a_silent_peer_are_errors(buffer: deep_comm.Buffer, /) -> None:
    with pytest.raises(ArgumentError, match="report_num_tokens must be True"):
        buffer.wait_low_latency_num_tokens()
    buffer.group.barrier()
    if buffer.rank == 0:
        x, idx, weights = _inputs(3)
        with pytest.raises(PeerTimeout) as caught:
            buffer.low_latency_dispatch(
                x, idx, MAX_TOKENS, EXPERTS, use_fp8=False, topk_weights=weights,
                report_num_tokens=True,
            )  # fmt: skip
        assert caught.value.peer == 1
        with pytest.raises(PeerTimeout):
            buffer.wait_low_latency_num_tokens()
    buffer.group.barrier()
