"""Several Buffers in one process: over the same group, over parts of it, interleaved."""

import pytest
import torch
from cases import Case
from roundtrip import run_case, verify
from run_by import run_by

import deep_comm
from deep_comm import local
from deep_comm.errors import HandleMismatch


def test_interleaved_dispatches_keep_their_own_handles() -> None:
    def fn(group):
        with (
            deep_comm.Buffer(group, 4 << 20, device="cpu") as one,
            deep_comm.Buffer(group, 4 << 20, device="cpu") as two,
        ):
            x = torch.full((10, 64), float(one.rank + 1), dtype=torch.bfloat16)
            idx_one = torch.arange(10).unsqueeze(1) % 2
            idx_two = (torch.arange(10).unsqueeze(1) + 1) % 2
            weights = torch.ones(10, 1)
            got_one = one.dispatch(x, topk_idx=idx_one, topk_weights=weights, num_experts=2)
            got_two = two.dispatch(2 * x, topk_idx=idx_two, topk_weights=weights, num_experts=2)
            sum_two = two.combine(got_two[0], got_two[4])[0]
            sum_one = one.combine(got_one[0], got_one[4])[0]
            return torch.equal(sum_one, x) and torch.equal(sum_two, 2 * x)

    assert local.run(fn, 2, timeout_s=60) == [True, True]


def test_a_buffer_over_part_of_the_group() -> None:
    inner = Case((8, 15), experts=4, seed=3)

    def fn(group):
        if group.rank() in (1, 3):
            return run_case(group.subgroup([1, 3]), inner)
        return None

    results = local.run(fn, 4, timeout_s=60)
    assert results[0] is None and results[2] is None
    verify(inner, [results[1], results[3]])


@run_by(local.run, 3, timeout_s=60)
def test_a_handle_of_the_same_ranks_in_another_order_is_named_as_that(group, /) -> None:
    """No rank was ever absent; rank 1 is rank 1 in both."""
    other = group.subgroup([2, 1, 0])
    with (
        deep_comm.Buffer(group, 4 << 20, device="cpu") as one,
        deep_comm.Buffer(other, 4 << 20, device="cpu") as two,
    ):
        x, idx = torch.ones(3, 64, dtype=torch.bfloat16), torch.arange(3).unsqueeze(1)
        received = one.dispatch(x, topk_idx=idx, num_experts=3)
        match = "of this rank" if one.rank != 1 else "one of other ranks"
        with pytest.raises(HandleMismatch, match=match):
            two.combine(received[0], received[4])


@run_by(local.run, 3, timeout_s=60)
def test_a_low_latency_handle_is_good_in_buffers_of_the_same_ranks_only(group, /) -> None:
    sizes = dict(low_latency_mode=True, device="cpu")
    num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(3, 64, 3, 6)
    with (
        deep_comm.Buffer(group, 0, num_bytes, **sizes) as one,
        deep_comm.Buffer(group, 0, num_bytes, **sizes) as same,
        deep_comm.Buffer(group.subgroup([2, 1, 0]), 0, num_bytes, **sizes) as turned,
        deep_comm.Buffer(group.subgroup([group.rank()]), 0, num_bytes, **sizes) as alone,
    ):
        x = torch.full((3, 64), float(one.rank + 1), dtype=torch.bfloat16)
        idx, weights = torch.arange(3).unsqueeze(1), torch.ones(3, 1)
        rows, _, handle, _, _ = one.low_latency_dispatch(x, idx, 3, 6, use_fp8=False)
        others = (
            (turned, "of this rank" if one.rank != 1 else "one of other ranks"),
            (alone, "this group of 1 ranks; got 3 ranks"),
        )
        for buffer, match in others:
            with pytest.raises(HandleMismatch, match=match):
                buffer.low_latency_combine(rows, idx, weights, handle)
            with pytest.raises(HandleMismatch, match=match):
                buffer.get_next_low_latency_combine_buffer(handle)
        for buffer in (same, one):
            assert torch.equal(buffer.low_latency_combine(rows, idx, weights, handle)[0], x)
