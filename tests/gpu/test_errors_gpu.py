"""Silent ranks, killed ranks and bad routing on GPUs: an exception, and the process lives on.

The ranks are this file's own, so that nothing it does to them reaches other tests. That
the next test of the file runs in them again is part of what is tested: a failure must not
cost the process its device.
"""

import os
import signal
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from disagreeing import (
    build_alone,
    call_different_operations,
    enter_from_a_second_thread,
    give_different_dtypes,
)
from gpu_cases import on_own_device
from interrupted import (
    INTERNODE,
    NORMAL,
    handled_in_the_call,
    interrupted_then_closed,
    interrupted_then_reset,
    silent_then_reset,
)

import deep_comm
from deep_comm import errors, processes

TIMEOUT_S = 3.0


_pool: processes.Pool | None = None


@pytest.fixture(scope="module", autouse=True)
def _ranks_of_this_file() -> Iterator[None]:
    global _pool
    with processes.Pool(min(torch.cuda.device_count(), 8)) as _pool:
        yield
    _pool = None


def outcomes(fn, num_ranks: int, *args: object) -> list[processes.Outcome]:
    assert _pool is not None
    return _pool.outcomes(fn, num_ranks, *args, devices=range(num_ranks), timeout_s=200)


def dispatch(buffer: deep_comm.Buffer, topk_idx: torch.Tensor | None = None):
    ranks, device = buffer.group_size, buffer.device
    if topk_idx is None:
        topk_idx = torch.arange(ranks, device=device).expand(16, ranks).contiguous()
    x = torch.ones(topk_idx.shape[0], 512, dtype=torch.bfloat16, device=device)
    weights = torch.ones(topk_idx.shape, device=device)
    return buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, num_experts=ranks)


def make(group) -> deep_comm.Buffer:
    device = torch.device("cuda", group.rank())
    return deep_comm.Buffer(group, 64 << 20, device=device, timeout_s=TIMEOUT_S)


def test_a_silent_rank_is_named_and_the_context_survives(num_ranks: int) -> None:
    for outcome in outcomes(on_own_device, num_ranks, silent_then_reset, 1, TIMEOUT_S):
        assert outcome.error is None, outcome.traceback
        if outcome.rank != 1:
            peer, stage, word = outcome.value
            assert peer == 1 and stage and word


def _killed(group, victim: int):
    buffer = make(group)
    recv_x, _, _, _, handle, _ = dispatch(buffer)
    torch.cuda.synchronize()
    dist.barrier(group)
    if group.rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        buffer.combine(recv_x, handle)
        torch.cuda.synchronize()
        buffer.check()
    except errors.PeerTimeout as error:
        alive = torch.ones(4, device=buffer.device).sum().item() == 4
        return error.peer, alive
    return None, True


def test_survivors_of_a_killed_rank_name_it(num_ranks: int) -> None:
    victim = num_ranks - 1
    ended = outcomes(_killed, num_ranks, victim)
    assert "signal 9" in str(ended[victim].error)
    for outcome in ended[:victim]:
        assert outcome.error is None, outcome.traceback
        peer, alive = outcome.value
        assert alive and peer is not None
    assert victim in [outcome.value[0] for outcome in ended[:victim]]


def _bad_expert(group, bad: int):
    with make(group) as buffer:
        topk_idx = torch.zeros(16, 2, dtype=torch.int64, device=buffer.device)
        if group.rank() == 0:
            topk_idx[7, 1] = bad
        dispatch(buffer, topk_idx)
        torch.cuda.synchronize()
        buffer.check()


@pytest.mark.parametrize("bad", [-2, 1 << 20, (1 << 32) + 1])
def test_expert_index_out_of_range_is_reported(num_ranks: int, bad: int) -> None:
    ended = outcomes(_bad_expert, num_ranks, bad)
    assert isinstance(ended[0].error, errors.ExpertIndexError), repr(ended[0].error)
    for outcome in ended[1:]:
        assert isinstance(outcome.error, errors.DeepCommError), repr(outcome.error)


def _too_few_rows(group):
    with make(group) as buffer:
        device = buffer.device
        topk_idx = torch.zeros(16, 1, dtype=torch.int64, device=device)
        x = torch.ones(16, 512, dtype=torch.bfloat16, device=device)
        buffer.dispatch(
            x, topk_idx=topk_idx, topk_weights=torch.ones(16, 1, device=device),
            num_experts=group.size(), num_worst_tokens=17,
        )  # fmt: skip
        torch.cuda.synchronize()
        buffer.check()


def test_too_few_worst_case_rows_are_reported(num_ranks: int) -> None:
    ended = outcomes(_too_few_rows, num_ranks)
    assert isinstance(ended[0].error, errors.CapacityError), repr(ended[0].error)


@pytest.mark.parametrize("mode", [NORMAL, INTERNODE])
def test_a_signal_ends_the_wait_for_counts(num_ranks: int, mode: str) -> None:
    for outcome in outcomes(on_own_device, num_ranks, interrupted_then_reset, mode, 1, False):
        assert outcome.error is None, outcome.traceback


@pytest.mark.parametrize("fn", [interrupted_then_closed, handled_in_the_call])
def test_signals_in_the_wait_for_counts(num_ranks: int, fn) -> None:
    for outcome in outcomes(on_own_device, num_ranks, fn, 1):
        assert outcome.error is None, outcome.traceback


@pytest.mark.parametrize("ranks_per_node", [None, 1])
def test_ranks_that_call_different_operations_are_told_which(ranks_per_node: int | None) -> None:
    timeout_s = 1.0  # each of nine pairs lasts that long
    for outcome in outcomes(
        on_own_device, 2, call_different_operations, 1, ranks_per_node, timeout_s
    ):
        assert outcome.error is None, outcome.traceback


@pytest.mark.parametrize("ranks_per_node", [None, 1])
def test_ranks_that_give_different_dtypes_are_told_which(ranks_per_node: int | None) -> None:
    for outcome in outcomes(on_own_device, 2, give_different_dtypes, 1, ranks_per_node):
        assert outcome.error is None, outcome.traceback


def test_two_threads_cannot_be_in_one_buffer() -> None:
    ended = outcomes(on_own_device, 2, enter_from_a_second_thread)
    assert [outcome.value for outcome in ended] == [[2, 2, 2], [2, 2, 0]]


def test_a_rank_that_builds_no_buffer_is_named_within_the_deadline(num_ranks: int) -> None:
    for outcome in outcomes(on_own_device, num_ranks, build_alone):
        assert outcome.error is None, outcome.traceback
        assert max(outcome.value) < 2.4
