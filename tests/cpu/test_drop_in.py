"""What programs expect of the name deep_ep: each pitfall is a test."""

from __future__ import annotations

import gc
import inspect
import os
import subprocess
import sys
import weakref
from pathlib import Path

import drop_in
import pytest
import torch

import deep_comm
from deep_comm import local
from deep_comm.compat import hints
from deep_comm.low_latency_state import region_bytes

import deep_ep  # isort: skip
import deep_ep.buffer  # isort: skip
import deep_ep.buffers.elastic  # isort: skip
import deep_ep.buffers.legacy  # isort: skip
import deep_ep.utils  # isort: skip
from deep_ep import _C as native  # isort: skip


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_DEVICE", "cpu")
    monkeypatch.setenv("DEEP_COMM_TIMEOUT_S", "10")


def alone(fn):
    """``fn(group)`` in a group of one."""
    return local.run(fn, 1, timeout_s=60)[0]


# ---- names and classes ---------------------------------------------------------------------------


def test_all_import_paths_lead_to_the_same_classes() -> None:
    assert deep_ep.buffer.Buffer is deep_ep.Buffer is deep_ep.buffers.legacy.Buffer
    assert deep_ep.buffers.elastic.ElasticBuffer is deep_ep.ElasticBuffer
    assert deep_ep.buffers.elastic.EPHandle is deep_ep.EPHandle
    assert deep_ep.utils.EventOverlap is deep_ep.EventOverlap is deep_ep.buffer.EventOverlap
    assert deep_ep.utils.EventHandle is deep_ep.EventHandle
    assert native.Config is deep_ep.Config and native.topk_idx_t is deep_ep.topk_idx_t
    assert deep_ep.topk_idx_t == torch.int64
    assert deep_ep.__version__


@pytest.mark.parametrize("name", ["HybridEPBuffer", "EPBuffer", "BufferAllocator"])
def test_what_is_not_offered_cannot_be_imported(name: str) -> None:
    with pytest.raises(ImportError):
        exec(f"from deep_ep import {name}", {})
    with pytest.raises(AttributeError, match=name):
        getattr(deep_ep, name)


def test_programs_that_ask_for_hybrid_ep_are_told_and_go_on() -> None:
    # As trainers ask: a flag, and an error by name where the path is used.
    namespace: dict = {}
    exec(
        "try:\n    from deep_ep import HybridEPBuffer\n    has = True\n"
        "except ImportError:\n    has = False",
        namespace,
    )
    assert namespace["has"] is False and not hasattr(deep_ep, "HybridEPBuffer")
    for statement in ("import deep_ep.hybrid_ep_buffer", "from deep_ep.hybrid_ep_buffer import x"):
        with pytest.raises(ImportError, match="hybrid-ep branch") as caught:
            exec(statement, {})
        assert caught.value.name == "deep_ep.hybrid_ep_buffer"


def test_signatures_are_real() -> None:
    dispatch = list(inspect.signature(deep_ep.Buffer.dispatch).parameters)
    assert dispatch[:12] == [
        "self", "x", "handle", "num_tokens_per_rank", "num_tokens_per_rdma_rank",
        "is_token_in_rank", "num_tokens_per_expert", "topk_idx", "topk_weights",
        "expert_alignment", "num_worst_tokens", "config",
    ]  # fmt: skip
    combine = list(inspect.signature(deep_ep.Buffer.low_latency_combine).parameters)
    assert combine[:11] == [
        "self", "x", "topk_idx", "topk_weights", "handle", "use_logfmt", "zero_copy",
        "async_finish", "return_recv_hook", "out", "combine_wait_recv_cost_stats",
    ]  # fmt: skip
    elastic = list(inspect.signature(deep_ep.ElasticBuffer.dispatch).parameters)
    assert elastic[1:9] == [
        "x", "topk_idx", "topk_weights", "cumulative_local_expert_recv_stats", "num_experts",
        "num_max_tokens_per_rank", "expert_alignment", "num_sms",
    ]  # fmt: skip
    # Programs decide by these; a keyword that is refused must not stand there.
    quantiser = inspect.signature(deep_ep.Buffer.low_latency_dispatch).parameters
    assert "align_fp8_quantization" not in quantiser


def test_buffers_can_be_held_weakly_and_die_without_waiting_for_peers() -> None:
    def fn(group):
        buffer = deep_ep.Buffer(group, 1 << 20)
        elastic = deep_ep.ElasticBuffer(group, num_bytes=2 << 20, num_max_tokens_per_rank=8)
        held = weakref.WeakValueDictionary(v1=buffer, v2=elastic)
        group.barrier()
        if group.rank() == 0:  # the other rank keeps its own
            del buffer, elastic
            gc.collect()
            assert len(held) == 0
        group.barrier()

    local.run(fn, 2, timeout_s=60)


# ---- constructor ---------------------------------------------------------------------------------


def test_constructor_forms_of_both_releases() -> None:
    def fn(group):
        first = (group, 1 << 20, 0, False, 24, True, False)
        for arguments in (
            (*first, False, True, False, None),  # 1.2.1: use_fabric, explicitly_destroy, …
            (*first, True, False, None),  # later: explicitly_destroy, enable_shrink, comm
            (*first, True, True),
        ):
            buffer = deep_ep.Buffer(*arguments)
            assert buffer.explicitly_destroy and not buffer.enable_shrink
            assert buffer.group is group
            buffer.destroy()
        buffer = deep_ep.Buffer(
            group=group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False,
            num_qps_per_rank=1, allow_nvlink_for_low_latency_mode=True, allow_mnnvl=True,
            use_fabric=True, explicitly_destroy=False, enable_shrink=False, comm=None,
            allow_nvlink_for_normal_mode=True, eager_support=False,
        )  # fmt: skip
        buffer.destroy()  # whatever explicitly_destroy says
        buffer.destroy()
        assert buffer.runtime is None

    alone(fn)


class OneRank:
    """An MPI communicator of one rank."""

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def allgather(self, payload):
        return [payload]


def test_communicator_by_position_as_later_releases_have_it() -> None:
    comm = OneRank()
    buffer = deep_ep.Buffer(None, 1 << 20, 0, False, 24, True, False, True, False, comm)
    assert buffer.group is comm and buffer.explicitly_destroy and not buffer.enable_shrink
    later = deep_ep.Buffer(None, 1 << 20, comm=comm)
    assert later.group is comm


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"allow_nvlink_for_normal_mode": False}, "allow_nvlink_for_normal_mode"),
        ({"eager_support": True}, "eager_support"),
        ({"no_such_keyword": None}, "no_such_keyword"),
    ],
)
def test_constructor_refuses_by_name_what_it_cannot_do(options: dict, name: str) -> None:
    def fn(group):
        # TypeError too: programs try a keyword, and go on without it.
        with pytest.raises(TypeError, match=name) as caught:
            deep_ep.Buffer(group, 1 << 20, **options)
        assert isinstance(caught.value, deep_comm.UnsupportedArgument)
        assert caught.value.argument == name

    alone(fn)


def test_set_num_sms_reaches_configs_and_calls_of_the_drop_in_alone() -> None:
    before = deep_comm.Buffer.num_sms
    try:
        deep_ep.Buffer.set_num_sms(12)
        assert deep_ep.Buffer.num_sms == 12 and deep_comm.Buffer.num_sms == before
        assert deep_ep.Buffer.get_dispatch_config(8).num_sms == 12
        assert deep_ep.Buffer.get_combine_config(4).num_sms == 12
        deep_ep.Buffer.num_sms = 6  # written directly
        assert deep_ep.Buffer.get_dispatch_config(8).num_sms == 6
        with pytest.raises(ValueError, match="new_num_sms"):
            deep_ep.Buffer.set_num_sms(7)
    finally:
        deep_ep.Buffer.num_sms = 20


# ---- sizes ---------------------------------------------------------------------------------------


def test_low_latency_size_hint_is_the_number_that_servers_compare_with() -> None:
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint
    assert hint(1024, 6144, 8, 256) == 13086230656
    assert (
        hint(num_max_dispatch_tokens_per_rank=128, hidden=7168, num_ranks=8, num_experts=256)
        == 2 * (2 * 256 * 128 * (2 * 7168 + 7168 // 128 * 4) + 4 * 256) + 128
    )


def test_low_latency_memory_is_what_the_shape_needs() -> None:
    def fn(group):
        hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 2048, 1, 256)
        buffer = deep_ep.Buffer(group, 0, hint, low_latency_mode=True)
        assert buffer.num_rdma_bytes == hint
        region = buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True)
        assert region.numel() >= region_bytes(1, 128, 2048)
        assert region.numel() < hint / 10
        other = deep_ep.Buffer(group, 0, 1 << 20, low_latency_mode=True)  # nobody's hint
        assert other.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).numel() == 1 << 20

    alone(fn)


def test_low_latency_memory_agrees_though_one_rank_alone_asked_for_the_hint() -> None:
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(64, 1024, 2, 64)
    shapes = hints._hinted.pop(hint)
    assert shapes == {(2, 64, 1024)}

    class OtherRank:
        """Ranks are threads here and share what hints know: this one brings another's answer."""

        def Get_rank(self) -> int:
            return 0

        def Get_size(self) -> int:
            return 2

        def allgather(self, known):
            assert known[0] == []
            return [known, (sorted(shapes), known[1])]

    assert hints.bytes_to_allocate(None, OtherRank(), hint) == region_bytes(2, 64, 1024)


def test_low_latency_memory_is_all_that_was_asked_for_on_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DEEP_COMM_DEEP_EP_FULL_RDMA", "1")

    def fn(group):
        hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(8, 1024, 1, 8)
        buffer = deep_ep.Buffer(group, 0, hint, low_latency_mode=True)
        return buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).numel(), hint

    size, hint = alone(fn)
    assert size == hint


def test_local_buffer_offset_counts_elements() -> None:
    def fn(group):
        buffer = deep_ep.Buffer(group, 4096)
        whole = buffer.get_local_buffer_tensor(torch.int32)
        whole.copy_(torch.arange(1024, dtype=torch.int32))
        part = buffer.get_local_buffer_tensor(torch.int32, torch.Size([2, 3]), offset=10)
        assert part.tolist() == [[10, 11, 12], [13, 14, 15]]
        assert buffer.get_local_buffer_tensor(torch.int32, offset=1000).numel() == 24

    alone(fn)


# ---- calls ---------------------------------------------------------------------------------------


def dispatched(buffer, rank: int = 0, **options):
    x, ids, weights = drop_in.routed(rank, 6)
    per_rank, per_rdma_rank, per_expert, mask, _ = buffer.get_dispatch_layout(
        ids, drop_in.NUM_EXPERTS
    )
    return x, buffer.dispatch(
        x, None, per_rank, per_rdma_rank, mask, per_expert, ids, weights, **options
    )


def test_handle_is_a_tuple_by_position_and_may_be_rebuilt() -> None:
    def fn(group):
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
            for some in (handle, tuple(handle), list(handle), handle[:3] + handle[3:]):
                total = buffer.combine(recv_x, some)[0]
                assert torch.equal(total.float(), x.float() * copies)
                again = buffer.dispatch(x, handle=some)
                assert len(again) == 6 and again[1:5] == (None, None, None, None)
                assert torch.equal(again[0], recv_x)

    local.run(fn, 2, timeout_s=60)


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


def test_internode_calls_inside_a_node_say_so() -> None:
    def fn(group):
        with deep_ep.Buffer(group, 1 << 20) as buffer:
            x, ids, weights = drop_in.routed(0, 4)
            with pytest.raises(deep_comm.TopologyError, match="inside one node"):
                buffer.internode_dispatch(x, topk_idx=ids, topk_weights=weights)
            with pytest.raises(deep_comm.TopologyError, match="inside one node"):
                buffer.internode_combine(x, ())

    alone(fn)


def test_previous_event_may_hold_nothing() -> None:
    def fn(group):
        with deep_ep.Buffer(group, 8 << 20) as buffer:
            for nothing in (None, deep_ep.EventOverlap(), deep_ep.EventOverlap(None)):
                _, result = dispatched(buffer, previous_event=nothing)
                buffer.combine(result[0], result[4], previous_event=nothing)

    alone(fn)


def test_events_hold_something_if_and_only_if_the_call_is_asynchronous() -> None:
    def fn(group):
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

    alone(fn)


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


def test_calls_refuse_by_name_what_forks_added() -> None:
    def fn(group):
        hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(8, 512, 1, 16)
        with deep_ep.Buffer(group, 8 << 20, hint, low_latency_mode=True) as buffer:
            with pytest.raises(TypeError, match="global_expert_id_offset"):
                dispatched(buffer, global_expert_id_offset=8)
            x, ids, weights = drop_in.routed(0, 4, hidden=512)
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

    alone(fn)


def test_low_latency_statistics_by_position() -> None:
    def fn(group):
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

    local.run(fn, 2, timeout_s=60)


def test_a_payload_of_three_parts_is_refused_by_name() -> None:
    """hybrid-ep's (int32 rows, int32 scales, float32 beside them)."""

    def fn(group):
        with deep_ep.Buffer(group, 8 << 20) as buffer:
            _, ids, weights = drop_in.routed(0, 4)
            layout = buffer.get_dispatch_layout(ids, drop_in.NUM_EXPERTS)
            parts = (torch.ones(4, 32, dtype=torch.int32), torch.ones(4, 4, dtype=torch.int32))
            with pytest.raises(ValueError, match="^x "):
                buffer.dispatch(
                    (*parts, torch.ones(4, 1)),
                    None,
                    *layout[:2],
                    layout[3],
                    layout[2],
                    ids,
                    weights,
                )

    alone(fn)


def test_low_latency_buffer_for_zero_copy() -> None:
    def fn(group):
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

    local.run(fn, 2, timeout_s=60)


def test_runtime_answers_about_ranks() -> None:
    def fn(group):
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

    local.run(fn, 2, timeout_s=60)


def test_unpacked_bias() -> None:
    one, two = torch.ones(1), torch.zeros(1)
    unpack = deep_ep.Buffer._unpack_bias
    assert unpack(None) == (None, None)
    assert unpack(one)[0] is one and unpack(one)[1] is None
    assert unpack((one, two)) == (one, two)
    with pytest.raises(ValueError, match="bias"):
        unpack((one,))


# ---- installing ----------------------------------------------------------------------------------


def python(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, **options
    )


def compat(*arguments: object) -> subprocess.CompletedProcess:
    return python("-m", "deep_comm.compat", *map(str, arguments))


def test_nothing_is_named_deep_ep_until_asked() -> None:
    code = "import deep_comm, importlib.util as u; print(u.find_spec('deep_ep'))"
    done = python("-c", code)
    assert done.stdout.strip() == "None", done.stdout + done.stderr


def test_path_is_enough_to_import() -> None:
    folder = compat("path").stdout.strip()
    assert [entry.name for entry in Path(folder).iterdir() if entry.is_dir()] == ["deep_ep"]
    done = python(
        "-c", "import deep_ep; print(deep_ep.Buffer.__module__)",
        env={**os.environ, "PYTHONPATH": folder},
    )  # fmt: skip
    assert done.stdout.strip() == "deep_comm.compat.legacy", done.stderr


def test_install_and_uninstall(tmp_path: Path) -> None:
    done = compat("install", "--target", tmp_path)
    assert done.returncode == 0, done.stderr
    check = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
import deep_ep, importlib.metadata as m
assert deep_ep.__file__.startswith({str(tmp_path)!r})
assert m.version("deep_ep") == deep_ep.__version__
assert all(m.files("deep_ep")) and all(file.locate().exists() for file in m.files("deep_ep"))
from deep_ep.utils import EventHandle, EventOverlap
"""
    done = python("-c", check)
    assert done.returncode == 0, done.stderr
    assert compat("install", "--target", tmp_path).returncode == 0  # again: replaced
    done = compat("uninstall", "--target", tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    assert compat("uninstall", "--target", tmp_path).returncode == 1


def test_doctor_says_whose_deep_ep_is_found(tmp_path: Path) -> None:
    code = "from deep_comm.doctor.findings import packages; print(packages().lines[-1])"
    (tmp_path / "deep_ep").mkdir()
    (tmp_path / "deep_ep" / "__init__.py").write_text("")
    for path, wanted in (
        ("", "import deep_ep: nothing"),
        (compat("path").stdout.strip(), "the drop-in"),
        (str(tmp_path), "not ours"),
    ):
        done = python("-c", code, env={**os.environ, "PYTHONPATH": path})
        assert done.stdout.strip().endswith(wanted), done.stdout + done.stderr


def test_another_deep_ep_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "deep_ep").mkdir()
    (tmp_path / "deep_ep" / "__init__.py").write_text("mine = True\n")
    for command in ("install", "uninstall"):
        done = compat(command, "--target", tmp_path)
        assert done.returncode == 1 and "another deep_ep" in done.stderr
    assert (tmp_path / "deep_ep" / "__init__.py").read_text() == "mine = True\n"
    other = tmp_path / "elsewhere"
    done = python(
        "-m", "deep_comm.compat", "install", "--target", str(other),
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1 and str(tmp_path) in done.stderr
