"""deep_comm.integrations.vllm against stand-ins of vLLM's interfaces (stubs/vllm)."""

from __future__ import annotations

import gc
import inspect
import threading
from types import SimpleNamespace

import drop_in
import pytest
import torch
from drop_in import HIDDEN, NUM_EXPERTS, vllm_quant
from run_by import run_by
from vllm import config as vllm_config
from vllm import forward_context
from vllm.distributed.device_communicators import all2all, base_device_communicator
from vllm.model_executor.layers.fused_moe import all2all_utils, modular_kernel
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
)
from vllm.v1.worker import ubatching

from deep_comm import UnsupportedError, errors, local
from deep_comm.integrations import vllm as adapter
from deep_comm.integrations.vllm import interface

FORMAT = modular_kernel.FusedMoEActivationFormat
pytestmark = pytest.mark.usefixtures("vllm_defaults")


@pytest.mark.parametrize("ours", [adapter.NormalPrepareFinalize, adapter.LowLatencyPrepareFinalize])
def test_signatures_are_those_of_the_interface(ours: type) -> None:
    theirs = modular_kernel.FusedMoEPrepareAndFinalizeModular
    assert issubclass(ours, theirs) and not ours.__abstractmethods__
    for name in (
        "prepare", "prepare_async", "finalize", "finalize_async", "allocate_fused_expert_output",
        "post_init_setup", "topk_indices_dtype", "max_num_tokens_per_rank", "num_dispatchers",
        "output_is_reduced", "supports_async", "supports_dbo", "supports_deferred_moe_finalize",
    ):  # fmt: skip
        wanted = inspect.signature(getattr(theirs, name)).parameters
        got = inspect.signature(getattr(ours, name)).parameters
        assert list(got) == list(wanted), name
        assert [p.default for p in got.values()] == [p.default for p in wanted.values()], name


def test_manager_keeps_to_the_interface() -> None:
    theirs = base_device_communicator.All2AllManagerBase
    assert issubclass(adapter.DeepCommAll2AllManager, theirs)
    public = [
        name
        for name in vars(theirs)
        if not name.startswith("_") and callable(getattr(theirs, name))
    ]
    assert all(hasattr(adapter.DeepCommAll2AllManager, name) for name in public)

    def fn(group):
        manager = adapter.NormalManager(group, None)
        with pytest.raises(UnsupportedError):
            manager.dispatch(None, None, None)
        with pytest.raises(UnsupportedError):
            manager.combine(None)
        with pytest.raises(errors.ArgumentError, match="kwargs"):
            adapter.LowLatencyManager(group).get_handle({"token_hidden_size": 4})
        buffer = manager.get_handle({})
        assert manager.get_handle({}) is buffer and buffer.num_nvl_bytes == 16 << 20
        assert manager.max_sms_used() == buffer.num_sms
        del buffer
        gc.collect()
        assert not manager._buffers  # layers hold it, the manager does not
        kept = manager.get_handle({})
        manager.destroy()
        with pytest.raises(errors.BufferDestroyed):
            kept.get_local_buffer_tensor(torch.int8)

    local.run(fn, 1, timeout_s=60)


def standard_experts(rows, scales, ids, weights, first: int, num_local: int):
    """vLLM's experts of the Standard format: [rows, K, H], unweighted; 0 where not local."""
    x = rows.float()
    if scales is not None:
        x = drop_in.dequantised(rows, scales)
    assert bool((ids >= 0).all()) and bool((ids < NUM_EXPERTS).all())
    is_local = (ids >= first) & (ids < first + num_local)
    factors = torch.where(is_local, (ids + 1).float(), 0.0).unsqueeze(-1)
    # Rows that never came may hold anything.
    x = torch.where(is_local.any(dim=1, keepdim=True), x, 0.0)
    return (x.unsqueeze(1) * factors).to(torch.bfloat16)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("impl", [TopKWeightAndReduceDelegate, TopKWeightAndReduceContiguous])
@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("shape", [(4, 8, 2), (4, 2, 4), (4, 2, 2), (2, 8, 4)])
def test_standard_format_prefill_and_decode(
    shape: tuple[int, int, int],
    is_captured: bool,
    kind: str,
    impl: type,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every rank takes the mode that the exchanged numbers of tokens say, empty ranks too; and the
    host waits for rows only where few of all tokens' may come."""
    num_ranks, ranks_per_node, num_topk = shape
    monkeypatch.setattr(interface, "most_captured_tokens", lambda: 30 if is_captured else 0)
    monkeypatch.setenv("DEEP_COMM_RANKS_PER_NODE", str(ranks_per_node))

    def fn(group):
        rank = group.rank()
        adapter.register()
        manager = all2all.DeepEPHTAll2AllManager(group)
        num_local = NUM_EXPERTS // num_ranks
        prepare_finalize = all2all_utils.make_high_throughput(manager, num_ranks, num_local)
        assert isinstance(prepare_finalize, adapter.NormalPrepareFinalize)
        assert prepare_finalize.activation_format is FORMAT.Standard
        assert prepare_finalize.max_num_tokens_per_rank() is None
        assert prepare_finalize.num_dispatchers() == num_ranks
        prepare_finalize.decode_tokens = 8
        modes = []
        for step, most in enumerate((30, 8, 5, 30, 8)):
            tokens = most if rank == step % 2 else (rank * 3) % (most // 2 + 1)
            # Some steps are filled up, that of an idle rank with a token alone.
            routing = "padded" if step > 2 else "distinct"
            x, ids, weights = drop_in.routed(
                rank, tokens, num_topk=num_topk, routing=routing, seed=step
            )
            forward_context.set_tokens_of_ranks(torch.tensor([most, most // 2]))
            a1q, scale, meta, recv_ids, recv_weights = prepare_finalize.prepare(
                x, weights, ids, NUM_EXPERTS, None, False, vllm_quant(kind)
            )
            modes.append(prepare_finalize._handles[0][1] is not None)
            first = rank * num_local
            counts = [int((recv_ids == first + e).sum()) for e in range(num_local)]
            is_waiting = not modes[-1] and num_ranks > num_topk and not is_captured
            if is_waiting:
                assert meta.expert_num_tokens_cpu.tolist() == counts
            else:
                assert meta.expert_num_tokens_cpu is None
                told = num_ranks * most if modes[-1] else (most + most // 2) * (num_ranks // 2)
                assert len(a1q) == len(recv_ids) == told
            assert meta.expert_num_tokens.tolist() == counts
            assert (scale is not None) == (kind == "fp8" and a1q.dtype == torch.float8_e4m3fn)
            out = standard_experts(a1q, scale, recv_ids, recv_weights, first, num_local)
            output = torch.full_like(x, float("nan"))
            prepare_finalize.finalize(output, out, recv_weights, recv_ids, False, impl())
            wanted = drop_in.dense(x, ids, weights)
            # e4m3 with a scale of amax / 448 is exact only nearly.
            tolerance = (
                0.08 * float(wanted.abs().max()) if modes[-1] and kind == "fp8" and tokens else 0
            )
            if tokens:
                assert float((output.float() - wanted).abs().max()) <= tolerance
        assert modes == [False, True, True, False, True]
        group.barrier()

    if impl is TopKWeightAndReduceDelegate or kind == "bf16":
        local.run(fn, num_ranks, timeout_s=60)


@run_by(local.run, 2, timeout_s=60)
def test_router_weight_on_the_input(group, /) -> None:
    rank, num_ranks = group.rank(), group.size()
    num_local = NUM_EXPERTS // num_ranks
    manager = adapter.NormalManager(group)
    prepare_finalize = adapter.NormalPrepareFinalize(
        manager.get_handle({}), num_ranks, num_ranks, rank * num_local
    )
    x, ids, weights = drop_in.routed(rank, 7, num_topk=1)
    rows, scale, _, recv_ids, recv_weights = prepare_finalize.prepare(
        x, weights, ids, NUM_EXPERTS, None, True, vllm_quant("bf16")
    )
    out = standard_experts(rows, scale, recv_ids, recv_weights, rank * num_local, num_local)
    output = torch.empty_like(x)
    receiver = prepare_finalize.finalize_async(
        output, out, recv_weights, recv_ids, True, TopKWeightAndReduceDelegate()
    )
    receiver()
    assert torch.equal(output.float(), drop_in.dense(x, ids, weights))
    with pytest.raises(errors.ArgumentError, match="apply_router_weight_on_input"):
        x, ids, weights = drop_in.routed(rank, 7)
        prepare_finalize.prepare(x, weights, ids, NUM_EXPERTS, None, True, vllm_quant("bf16"))
    group.barrier()


@pytest.mark.parametrize("ranks_per_node", [8, 1])
def test_two_micro_batches_of_the_standard_format(
    ranks_per_node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEP_COMM_RANKS_PER_NODE", str(ranks_per_node))

    def fn(group):
        rank, num_ranks = group.rank(), group.size()
        num_local = NUM_EXPERTS // num_ranks
        first = rank * num_local
        manager = adapter.NormalManager(group)
        prepare_finalize = adapter.NormalPrepareFinalize(
            manager.get_handle({}), num_ranks, num_ranks, first
        )
        try:
            inputs, receivers, outputs = [], [], []
            for batch in range(2):
                ubatching.enable(batch)
                x, ids, weights = drop_in.routed(rank, 4 + batch, seed=batch)
                inputs.append((x, ids, weights))
                receivers.append(
                    prepare_finalize.prepare_async(
                        x, weights, ids, NUM_EXPERTS, None, False, vllm_quant("bf16")
                    )
                )
            for batch in range(2):
                ubatching.enable(batch)
                rows, scale, _, recv_ids, recv_weights = receivers[batch]()
                out = standard_experts(rows, scale, recv_ids, recv_weights, first, num_local)
                outputs.append(torch.empty_like(inputs[batch][0]))
                receivers[batch] = prepare_finalize.finalize_async(
                    outputs[batch], out, recv_weights, recv_ids, False,
                    TopKWeightAndReduceDelegate(),
                )  # fmt: skip
            for batch in range(2):
                ubatching.enable(batch)
                receivers[batch]()
                assert torch.equal(outputs[batch].float(), drop_in.dense(*inputs[batch]))
            assert ubatching.calls().count("yield_and_switch_from_compute_to_comm") == 4
            assert ubatching.calls().count("switch_to_compute_sync") == 2
            assert ubatching.calls().count("yield_and_switch_from_comm_to_compute") == 2
        finally:
            ubatching.disable()
        group.barrier()

    local.run(fn, 2, timeout_s=60)


def test_hidden_sizes_are_not_rounded_up_for_nothing() -> None:
    normal, decode = adapter.NormalPrepareFinalize, adapter.LowLatencyPrepareFinalize
    assert normal.maybe_roundup_layer_hidden_size(2880, torch.bfloat16) == 2880
    assert normal.maybe_roundup_layer_hidden_size(2881, torch.bfloat16) == 2888
    assert decode.maybe_roundup_layer_hidden_size(2816) == 2816
    assert decode.maybe_roundup_layer_hidden_size(2880) == 2944


def test_decode_tokens_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_DECODE_TOKENS", "64")

    def fn(group):
        manager = adapter.NormalManager(group)
        made = adapter.NormalPrepareFinalize(manager.get_handle({}), 1, 1, 0)
        assert made.decode_tokens == 64
        assert made._tokens_of_decoding(None, torch.bfloat16) is None  # nobody tells: normal mode
        for tokens, found in (([3, 64], 64), ([3, 2], 3), ([0, 0], 1), ([65, 64], None)):
            assert made._tokens_of_decoding(tokens, torch.bfloat16) == found

        monkeypatch.delenv("DEEP_COMM_DECODE_TOKENS")
        assert adapter.NormalPrepareFinalize(manager.get_handle({}), 1, 1, 0).decode_tokens == 128

    local.run(fn, 1, timeout_s=60)


@pytest.mark.parametrize(
    ("tokens", "num_topk", "captured", "rows"),
    [
        (None, 4, 0, 0),  # nobody tells
        ([500, 0], 4, 0, 1000),  # of each number there are two ranks
        ([500, 0, 1, 2], 4, 0, 503),
        ([513, 0, 1, 2], 4, 0, 0),  # a large step
        ([500, 0, 1, 2], 3, 0, 0),  # few of the tokens come
        ([256, 0, 1, 2], 3, 256, 259),  # a graph may hold it
        ([257, 0, 1, 2], 3, 256, 0),
        ([600, 0, 1, 2], 4, 600, 603),
        ([0, 0, 0, 0], 4, 0, 1),
    ],
)
def test_the_host_waits_by_the_size_of_a_step(
    tokens: list[int] | None,
    num_topk: int,
    captured: int,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mode = SimpleNamespace(name="FULL" if captured else "NONE")
    compilation = SimpleNamespace(cudagraph_mode=mode, max_cudagraph_capture_size=captured or 999)
    config = SimpleNamespace(compilation_config=compilation)
    monkeypatch.setattr(vllm_config, "get_current_vllm_config", lambda: config)
    buffer = SimpleNamespace(group_size=4, rank=1, low_latency_mode=False)
    made = adapter.NormalPrepareFinalize(buffer, 4, 4, 0)  # type: ignore[arg-type]
    assert made._num_rows(tokens, num_topk) == rows
    monkeypatch.setattr(interface, "is_capturing", lambda: True)
    if tokens is None:
        with pytest.raises(UnsupportedError, match="--enforce-eager"):
            made._num_rows(tokens, num_topk)
    assert made._tokens_of_decoding([3, 4], torch.bfloat16) == 4
    assert made._tokens_of_decoding([3, 4], torch.float16) is None
    monkeypatch.setattr(interface, "dbo_enabled", lambda: True)
    assert (
        made._tokens_of_decoding([3, 4], torch.bfloat16) is None
    )  # the halves of the step overlap


def test_experts_that_ranks_do_not_divide_have_their_own_ids() -> None:
    for rank, ids in enumerate(([0, 1, 2, 6], [3, 4, 0], [5, 6, 0])):
        buffer = SimpleNamespace(group_size=3, rank=rank, low_latency_mode=False)
        made = adapter.NormalPrepareFinalize(buffer, 3, 3, 2 * rank)  # type: ignore[arg-type]
        local = torch.arange(-1, len(ids) - 1)
        assert made._table_of_ids(7, local)[local].tolist() == [ids[-1], *ids[:-1]]


def test_rows_with_one_scale_for_all_have_zeros_behind_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever lay in memory would else be the largest element."""
    monkeypatch.setenv("DEEP_COMM_POISON", "1")
    given = threading.local()

    def quantise(rows: torch.Tensor, scale: None, **options: object) -> tuple:
        given.rows = rows.clone()
        return rows, None

    monkeypatch.setattr(interface, "moe_kernel_quantize_input", quantise)
    config = vllm_quant("bf16")
    config.quant_dtype = torch.float8_e4m3fn

    def fn(group):
        manager = adapter.NormalManager(group)
        made = adapter.NormalPrepareFinalize(manager.get_handle({}), 2, 2, 0, decode_tokens=4)
        x = torch.ones(3, HIDDEN, dtype=torch.bfloat16)
        ids = torch.zeros(3, 2, dtype=torch.int64)  # nothing comes to the second rank
        for most in (9, 4):
            forward_context.set_tokens_of_ranks(torch.tensor([most, most]))
            made.prepare(x, torch.ones(3, 2), ids, NUM_EXPERTS, None, False, config)
            num_recv = 6 * (group.rank() == 0)
            assert given.rows.shape == (2 * most, HIDDEN)
            assert bool((given.rows[:num_recv] == 1).all() and (given.rows[num_recv:] == 0).all())
            made.finalize(
                torch.empty_like(x), torch.ones(2 * most, 2, HIDDEN, dtype=x.dtype),
                torch.ones(2 * most, 2), torch.zeros(2 * most, 2, dtype=torch.int64), False,
                TopKWeightAndReduceDelegate(),
            )  # fmt: skip
        decodes = made.decode_buffer
        assert decodes is not made.buffer and decodes.runtime is not None
        group.barrier()
        manager.destroy()  # with the Buffer that decoding made
        assert decodes.runtime is None

    local.run(fn, 2, timeout_s=60)


def test_outside_of_a_step_nobody_tells_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_context, "_state", threading.local())
    assert interface.tokens_of_ranks() is None
    forward_context.set_tokens_of_ranks(torch.tensor([5, 9, 0]))
    assert interface.tokens_of_ranks() == [5, 9, 0]
    context = forward_context.get_forward_context()
    context.dp_metadata.local_sizes = [3, 2, 5, 4, 0, 0]  # each rank's tokens are split in two
    assert interface.tokens_of_ranks() == [3, 2, 5, 4, 0, 0]


def test_streams_of_two_micro_batches_are_told_to_the_allocator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory of one stream that the other reads must not be given away in between."""
    told = []
    tensor = SimpleNamespace(is_cuda=True, device="cuda:0", record_stream=told.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    interface.used_on_this_stream(tensor, None)  # type: ignore[arg-type]
    assert told == []
    ubatching.enable(1)
    try:
        interface.used_on_this_stream(tensor, None, torch.zeros(1))  # type: ignore[arg-type]
    finally:
        ubatching.disable()
    assert told == ["stream of cuda:0"]


@pytest.mark.parametrize("is_scale_swizzled", [False, True])
def test_scales_of_rows_that_came_as_they_were_have_the_order_that_experts_take(
    is_scale_swizzled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def quantise(rows, scale, **options):
        seen.append(options["is_scale_swizzled"])
        return rows, None

    monkeypatch.setattr(interface, "moe_kernel_quantize_input", quantise)

    def fn(group):
        manager = adapter.NormalManager(group)
        made = adapter.NormalPrepareFinalize(manager.get_handle({}), 1, 1, 0)
        x, ids, weights = drop_in.routed(0, 3)
        config = vllm_quant("bf16")
        config.is_scale_swizzled = is_scale_swizzled
        made.prepare(x, weights, ids, NUM_EXPERTS, None, False, config)

    local.run(fn, 1, timeout_s=60)
    assert seen == [is_scale_swizzled]
