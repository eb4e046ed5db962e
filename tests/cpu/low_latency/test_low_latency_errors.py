"""Bad input, hooks in odd orders, silent peers: low-latency calls fail clearly or not at all."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from low_latency import LowLatencyCase, run_pairs, verify
from on_buffers import on_buffers
from run_by import run_by

from deep_comm import (
    ArgumentError,
    Buffer,
    BufferTooSmall,
    ConfigMismatch,
    ExpertIndexError,
    PeerTimeout,
    _simt_tests,
)
from deep_comm.settings import checks

CASE = LowLatencyCase((4, 4), 4)


def together(fn: Callable[[Buffer], Any], num_ranks: int = 2, **options: Any) -> list:
    return on_buffers(
        fn, num_ranks, 0, CASE.num_bytes, low_latency_mode=True, num_max_experts=64, **options
    )


def together_then_pairs(body: Callable[[Buffer], None], **options: Any) -> None:
    """The body as a Buffer's first call and behind others; pairs of calls go on after it."""
    for num_before in (0, 1):

        def main(buffer: Buffer, num_before: int = num_before) -> list:
            before = [run_pairs(buffer, CASE) for _ in range(num_before)]
            body(buffer)
            return [*before, run_pairs(buffer, CASE)]

        for pairs in zip(*together(main, **options), strict=True):
            verify(CASE, pairs)


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("wrong", ["64", None, 2.5, 0, 2**31])
def test_a_size_hint_names_what_is_no_size(position: int, wrong: Any) -> None:
    sizes: list[Any] = [8, 128, 2, 8]
    sizes[position] = wrong
    name = ("num_max_dispatch_tokens_per_rank", "hidden", "num_ranks", "num_experts")[position]
    with pytest.raises(ArgumentError, match=f"^{name} must be an integer of .*got .*{wrong}"):
        Buffer.get_low_latency_rdma_size_hint(*sizes)


def dispatch(buffer: Buffer, **changes: Any) -> Any:
    arguments = {
        "x": torch.zeros(3, 128, dtype=torch.bfloat16),
        "topk_idx": torch.zeros(3, 2, dtype=torch.int64),
        "num_max_dispatch_tokens_per_rank": 4,
        "num_experts": 8,
        **changes,
    }
    return buffer.low_latency_dispatch(**arguments)


@run_by(together)
def test_a_region_that_is_too_small_says_what_would_do(buffer: Buffer, /) -> None:
    with pytest.raises(BufferTooSmall, match="num_rdma_bytes") as caught:
        dispatch(buffer, num_max_dispatch_tokens_per_rank=4000)
    assert caught.value.needed_bytes > CASE.num_bytes


@run_by(on_buffers, 2, 0, 1 << 20)
def test_low_latency_calls_need_low_latency_mode(buffer: Buffer, /) -> None:
    with pytest.raises(ArgumentError, match="low_latency_mode"):
        dispatch(buffer)


def test_as_many_experts_as_a_block_can_count_twice() -> None:
    """Fewer than normal mode takes, and as many as the kernels really do: the engine refuses one
    more by itself."""
    most, hidden = checks.MAX_EXPERTS, 64
    x, idx = torch.ones(2, hidden, dtype=torch.bfloat16), torch.zeros(2, 2, dtype=torch.int64)
    num_bytes = Buffer.get_low_latency_rdma_size_hint(2, hidden, 1, most)

    def main(buffer: Buffer) -> None:
        engine = buffer._context.engine
        fewer = engine.low_latency_max_experts(num_topk=2)
        assert most // 2 - 1024 < fewer < most
        buffer.low_latency_dispatch(x, idx, 2, fewer, use_fp8=False)
        launches = buffer.runtime.num_launches
        for too_many in (fewer + 1, most):
            with pytest.raises(ArgumentError, match=f"must be at most {fewer} .*{too_many}"):
                buffer.low_latency_dispatch(x, idx, 2, too_many, use_fp8=False)
        with pytest.raises(ArgumentError, match="num_experts"):
            buffer.low_latency_num_blocks(2, hidden, 2, fewer + 1)
        assert buffer.runtime.num_launches == launches
        shape = dict(num_max_tokens=2, hidden=hidden, num_topk=2, num_experts=fewer + 1)
        with pytest.raises(ValueError, match="must be fewer.*shared memory"):
            _simt_tests.plan_low_latency(engine.calls, **shape)

    on_buffers(main, 1, 0, num_bytes, low_latency_mode=True, num_max_experts=most)


def test_calls_between_nodes_count_experts_once() -> None:
    most, hidden = checks.MAX_EXPERTS, 64
    num_bytes = Buffer.get_low_latency_rdma_size_hint(2, hidden, 2, most, ranks_per_node=1)

    def main(buffer: Buffer) -> None:
        x = torch.ones(1, hidden, dtype=torch.bfloat16)
        idx = torch.tensor([[0, most - 1]])
        counts = buffer.low_latency_dispatch(x, idx, 2, most, use_fp8=False)[1]
        assert counts.sum() == 2  # of either rank

    on_buffers(main, 2, 0, num_bytes, low_latency_mode=True, num_max_experts=most, ranks_per_node=1)


def test_masks_belong_to_low_latency_mode() -> None:
    with pytest.raises(ArgumentError, match="enable_shrink"):
        Buffer(None, enable_shrink=True)


@pytest.mark.parametrize("bad", [8, -2, -(2**31), 2**32, 2**32 - 2])
@run_by(together_then_pairs)
def test_a_bad_expert_index_is_raised_where_it_is_and_the_buffer_goes_on(
    buffer: Buffer, /, bad: int
) -> None:
    """It stands before an index of the same token that is right, and counts with all others."""
    idx = torch.zeros(3, 2, dtype=torch.int64)
    if buffer.rank == 1:
        idx[0, 0] = bad
        with pytest.raises(ExpertIndexError) as caught:
            dispatch(buffer, topk_idx=idx)
        assert (caught.value.position, caught.value.value) == (0, bad)
    else:
        _, counts, *_ = dispatch(buffer, topk_idx=idx)
        assert counts.tolist() == [6, 0, 0, 0]


@run_by(together_then_pairs)
def test_ranks_that_disagree_are_told_and_reset_brings_the_buffer_back(buffer: Buffer, /) -> None:
    """Each has written rows into the other's memory that nobody will read."""
    for _ in range(2):
        with pytest.raises(ConfigMismatch, match=r"reset\(\)") as caught:
            dispatch(buffer, num_experts=8 - buffer.rank)
        assert caught.value.needs_reset
    buffer.reset()


@pytest.mark.parametrize("use_ue8m0", [False, True])
@run_by(together_then_pairs)
def test_ranks_that_round_scales_differently_are_told(buffer: Buffer, /, use_ue8m0: bool) -> None:
    """Exponents of scales that nobody has rounded would be other scales."""
    rounded = dict(round_scale=True, use_ue8m0=use_ue8m0) if buffer.rank == 1 else {}
    with pytest.raises(ConfigMismatch, match="rows and their scales"):
        dispatch(buffer, use_fp8=True, **rounded)
    buffer.reset()


@run_by(together_then_pairs, timeout_s=2.0)
def test_a_silent_rank_becomes_a_timeout_and_reset_brings_the_buffer_back(
    buffer: Buffer, /
) -> None:
    if buffer.rank == 0:
        with pytest.raises(PeerTimeout) as caught:
            dispatch(buffer)
        assert caught.value.peer == 1
    buffer.group.barrier()
    buffer.reset()


@run_by(together_then_pairs)
def test_the_next_call_but_one_is_refused_until_the_hook_has_run(buffer: Buffer, /) -> None:
    """It has the same half, and would wait for all ranks' hooks in vain."""
    idx, weights = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    for _ in range(3):
        hook = dispatch(buffer, use_fp8=False, return_recv_hook=True)[4]
        rows, _, handle, _, _ = dispatch(buffer, use_fp8=False)
        with pytest.raises(ArgumentError, match="hooks have not run"):
            dispatch(buffer, use_fp8=False)
        hook()
        arguments = (rows, idx, weights, handle)
        hook = buffer.low_latency_combine(*arguments, return_recv_hook=True)[2]
        buffer.low_latency_combine(*arguments)
        with pytest.raises(ArgumentError, match="hooks have not run"):
            buffer.low_latency_combine(*arguments)
        dispatch(buffer, use_fp8=False)  # another kind
        hook()


@run_by(together_then_pairs)
def test_combine_before_the_hook_of_its_dispatch_is_refused(buffer: Buffer, /) -> None:
    idx = torch.zeros(3, 2, dtype=torch.int64)
    weights = torch.ones(3, 2)
    for _ in range(2):
        recv_x, _, handle, _, hook = dispatch(buffer, use_fp8=False, return_recv_hook=True)
        with pytest.raises(ArgumentError, match="call it first"):
            buffer.low_latency_combine(recv_x, idx, weights, handle)
        hook()
        buffer.low_latency_combine(recv_x, idx, weights, handle)
    recv_x, _, handle, _, _ = dispatch(buffer, use_fp8=False, return_recv_hook=True)
    buffer.reset()
    with pytest.raises(ArgumentError, match="forgotten"):
        buffer.low_latency_combine(recv_x, idx, weights, handle)


@run_by(together_then_pairs, timeout_s=1.0)
def test_combine_of_a_dispatch_whose_hook_raised_is_refused(buffer: Buffer, /) -> None:
    """Its slots are whatever the memory held before."""
    idx, weights = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    if buffer.rank == 0:
        recv_x, _, handle, _, hook = dispatch(buffer, use_fp8=False, return_recv_hook=True)
        with pytest.raises(PeerTimeout):
            hook()
    buffer.group.barrier()
    buffer.reset()
    if buffer.rank == 0:
        with pytest.raises(ArgumentError, match="the hook of this one raised"):
            buffer.low_latency_combine(recv_x, idx, weights, handle)


@run_by(together_then_pairs)
def test_a_report_that_nobody_will_make_is_refused(buffer: Buffer, /) -> None:
    dispatch(buffer)
    with pytest.raises(ArgumentError, match="report_num_tokens must be True"):
        buffer.wait_low_latency_num_tokens()
    hook = dispatch(buffer, report_num_tokens=True, return_recv_hook=True)[4]
    with pytest.raises(ArgumentError, match="whose hook has run"):
        buffer.wait_low_latency_num_tokens()
    hook()
    assert buffer.wait_low_latency_num_tokens() == 3


@run_by(together)
def test_rows_of_zero_copy_end_with_the_buffer(buffer: Buffer, /) -> None:
    handle = dispatch(buffer, use_fp8=False)[2]
    rows = weakref.ref(buffer.get_next_low_latency_combine_buffer(handle))
    assert rows() is not None
    buffer.destroy()
    assert rows() is None


@run_by(together_then_pairs)
def test_a_region_is_not_cleaned_under_a_call_whose_hook_has_not_run(buffer: Buffer, /) -> None:
    buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True)
    hook = dispatch(buffer, return_recv_hook=True)[4]
    with pytest.raises(ArgumentError, match="hook"):
        buffer.clean_low_latency_buffer(4, 128, 8)
    hook()
    buffer.clean_low_latency_buffer(4, 128, 8)
