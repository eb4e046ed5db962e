"""Calls of deep_ep's Buffer as programs make them: handles, events, orders of arguments, forks."""

from __future__ import annotations

import drop_in
import pytest
import torch
from drop_in import alone
from run_by import run_by

import deep_comm
from deep_comm import local

import deep_ep  # isort: skip

pytestmark = pytest.mark.usefixtures("on_the_host")


def dispatched(buffer, rank: int = 0, **options):
    x, ids, weights = drop_in.routed(rank, 6)
    per_rank, per_rdma_rank, per_expert, mask, _ = buffer.get_dispatch_layout(
        ids, drop_in.NUM_EXPERTS
    )
    return x, buffer.dispatch(
        x, None, per_rank, per_rdma_rank, mask, per_expert, ids, weights, **options
    )


@run_by(local.run, 2, timeout_s=60)
def test_handle_is_a_tuple_by_position_and_may_be_rebuilt(group, /) -> None:
    with deep_ep.Buffer(group, 8 << 20) as buffer:
        rank, num_ranks = group.rank(), group.size()
        x, (recv_x, _, _, _, handle, event) = dispatched(buffer, rank)
        assert event.event is None
        assert isinstance(handle, tuple) and len(handle) == 6
        rank_prefix, channel_prefix, recv_channel_prefix, src_idx, mask, send_head = handle
        assert int(handle[0][num_ranks - 1][rank]) == recv_x.shape[0] == src_idx.shape[0]
        assert mask.dtype == torch.bool and send_head.shape == mask.shape
        assert channel_prefix.shape == recv_channel_prefix.shape
        copies = mask.sum(dim=1, keepdim=True)
        for some in (
            handle, tuple(handle), list(handle), handle[:3] + handle[3:], type(handle)(handle),
        ):  # fmt: skip
            total = buffer.combine(recv_x, some)[0]
            assert torch.equal(total.float(), x.float() * copies)
            again = buffer.dispatch(x, handle=some)
            assert len(again) == 6 and again[1:5] == (None, None, None, None)
            assert torch.equal(again[0], recv_x)
        for prefix in (torch.tensor(1, dtype=torch.int32), channel_prefix[:, :0]):
            wrong = (rank_prefix, prefix, *handle[2:])
            with pytest.raises(ValueError, match="^handle"):
                buffer.combine(recv_x, wrong, config=deep_ep.Config(4, 6, 256))


def test_internode_calls_in_the_orders_of_both_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_RANKS_PER_NODE", "1")

    def fn(group):
        config = deep_ep.Config(2, 4, 32, 4, 16)
        sizes = (config.get_nvl_buffer_size_hint(512, 2), config.get_rdma_buffer_size_hint(512, 2))
        with deep_ep.Buffer(group, *sizes, num_qps_per_rank=2) as buffer:
            rank = group.rank()
            x, ids, weights = drop_in.routed(rank, 5 + rank)
            per_rank, per_rdma_rank, per_expert, mask, _ = buffer.get_dispatch_layout(
                ids, drop_in.NUM_EXPERTS
            )
            told = (per_rank, per_rdma_rank, mask, per_expert)
            event = deep_ep.EventOverlap()
            captured = deep_ep.Buffer.capture()
            calls = (
                ((0, config, event, False, False), {}, False),  # 1.2.1
                ((0,), {"config": config, "async_finish": True}, True),
                ((config, event, False, False), {}, False),  # later releases
                ((config, captured, True, True), {}, True),
                ((config, captured), {"async_finish": True}, True),
                ((config,), {"previous_event": None, "async_finish": True}, True),
            )
            first = drop_in.first_of(rank, 2)
            for positional, keywords, is_async in calls:
                recv_x, recv_ids, recv_weights, counts, handle, done = buffer.internode_dispatch(
                    x, None, *told, ids, weights, 1, *positional, **keywords
                )
                assert isinstance(done, deep_ep.EventOverlap)
                assert (done.event is not None) == is_async
                assert isinstance(handle, tuple) and len(handle) == 10
                assert sum(counts) == int((recv_ids >= 0).sum())
                out = drop_in.local_experts(recv_x, recv_ids, recv_weights, first)
                for some in (handle, tuple(handle)):
                    combined, _, _ = buffer.internode_combine(out, some, None, None, config, event)
                    assert torch.equal(combined.float(), drop_in.dense(x, ids, weights))
                again = buffer.internode_dispatch(x, handle, config=config)
                assert torch.equal(again[0], recv_x) and again[1:5] == (None,) * 4
            worst = buffer.internode_dispatch(x, None, *told, ids, weights, 1, 32, config)
            assert worst[0].shape[0] == 32 and worst[3] == []

    local.run(fn, 2, timeout_s=60)


@run_by(alone)
def test_internode_calls_inside_a_node_say_so(group, /) -> None:
    with deep_ep.Buffer(group, 1 << 20) as buffer:
        x, ids, weights = drop_in.routed(0, 4)
        with pytest.raises(deep_comm.TopologyError, match="inside one node"):
            buffer.internode_dispatch(x, topk_idx=ids, topk_weights=weights)
        with pytest.raises(deep_comm.TopologyError, match="inside one node"):
            buffer.internode_combine(x, ())


@pytest.mark.parametrize("ranks_per_node", [None, 1])
def test_a_config_beside_a_handle_takes_the_sms_of_its_dispatch(
    ranks_per_node: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dispatch without a Config and combine with a recommended one go together in DeepEP."""
    if ranks_per_node is not None:
        monkeypatch.setenv("DEEP_COMM_RANKS_PER_NODE", str(ranks_per_node))

    def body(group: local.ThreadGroup) -> None:
        with deep_ep.Buffer(group, 32 << 20, 32 << 20) as buffer:
            x, (recv, _, recv_weights, _, handle, _) = dispatched(buffer, group.rank())
            config = deep_ep.Buffer.get_combine_config(group.size())
            num_channels = handle[1].shape[1]
            assert config.num_sms not in (num_channels, 2 * num_channels)
            wanted, wanted_weights, _ = buffer.combine(recv, handle, recv_weights)
            for of_call in (handle, tuple(handle), list(handle)):
                combined, sums, _ = buffer.combine(recv, of_call, recv_weights, config=config)
                assert combined.equal(wanted) and sums.equal(wanted_weights)
                combined, _, _ = buffer.combine(recv, of_call, None, None, config)
                assert combined.equal(wanted)
                again = buffer.dispatch(x, config=config, handle=of_call)[0]
                assert again.equal(recv)
                again = buffer.dispatch(x, of_call, *[None] * 6, 1, 0, config)[0]
                assert again.equal(recv)
            for wrong in ((1, 2, 3, 4, 5, 6), [], 7):
                with pytest.raises(ValueError, match="handle"):
                    buffer.combine(recv, wrong, config=config)
            group.barrier()

    local.run(body, 2, timeout_s=60)


@run_by(alone)
def test_previous_event_may_hold_nothing(group, /) -> None:
    with deep_ep.Buffer(group, 8 << 20) as buffer:
        for nothing in (None, deep_ep.EventOverlap(), deep_ep.EventOverlap(None)):
            _, result = dispatched(buffer, previous_event=nothing)
            buffer.combine(result[0], result[4], previous_event=nothing)


@run_by(alone)
def test_events_hold_something_if_and_only_if_the_call_is_asynchronous(group, /) -> None:
    with deep_ep.Buffer(group, 8 << 20) as buffer:
        _, result = dispatched(buffer)
        assert result[5].event is None
        with pytest.raises(ValueError, match="event"):
            result[5].current_stream_wait()
        with result[5]:
            pass
        for event in (dispatched(buffer, async_finish=True)[1][5], deep_ep.Buffer.capture()):
            assert isinstance(event, deep_ep.EventOverlap)
    assert isinstance(deep_ep.Buffer.capture().event, deep_ep.EventHandle)
    assert type(deep_ep.ElasticBuffer.capture()) is deep_ep.EventHandle


def test_event_hooks_run_once_after_the_wait_and_handles_are_released() -> None:
    calls = []
    event = deep_ep.EventOverlap(deep_ep.EventHandle(), (torch.zeros(1),))
    event.register_hook_after_wait(lambda: calls.append(1))
    with pytest.raises(ValueError, match="hook"):
        event.register_hook_after_wait(lambda: None)
    event.current_stream_wait()
    event.current_stream_wait()
    assert calls == [1] and event.event is not None
    with event(release_handle=True):
        assert event.event is not None
    assert event.event is None and event.extra_tensors is None


@run_by(alone)
def test_calls_refuse_by_name_what_forks_added(group, /) -> None:
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(8, 512, 1, 16)
    with deep_ep.Buffer(group, 8 << 20, hint, low_latency_mode=True) as buffer:
        with pytest.raises(TypeError, match="global_expert_id_offset"):
            dispatched(buffer, global_expert_id_offset=8)
        x, ids, weights = drop_in.routed(0, 4, hidden=512)
        for name in ("num_experts", "use_fp8", "expand"):
            with pytest.raises(TypeError, match=f"{name}=1: a keyword of deep_comm.Buffer"):
                dispatched(buffer, **{name: 1})
        # Names that would be refused are not proposed.
        with pytest.raises(TypeError, match="use_fp=1: no release of DeepEP"):
            dispatched(buffer, use_fp=1)
        with pytest.raises(TypeError, match=r"num_worst_token=1: did you mean num_worst_tokens\?"):
            dispatched(buffer, num_worst_token=1)
        decode = (x, ids, 8, drop_in.NUM_EXPERTS)
        for options in (
            {"use_ue8m0_for_sf": True},
            {"topk_weights": weights},
            {"use_eager": True},
            {"align_fp8_quantization": True},
            {"something_new": 1},
        ):
            with pytest.raises(TypeError, match=next(iter(options))):
                buffer.low_latency_dispatch(*decode, **options)
        # Asking for nothing is no reason to refuse; nor is a flag that
        # means nothing without fp8.
        recv_x, count, handle, event, hook = buffer.low_latency_dispatch(
            *decode, None, None, False, True, True, False, False, use_nvfp4=False,
            x_global_scale=torch.ones(1), use_ue8m0_for_sf=False, align_fp8_quantization=False,
        )  # fmt: skip
        assert isinstance(recv_x, torch.Tensor) and hook is None and event.event is None
        src_info, layout_range, max_tokens, hidden, num_experts = handle
        assert (max_tokens, hidden, num_experts) == (8, 512, drop_in.NUM_EXPERTS)
        assert src_info.shape == recv_x.shape[:2] and layout_range.dtype == torch.int64
        for options in (
            {"overlap": True, "src_signals": torch.ones(1), "src_signal_expect_value": 1},
            {"comp_signal": torch.ones(1)},
            {"src_signals": torch.ones(1)},
        ):
            with pytest.raises(TypeError, match=next(iter(options))):
                buffer.low_latency_combine(recv_x, ids, weights, handle, **options)
        buffer.low_latency_combine(
            x=recv_x, topk_idx=ids, topk_weights=weights, handle=handle, overlap=False,
            packed_recv_count=None, comp_signal=None, block_m=64, threshold=0, num_sms=3,
        )  # fmt: skip
        with pytest.raises(ValueError, match="handle"):
            buffer.low_latency_combine(recv_x, ids, weights, tuple(handle))


@run_by(local.run, 2, timeout_s=60)
def test_low_latency_statistics_by_position(group, /) -> None:
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(8, 512, 2, 16)
    with deep_ep.Buffer(group, 0, hint, low_latency_mode=True) as buffer:
        rank = group.rank()
        received = torch.full((8,), 3, dtype=torch.int32)
        waited = [torch.full((2,), 5, dtype=torch.int64) for _ in range(2)]
        for step in range(2):
            x, ids, weights = drop_in.routed(rank, 5 + rank, hidden=512)
            recv_x, count, handle, _, _ = buffer.low_latency_dispatch(
                x, ids, 8, 16, received, waited[0], False
            )
            assert torch.equal(received, 3 + count * (step + 1))
            buffer.low_latency_combine(
                recv_x, ids, weights, handle, False, False, False, False, None, waited[1]
            )
        assert all(int(stats.min()) >= 5 for stats in waited)


@run_by(alone)
def test_a_payload_of_three_parts_is_refused_by_name(group, /) -> None:
    """hybrid-ep's (int32 rows, int32 scales, float32 beside them)."""
    with deep_ep.Buffer(group, 8 << 20) as buffer:
        _, ids, weights = drop_in.routed(0, 4)
        layout = buffer.get_dispatch_layout(ids, drop_in.NUM_EXPERTS)
        parts = (torch.ones(4, 32, dtype=torch.int32), torch.ones(4, 4, dtype=torch.int32))
        with pytest.raises(ValueError, match="^x "):
            buffer.dispatch(
                (*parts, torch.ones(4, 1)), None, *layout[:2], layout[3], layout[2], ids,
                weights,
            )  # fmt: skip


@run_by(local.run, 2, timeout_s=60)
def test_low_latency_buffer_for_zero_copy(group, /) -> None:
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(8, 512, 2, 16)
    with deep_ep.Buffer(group, 0, hint, low_latency_mode=True) as buffer:
        rank = group.rank()
        x, ids, weights = drop_in.routed(rank, 5 + rank, hidden=512)
        recv_x, count, handle, _, _ = buffer.low_latency_dispatch(
            x, ids, 8, drop_in.NUM_EXPERTS, use_fp8=False
        )
        rows = drop_in.masked_experts(recv_x, count, drop_in.first_of(rank, 2))
        buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = rows
        out = torch.empty_like(x)
        combined, _, _ = buffer.low_latency_combine(
            recv_x, ids, weights, handle, zero_copy=True, out=out
        )
        assert combined is out
        assert torch.equal(out.float(), drop_in.dense(x, ids, weights))


@run_by(local.run, 2, timeout_s=60)
def test_runtime_answers_about_ranks(group, /) -> None:
    with deep_ep.Buffer(group, 1 << 20) as buffer:
        runtime = buffer.runtime
        assert runtime.is_available() and runtime.get_num_rdma_ranks() == 1
        assert runtime.get_rdma_rank() == 0 and runtime.get_root_rdma_rank(True) == group.rank()
        assert runtime.get_local_device_id() == group.rank()
        with pytest.raises(AttributeError, match="intranode_dispatch.*own methods"):
            runtime.intranode_dispatch(1, 2)
        assert not hasattr(runtime, "something_else")
        with pytest.raises(ValueError, match="enable_shrink"):  # the Buffer's own answer
            runtime.low_latency_query_mask_buffer(torch.zeros(2, dtype=torch.int32))
        assert runtime.get_local_buffer_tensor(torch.int32, 4).numel() == (1 << 18) - 4


def test_unpacked_bias() -> None:
    one, two = torch.ones(1), torch.zeros(1)
    unpack = deep_ep.Buffer._unpack_bias
    assert unpack(None) == (None, None)
    assert unpack(one)[0] is one and unpack(one)[1] is None
    assert unpack((one, two)) == (one, two)
    with pytest.raises(ValueError, match="bias"):
        unpack((one,))
