"""What ElasticBuffer refuses, by name, what it cannot offer, and what it says of its resources."""

from __future__ import annotations

import numpy
import pytest
import torch
from elastic import alone
from run_by import run_by

from deep_comm import UnsupportedError, errors, local
from deep_comm.compat.elastic import ElasticBuffer

import deep_ep  # isort: skip


pytestmark = pytest.mark.usefixtures("on_the_host")


@run_by(alone)
def test_rules_of_events(buffer, x, idx, /) -> None:
    event = ElasticBuffer.capture()
    with pytest.raises(errors.ArgumentError, match="previous_event"):
        buffer.dispatch(x, idx, num_experts=4, previous_event=event)
    for is_async in (False, True):
        recv, _, _, handle, done = buffer.dispatch(
            x, idx, num_experts=4, previous_event=event, allocate_on_comm_stream=True,
            async_with_compute_stream=is_async, previous_event_before_epilogue=event,
        )  # fmt: skip
        assert isinstance(done, deep_ep.EventOverlap)
        with done:
            pass
        buffer.combine(
            recv, handle, previous_event=event, allocate_on_comm_stream=True,
            async_with_compute_stream=is_async, previous_event_before_epilogue=event,
        )  # fmt: skip
        # Unlike V1: without an event it may stand alone.
        buffer.combine(recv, handle, allocate_on_comm_stream=True)


@pytest.mark.parametrize(
    "stats", [torch.zeros(4, dtype=torch.int64), torch.zeros(5, dtype=torch.int32), [0] * 4]
)
@run_by(alone)
def test_statistics_that_do_not_fit_are_refused_before_anything_is_sent(
    buffer, x, idx, /, stats
) -> None:
    with pytest.raises(errors.ArgumentError, match="cumulative_local_expert_recv_stats"):
        buffer.dispatch(x, idx, num_experts=4, cumulative_local_expert_recv_stats=stats)
    stats_of_two = torch.zeros(4, 2, dtype=torch.int32)[:, 0]
    _, _, _, handle, _ = buffer.dispatch(
        x, idx, num_experts=4, cumulative_local_expert_recv_stats=stats_of_two
    )
    assert torch.equal(stats_of_two, handle.num_unaligned_recv_tokens_per_expert)


@run_by(alone)
def test_cached_dispatch_says_what_does_not_fit_its_handle(buffer, x, idx, /) -> None:
    recv, recv_idx, _, handle, _ = buffer.dispatch(x, idx, num_experts=4, expert_alignment=2)
    # Neither num_sms nor num_experts is needed beside a handle.
    assert handle.num_sms == buffer.get_theoretical_num_sms(4, 2)
    again, again_idx, _, same, _ = buffer.dispatch(x, handle=handle)
    assert again.equal(recv) and again_idx is recv_idx and same is handle
    buffer.dispatch(
        x, handle=handle, num_experts=4, expert_alignment=2, num_max_tokens_per_rank=8,
        num_sms=handle.num_sms, do_cpu_sync=False,
    )  # fmt: skip
    for options, name in (
        ({"topk_idx": idx}, "topk_idx"),
        ({"num_experts": 5}, "num_experts"),
        ({"expert_alignment": 4}, "expert_alignment"),
        ({"num_max_tokens_per_rank": 16}, "num_max_tokens_per_rank"),
        ({"do_cpu_sync": True}, "do_cpu_sync"),
        ({"topk_weights": torch.ones(4, 3)}, "topk_weights"),
        ({"topk_weights": torch.ones(4, 2, dtype=torch.float64)}, "topk_weights"),
        ({"cumulative_local_expert_recv_stats": torch.zeros(4)}, "cumulative"),
    ):
        with pytest.raises(ValueError, match=name):
            buffer.dispatch(x, handle=handle, **options)


@run_by(alone)
def test_arguments_are_checked_before_anything_is_sent(buffer, x, idx, /) -> None:
    for options, name in (
        ({}, "num_experts"),
        ({"num_experts": 4, "topk_idx": None}, "topk_idx"),
        ({"num_experts": 4, "num_max_tokens_per_rank": 3}, "x"),
        ({"num_experts": 4, "num_max_tokens_per_rank": 0}, "num_max_tokens_per_rank"),
        ({"num_experts": 4, "num_max_tokens_per_rank": numpy.int64(8)}, "an integer .* of type"),
        ({"num_experts": 4, "expert_alignment": 0}, "expert_alignment"),
        ({"num_experts": 4, "do_zero_padding": True}, "do_zero_padding needs do_expand"),
        ({"num_experts": 4, "num_sms": -2}, "num_sms"),
        ({"num_experts": 4, "handle": (1, 2)}, "handle"),
    ):
        with pytest.raises(ValueError, match=name):
            buffer.dispatch(x, **{"topk_idx": idx, **options})
    recv, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=4, do_expand=True)
    with pytest.raises(ValueError, match="topk_weights"):
        buffer.combine(recv, handle, topk_weights=torch.ones(3))
    with pytest.raises(ValueError, match="x"):
        buffer.combine(recv[0], handle)
    with pytest.raises(ValueError, match="handle"):
        buffer.combine(recv, handle._native)
    for wrong in (torch.tensor(1.0), [x]):
        with pytest.raises(ValueError, match="^x "):
            buffer.dispatch(wrong, idx, num_experts=4)
    for options, name in (
        ({"topk_idx": idx[:, 0]}, "topk_idx"),
        ({"topk_idx": [1]}, "topk_idx"),
        ({"num_experts": "4"}, "num_experts"),
    ):
        with pytest.raises(ValueError, match=name):
            given = {"topk_idx": idx, "num_experts": 4, **options}
            buffer.dispatch(x, **given, do_cpu_sync=False, do_expand=True)


@pytest.mark.parametrize("allow_multiple_reduction", [False, True])
@run_by(local.run, 2, timeout_s=60)
def test_combine_refuses_the_same_by_either_way(group, /, allow_multiple_reduction: bool) -> None:
    num_tokens, hidden = 8, 64
    buffer = ElasticBuffer(
        group, num_bytes=4 << 20, num_max_tokens_per_rank=num_tokens,
        allow_multiple_reduction=allow_multiple_reduction,
    )  # fmt: skip
    x = torch.ones(num_tokens, hidden, dtype=torch.bfloat16)
    idx = torch.arange(num_tokens * 2).view(num_tokens, 2) % 4
    recv, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=4, do_expand=True)
    ones = torch.ones_like(x)
    for bias in (ones[:1], ones[0], ones.float(), (ones, ones, ones), (ones, ones[:1])):
        with pytest.raises(errors.ArgumentError, match=r"^bias(\[\d\])? "):
            buffer.combine(recv, handle, bias=bias)
    with pytest.raises(errors.HandleMismatch, match="^handle "):
        buffer.combine(recv[:-1], handle)
    assert torch.equal(buffer.combine(recv, handle, bias=(ones, ones))[0], 4 * x)
    group.barrier()


@run_by(local.run, 2, timeout_s=60)
def test_weights_of_a_cached_dispatch_are_checked_first_and_lie_as_the_rows(group, /) -> None:
    num_tokens, hidden = 8, 64
    buffer = ElasticBuffer(group, num_bytes=4 << 20, num_max_tokens_per_rank=num_tokens)
    x = torch.randn(num_tokens, hidden).bfloat16()
    idx = torch.arange(num_tokens * 2).view(num_tokens, 2) % 4
    weights = torch.rand(num_tokens, 2)
    options = dict(do_expand=True, do_zero_padding=True)
    recv, _, recv_weights, handle, _ = buffer.dispatch(x, idx, weights, num_experts=4, **options)
    if group.rank() == 0:  # alone: nothing may have been launched
        for wrong in (weights.double(), weights[:-1], weights[:, :1].contiguous()):
            with pytest.raises(ValueError, match="^topk_weights "):
                buffer.dispatch(x, topk_weights=wrong, handle=handle, **options)
    for _ in range(2):
        again, _, again_weights, _, _ = buffer.dispatch(
            x, topk_weights=weights, handle=handle, **options
        )
        assert torch.equal(again, recv) and torch.equal(again_weights, recv_weights)
        # A program may say how the rows of its combine lie. Those of dispatch lie as ever.
        metadata = handle.recv_src_metadata
        metadata[:, 2:] = -1
        metadata[:, 2] = torch.arange(len(metadata))
    group.barrier()


@pytest.mark.parametrize(
    "name",
    [
        "engram_write", "engram_fetch", "pp_set_config", "pp_send", "pp_recv",
        "create_agrs_session", "destroy_agrs_session", "agrs_new_session", "agrs_set_config",
        "agrs_get_inplace_tensor", "all_gather", "get_engram_storage_size_hint",
        "get_pp_buffer_size_hint", "get_agrs_num_max_session_bytes", "get_agrs_buffer_size_hint",
    ],
)  # fmt: skip
def test_what_cannot_be_offered_says_so(name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        getattr(ElasticBuffer, name)(None, 1)


@run_by(local.run, 1, timeout_s=60)
def test_memory_on_the_host_cannot_be_offered(group, /) -> None:
    with pytest.raises(UnsupportedError, match="num_cpu_bytes"):
        ElasticBuffer(group, num_bytes=2 << 20, num_cpu_bytes=2 << 20)
    with pytest.raises(ValueError, match="hidden"):
        ElasticBuffer(group, num_max_tokens_per_rank=4)


@run_by(local.run, 2, timeout_s=60)
def test_sizes_domains_and_resources(group, /) -> None:
    size = ElasticBuffer.get_buffer_size_hint(group, 64, 256, num_topk=4)
    assert size % (2 << 20) == 0 and size > group.size() * 64 * 512
    assert ElasticBuffer.get_buffer_size_hint(group, 1 << 16, 256, 4, True) < (
        ElasticBuffer.get_buffer_size_hint(group, 1 << 16, 256, 4)
    )
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=64, hidden=256, num_topk=4)
    assert buffer.num_bytes == size
    assert buffer.get_physical_domain_size() == (1, 2) == buffer.get_logical_domain_size()
    assert deep_ep.get_physical_domain_size(group) == (1, 2)
    assert deep_ep.get_logical_domain_size(group, allow_hybrid_mode=False) == (1, 2)
    assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == (0, group.rank())
    num_sms = buffer.get_theoretical_num_sms(256, 8)
    assert num_sms >= 1
    # What a call may be given is at most what there is.
    assert 0 < buffer.get_theoretical_num_qps(num_sms) <= buffer.num_allocated_qps
    buffer.barrier()
    buffer.destroy()
    buffer.destroy()
    assert buffer.runtime is None


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_domains_of_several_nodes(is_hybrid: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_RANKS_PER_NODE", "2")
    logical = (2, 2) if is_hybrid else (1, 4)

    def fn(group):
        assert deep_ep.get_physical_domain_size(group) == (2, 2)
        assert deep_ep.get_logical_domain_size(group, is_hybrid) == logical
        buffer = ElasticBuffer(
            group, num_bytes=16 << 20, num_max_tokens_per_rank=8, allow_hybrid_mode=is_hybrid,
            num_allocated_qps=6,
        )  # fmt: skip
        rank = group.rank()
        assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks) == logical
        assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == divmod(rank, logical[1])
        assert buffer.get_physical_domain_size() == (2, 2)
        assert buffer.get_logical_domain_size() == logical
        assert buffer.get_theoretical_num_qps(4) == 6
        assert (
            buffer.runtime.get_num_rdma_ranks() == 2 and buffer.runtime.get_rdma_rank() == rank // 2
        )
        engine = buffer._buffer
        assert engine.num_nvl_bytes + engine.num_rdma_bytes == buffer.num_bytes == 16 << 20
        assert min(engine.num_nvl_bytes, engine.num_rdma_bytes) > 1 << 20
        x = torch.full((3, 64), rank + 1.0, dtype=torch.bfloat16)
        idx = torch.tensor([[0, 5], [7, 2], [-1, 4]])
        recv, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=8, num_sms=4)
        # What a backward pass hands back: two SMs make a channel between nodes.
        assert handle.num_sms == 2 * handle._native.num_channels
        again, *_ = buffer.dispatch(x, handle=handle, num_sms=handle.num_sms, do_cpu_sync=False)
        assert again.equal(recv)
        copies = torch.tensor([2.0, 2.0, 1.0]).view(-1, 1)
        assert buffer.combine(recv, handle)[0].float().equal(x.float() * copies)
        # Expanded, padded with zeros, behind events, beside the compute stream.
        event = ElasticBuffer.capture()
        recv, _, _, handle, done = buffer.dispatch(
            x, idx, num_experts=8, expert_alignment=16, do_expand=True, do_zero_padding=True,
            previous_event=event, allocate_on_comm_stream=True, async_with_compute_stream=True,
            previous_event_before_epilogue=event,
        )  # fmt: skip
        with done:
            pass
        ends, counts = (
            handle.psum_num_recv_tokens_per_expert,
            handle.num_recv_tokens_per_expert_list,
        )
        real = handle.num_unaligned_recv_tokens_per_expert
        assert all(count % 16 == 0 for count in counts) and recv.shape[0] == sum(counts)
        is_real = torch.zeros(recv.shape[0], dtype=torch.bool)
        for end, count in zip(ends.tolist(), real.tolist(), strict=True):
            is_real[end - count : end] = True
        assert bool((recv[is_real] > 0).all()) and bool((recv[~is_real] == 0).all())
        combined, _, _ = buffer.combine(recv, handle, allocate_on_comm_stream=True)
        assert combined.float().equal(x.float() * copies)
        group.barrier()
        buffer.destroy()

    local.run(fn, 4, timeout_s=60)
