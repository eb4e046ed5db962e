"""What programs expect of the name deep_ep, its classes and sizes: each pitfall is a test."""

from __future__ import annotations

import gc
import inspect
import weakref

import pytest
import torch
from drop_in import alone
from run_by import run_by

import deep_comm
from deep_comm import local
from deep_comm.compat import hints, legacy
from deep_comm.context.low_latency_region import region_bytes

import deep_ep  # isort: skip
import deep_ep.buffer  # isort: skip
import deep_ep.buffers.elastic  # isort: skip
import deep_ep.buffers.legacy  # isort: skip
import deep_ep.utils  # isort: skip
import deep_ep.utils.envs  # isort: skip
import deep_ep.utils.event  # isort: skip
from deep_ep import _C as native  # isort: skip

pytestmark = pytest.mark.usefixtures("on_the_host")


# ---- names and classes ---------------------------------------------------------------------------


def test_all_import_paths_lead_to_the_same_classes() -> None:
    assert deep_ep.buffer.Buffer is deep_ep.Buffer is deep_ep.buffers.legacy.Buffer
    assert deep_ep.buffers.elastic.ElasticBuffer is deep_ep.ElasticBuffer
    assert deep_ep.buffers.elastic.EPHandle is deep_ep.EPHandle
    assert deep_ep.utils.EventOverlap is deep_ep.EventOverlap is deep_ep.buffer.EventOverlap
    assert deep_ep.utils.EventHandle is deep_ep.EventHandle is deep_ep.utils.event.EventHandle
    assert deep_ep.utils.event.EventOverlap is deep_ep.EventOverlap
    assert deep_ep.utils.envs.get_physical_domain_size is deep_ep.get_physical_domain_size
    assert deep_ep.utils.envs.get_logical_domain_size is deep_ep.get_logical_domain_size
    assert native.Config is deep_ep.Config and native.topk_idx_t is deep_ep.topk_idx_t
    assert deep_ep.topk_idx_t == torch.int64
    assert deep_ep.__version__


@pytest.mark.parametrize("name", sorted(deep_ep._NOT_OFFERED))
def test_what_is_not_offered_cannot_be_imported(name: str) -> None:
    with pytest.raises(ImportError):
        exec(f"from deep_ep import {name}", {})
    with pytest.raises(AttributeError, match=name):
        getattr(deep_ep, name)


@pytest.mark.parametrize("name", sorted(legacy.NOT_OFFERED))
def test_methods_of_forks_are_missing_by_name(name: str) -> None:
    assert not hasattr(deep_ep.Buffer, name)

    def body(group: local.ThreadGroup) -> None:
        with deep_ep.Buffer(group, 1 << 20) as buffer:
            assert not hasattr(buffer, name)
            with pytest.raises(AttributeError, match=f"{name} belongs to TensorRT-LLM's copy"):
                getattr(buffer, name)
            with pytest.raises(AttributeError, match="no attribute 'nothing_like_it'"):
                buffer.nothing_like_it  # noqa: B018

    alone(body)


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


_STREAMS = "previous_event=None, async_finish=False, allocate_on_comm_stream=False"
_ELASTIC_STREAMS = (
    "num_sms=0, num_qps=0, previous_event=None, previous_event_before_epilogue=None, "
    "async_with_compute_stream=False, allocate_on_comm_stream=False"
)
_MOE = "num_max_tokens_per_rank, hidden, num_topk=0, use_fp8_dispatch=False"
_LAYOUT = (
    "handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, "
    "is_token_in_rank=None, num_tokens_per_expert=None, topk_idx=None, topk_weights=None, "
    "expert_alignment=1, num_worst_tokens=0, config=None"
)
_COMBINE = f"self, x, handle, topk_weights=None, bias=None, config=None, {_STREAMS}"
# What may be given by position, in the order of both releases; of the two constructors and of
# internode_dispatch, which differ, 1.2.1's.
SIGNATURES = {
    "Buffer.__init__": (
        "self, group=None, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, "
        "num_qps_per_rank=24, allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, "
        "use_fabric=False, explicitly_destroy=False, enable_shrink=False, comm=None"
    ),
    "Buffer.destroy": "self",
    "Buffer.is_sm90_compiled": "",
    "Buffer.set_num_sms": "new_num_sms",
    "Buffer.capture": "",
    "Buffer.get_low_latency_rdma_size_hint": (
        "num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts"
    ),
    "Buffer.get_comm_stream": "self",
    "Buffer.get_local_buffer_tensor": "self, dtype, size=None, offset=0, use_rdma_buffer=False",
    "Buffer._unpack_bias": "bias",
    "Buffer.get_dispatch_config": "num_ranks",
    "Buffer.get_combine_config": "num_ranks",
    "Buffer.get_dispatch_layout": f"self, topk_idx, num_experts, {_STREAMS}",
    "Buffer.dispatch": f"self, x, {_LAYOUT}, {_STREAMS}",
    "Buffer.combine": _COMBINE,
    "Buffer.internode_dispatch": f"self, x, {_LAYOUT}, {_STREAMS}",
    "Buffer.internode_combine": _COMBINE,
    "Buffer.clean_low_latency_buffer": (
        "self, num_max_dispatch_tokens_per_rank, hidden, num_experts"
    ),
    "Buffer.low_latency_dispatch": (
        "self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, "
        "cumulative_local_expert_recv_stats=None, dispatch_wait_recv_cost_stats=None, "
        "use_fp8=True, round_scale=False, use_ue8m0=False, async_finish=False, "
        "return_recv_hook=False"
    ),
    "Buffer.low_latency_combine": (
        "self, x, topk_idx, topk_weights, handle, use_logfmt=False, zero_copy=False, "
        "async_finish=False, return_recv_hook=False, out=None, combine_wait_recv_cost_stats=None"
    ),
    "Buffer.low_latency_update_mask_buffer": "self, rank_to_mask, mask=False",
    "Buffer.low_latency_query_mask_buffer": "self, mask_status",
    "Buffer.low_latency_clean_mask_buffer": "self",
    "Buffer.get_next_low_latency_combine_buffer": "self, handle",
    "ElasticBuffer.__init__": (
        "self, group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, hidden=0, "
        "num_topk=0, use_fp8_dispatch=False, deterministic=False, allow_hybrid_mode=True, "
        "allow_multiple_reduction=True, prefer_overlap_with_compute=True, sl_idx=3, "
        "num_allocated_qps=0, num_cpu_timeout_secs=300, num_gpu_timeout_secs=100, "
        "explicitly_destroy=False"
    ),
    "ElasticBuffer.destroy": "self",
    "ElasticBuffer.get_buffer_size_hint": (
        f"group, {_MOE}, allow_hybrid_mode=True, allow_multiple_reduction=True"
    ),
    "ElasticBuffer.barrier": "self, use_comm_stream=True, with_cpu_sync=False, sequential=True",
    "ElasticBuffer.capture": "",
    "ElasticBuffer.get_comm_stream": "self",
    "ElasticBuffer.get_physical_domain_size": "self",
    "ElasticBuffer.get_logical_domain_size": "self",
    "ElasticBuffer.get_theoretical_num_sms": (
        "self, num_experts, num_topk, num_scaleout_topk=0, rdma_gbs=0, nvlink_gbs=0, "
        "sm_read_gbs=200, sm_write_gbs=50"
    ),
    "ElasticBuffer.get_theoretical_num_qps": "self, num_sms",
    "ElasticBuffer.dispatch": (
        "self, x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None, "
        "num_experts=None, num_max_tokens_per_rank=None, expert_alignment=None, "
        f"{_ELASTIC_STREAMS}, handle=None, do_handle_copy=True, do_cpu_sync=None, "
        "do_expand=False, do_zero_padding=False, use_tma_aligned_col_major_sf=False"
    ),
    "ElasticBuffer.combine": f"self, x, handle, topk_weights=None, bias=None, {_ELASTIC_STREAMS}",
    "EventOverlap.__init__": "self, event=None, extra_tensors=None",
    "EventOverlap.__call__": "self, release_handle=False",
    "EventOverlap.current_stream_wait": "self, release_handle=False",
    "EventOverlap.register_hook_after_wait": "self, hook_after_wait",
    "EventHandle.current_stream_wait": "self",
    "Config.__init__": (
        "self, num_sms=20, num_max_nvl_chunked_send_tokens=6, "
        "num_max_nvl_chunked_recv_tokens=256, num_max_rdma_chunked_send_tokens=6, "
        "num_max_rdma_chunked_recv_tokens=256"
    ),
    "get_physical_domain_size": "group",
    "get_logical_domain_size": "group, allow_hybrid_mode=True",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_have_the_order_names_and_defaults_that_callers_rely_on(name: str) -> None:
    function: object = deep_ep
    for part in name.split("."):
        function = getattr(function, part)
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    by_position = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    found = [
        each.name if each.default is each.empty else f"{each.name}={each.default!r}"
        for each in by_position
    ]
    assert ", ".join(found) == SIGNATURES[name]
    # All else may be left away.
    others = [each for each in parameters if each not in by_position]
    assert all(each.default is not each.empty or each.kind is each.VAR_KEYWORD for each in others)


def test_keywords_that_are_refused_are_not_in_a_signature() -> None:
    # Programs decide by it.
    quantiser = inspect.signature(deep_ep.Buffer.low_latency_dispatch).parameters
    assert "align_fp8_quantization" not in quantiser


@run_by(local.run, 2, timeout_s=60)
def test_buffers_can_be_held_weakly_and_die_without_waiting_for_peers(group, /) -> None:
    buffer = deep_ep.Buffer(group, 1 << 20)
    elastic = deep_ep.ElasticBuffer(group, num_bytes=2 << 20, num_max_tokens_per_rank=8)
    held = weakref.WeakValueDictionary(v1=buffer, v2=elastic)
    group.barrier()
    if group.rank() == 0:  # the other rank keeps its own
        del buffer, elastic
        gc.collect()
        assert len(held) == 0
    group.barrier()


# ---- constructor ---------------------------------------------------------------------------------


@run_by(alone)
def test_constructor_forms_of_both_releases(group, /) -> None:
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


class Comm:
    """An MPI communicator of so many ranks, as rank 0 sees it; the others bring what it brings, or
    what ``allgather`` says."""

    def __init__(self, size: int, allgather=None) -> None:
        self.size = size
        self.allgather = allgather or (lambda payload: [payload] * size)

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return self.size


def test_communicator_by_position_as_later_releases_have_it() -> None:
    comm = Comm(1)
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
@run_by(alone)
def test_constructor_refuses_by_name_what_it_cannot_do(group, /, options: dict, name: str) -> None:
    # TypeError too: programs try a keyword, and go on without it.
    with pytest.raises(TypeError, match=name) as caught:
        deep_ep.Buffer(group, 1 << 20, **options)
    assert isinstance(caught.value, deep_comm.UnsupportedArgument)
    assert caught.value.argument == name


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


@run_by(alone)
def test_low_latency_memory_is_what_the_shape_needs(group, /) -> None:
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 2048, 1, 256)
    buffer = deep_ep.Buffer(group, 0, hint, low_latency_mode=True)
    assert buffer.num_rdma_bytes == hint
    region = buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True)
    assert region.numel() >= region_bytes(1, 128, 2048)
    assert region.numel() < hint / 10
    other = deep_ep.Buffer(group, 0, 1 << 20, low_latency_mode=True)  # nobody's hint
    assert other.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).numel() == 1 << 20


def test_low_latency_memory_agrees_though_one_rank_alone_asked_for_the_hint() -> None:
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(64, 1024, 2, 64)
    shapes = hints._hinted.pop(hint)
    assert shapes == {(2, 64, 1024)}

    def allgather(known):
        """Ranks are threads here and share what hints know: this brings another's answer."""
        assert known[0] == []
        return [known, (sorted(shapes), known[1])]

    assert hints.bytes_to_allocate(None, Comm(2, allgather), hint) == region_bytes(2, 64, 1024)


@pytest.mark.parametrize("wrong", [-5, 0, "1"])
def test_low_latency_memory_of_no_size_is_refused_though_another_rank_knows_the_shape(
    wrong: object,
) -> None:
    def body(group: local.ThreadGroup) -> None:
        hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(8, 128, 2, 4)
        is_wrong = group.rank() == 1
        error = deep_comm.ArgumentError if is_wrong else deep_comm.PeerLost
        with pytest.raises(error, match="num_rdma_bytes" if is_wrong else "rank 1"):
            deep_ep.Buffer(group, 0, wrong if is_wrong else hint, low_latency_mode=True)

    local.run(body, 2, timeout_s=60)


@pytest.mark.parametrize("enable_shrink", [False, True])
def test_low_latency_memory_of_many_ranks_has_room_for_masks(
    enable_shrink: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEP_COMM_RANKS_PER_NODE", "8")
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(512, 1024, 128, 256)
    assert hints.bytes_to_allocate(None, Comm(128), hint, enable_shrink) == (
        deep_comm.Buffer.get_low_latency_rdma_size_hint(
            512, 1024, 128, 256, ranks_per_node=8, enable_shrink=enable_shrink
        )
    )


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


@run_by(alone)
def test_local_buffer_offset_counts_elements(group, /) -> None:
    buffer = deep_ep.Buffer(group, 4096)
    whole = buffer.get_local_buffer_tensor(torch.int32)
    whole.copy_(torch.arange(1024, dtype=torch.int32))
    part = buffer.get_local_buffer_tensor(torch.int32, torch.Size([2, 3]), offset=10)
    assert part.tolist() == [[10, 11, 12], [13, 14, 15]]
    assert buffer.get_local_buffer_tensor(torch.int32, offset=1000).numel() == 24
    for given, argument in (
        (dict(dtype="float32"), "dtype"),
        (dict(dtype=torch.int8, size=3), "size"),
        (dict(dtype=torch.int8, size=[2.0]), "size"),
        (dict(dtype=torch.int8, size=[4097]), "size"),
        (dict(dtype=torch.int8, offset="1"), "offset"),
    ):
        with pytest.raises(deep_comm.errors.ArgumentError, match=f"^{argument} "):
            buffer.get_local_buffer_tensor(**given)
