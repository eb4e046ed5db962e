"""deep_comm.integrations.vllm: the adapter of deepep_low_latency, with rows by expert."""

from __future__ import annotations

from types import SimpleNamespace

import drop_in
import pytest
import torch
from drop_in import HIDDEN, NUM_EXPERTS, vllm_quant
from run_by import run_by
from vllm import config as vllm_config
from vllm import forward_context
from vllm.distributed.device_communicators import all2all
from vllm.model_executor.layers.fused_moe import all2all_utils, modular_kernel
from vllm.model_executor.layers.fused_moe.experts.fused_batched_moe import BatchedTritonExperts
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
)
from vllm.v1.worker import ubatching

import deep_comm
from deep_comm import UnsupportedError, errors, local
from deep_comm.integrations import vllm as adapter

FORMAT = modular_kernel.FusedMoEActivationFormat
pytestmark = pytest.mark.usefixtures("vllm_defaults")


@pytest.mark.parametrize("kind", ["bf16", "fp8", "ue8m0", "fp8 again"])
@pytest.mark.parametrize("is_moved", [False, True])
@run_by(local.run, 2, timeout_s=60)
def test_batched_format(group, /, kind: str, is_moved: bool) -> None:
    rank, num_ranks = group.rank(), group.size()
    num_local = NUM_EXPERTS // num_ranks
    adapter.register()
    manager = all2all.DeepEPLLAll2AllManager(group)
    assert manager.max_sms_used() == 0
    hidden, max_tokens = 2 * HIDDEN, 12
    tables = None
    if is_moved:
        physical = torch.arange(NUM_EXPERTS, dtype=torch.int32).flip(0)
        tables = (physical, physical, physical[rank * num_local :][:num_local])
    prepare_finalize = all2all_utils.make_low_latency(
        manager, max_tokens, hidden, NUM_EXPERTS, kind != "bf16", tables
    )
    assert isinstance(prepare_finalize, adapter.LowLatencyPrepareFinalize)
    assert prepare_finalize.activation_format is FORMAT.BatchedExperts
    assert prepare_finalize.max_num_tokens_per_rank() == max_tokens
    experts = BatchedTritonExperts(max_tokens, kind == "ue8m0")
    prepare_finalize.post_init_setup(experts)
    config = vllm_quant("bf16" if kind == "fp8 again" else "fp8" if kind != "bf16" else "bf16")
    # The first step has all room, whatever comes.
    rooms = ((2, 12), (3, 4), (12, 12), (5, 8), (None, 12), (1, 1), (0, 1))
    for step, (most, room) in enumerate(rooms):
        largest = 7 if most is None else most
        tokens_of_ranks = [largest // 3] * num_ranks
        tokens_of_ranks[step % num_ranks] = largest
        # Some steps are filled up, that of an idle rank with a token alone.
        routing = "padded" if step > 2 else "distinct"
        x, ids, weights = drop_in.routed(
            rank, tokens_of_ranks[rank], hidden=hidden, routing=routing, seed=step
        )
        forward_context.set_tokens_of_ranks(None if most is None else torch.tensor(tokens_of_ranks))
        hook, receiver = prepare_finalize.prepare_async(
            x, weights, ids, NUM_EXPERTS, None, False, config
        )
        hook()
        rows, scales, meta, recv_ids, recv_weights = receiver()
        assert recv_ids is None and recv_weights is None
        assert experts.max_num_tokens == room and rows.shape[1] == num_ranks * room
        counts = meta.expert_num_tokens
        all_ids = [
            drop_in.routed(one, tokens_of_ranks[one], hidden=hidden, routing=routing, seed=step)[1]
            for one in range(num_ranks)
        ]
        moved = prepare_finalize.global_to_physical
        chosen = torch.cat(all_ids).flatten()
        chosen = chosen[chosen >= 0] if moved is None else moved[chosen[chosen >= 0]]
        wanted_counts = torch.bincount(chosen, minlength=NUM_EXPERTS)
        assert counts.tolist() == wanted_counts[rank * num_local :][:num_local].tolist()
        if kind == "ue8m0":
            assert scales.dtype == torch.int32 and scales.shape[-1] == hidden // 512
            packed = scales.squeeze(-1).contiguous().unsqueeze(-1)
            exponents = packed.view(torch.uint8).to(torch.int32) - 127
            scales = torch.exp2(exponents.float())
        values = rows.float() if scales is None else drop_in.dequantised(rows, scales)
        first = rank * num_local
        out = torch.zeros(rows.shape, dtype=torch.bfloat16)
        for expert, count in enumerate(counts.tolist()):
            factor = first + expert
            factor = NUM_EXPERTS - factor if moved is not None else factor + 1
            out[expert, :count] = (values[expert, :count] * factor).to(torch.bfloat16)
        output = torch.full_like(x, float("nan"))
        hook, receiver = prepare_finalize.finalize_async(
            output, out, weights, ids, False, TopKWeightAndReduceDelegate()
        )
        hook()
        receiver()
        wanted = drop_in.dense(x, ids, weights)
        tolerance = 0.08 * float(wanted.abs().max()) if "fp8" in kind and len(x) else 0.0
        if len(x):
            assert float((output.float() - wanted).abs().max()) <= tolerance
    with pytest.raises(errors.ArgumentError, match="weight_and_reduce_impl"):
        prepare_finalize.finalize(output, out, weights, ids, False, TopKWeightAndReduceContiguous())
    with pytest.raises(UnsupportedError, match="defer_input_quant"):
        prepare_finalize.prepare(x, weights, ids, NUM_EXPERTS, None, False, config, True)
    group.barrier()


def room_of_a_right_step(
    made: adapter.LowLatencyPrepareFinalize, rank: int, num_tokens: int
) -> int:
    """Of two ranks: the tokens of each that experts had room for."""
    x, ids, weights = drop_in.routed(rank, num_tokens)
    rows, _, meta, _, _ = made.prepare(
        x, weights, ids, NUM_EXPERTS, None, False, vllm_quant("bf16")
    )
    out = drop_in.masked_experts(rows, meta.expert_num_tokens, rank * NUM_EXPERTS // 2)
    output = torch.empty_like(x)
    made.finalize(output, out, weights, ids, False, TopKWeightAndReduceDelegate())
    assert torch.equal(output.float(), drop_in.dense(x, ids, weights))
    return rows.shape[1] // 2


class OtherExperts:
    """As those of DeepGEMM."""

    def __init__(self, max_num_tokens: int) -> None:
        self.max_num_tokens = max_num_tokens


@run_by(local.run, 2, timeout_s=60)
def test_full_room_of_other_experts_and_with_two_micro_batches(group, /) -> None:
    rank, max_tokens = group.rank(), 12
    num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(12, HIDDEN, 2, NUM_EXPERTS)
    buffer = deep_comm.Buffer(group, 0, num_bytes, low_latency_mode=True, device="cpu")
    for kind, wanted in ((BatchedTritonExperts, 4), (OtherExperts, max_tokens)):
        experts = kind(max_tokens)
        made = adapter.LowLatencyPrepareFinalize(
            buffer, max_tokens, 2, tokens_of_ranks=lambda: [3, 1]
        )
        made.post_init_setup(experts)
        assert room_of_a_right_step(made, rank, 3) == max_tokens
        assert room_of_a_right_step(made, rank, 3) == wanted == experts.max_num_tokens
        ubatching.enable(0)
        try:
            assert room_of_a_right_step(made, rank, 3) == max_tokens == experts.max_num_tokens
        finally:
            ubatching.disable()
        assert room_of_a_right_step(made, rank, 3) == wanted == experts.max_num_tokens
    group.barrier()


@pytest.mark.parametrize("is_asked", [False, True])
def test_rows_of_four_bits_where_experts_take_them(is_asked: bool, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_DEEPEPLL_NVFP4_DISPATCH", str(int(is_asked)))

    def fn(group):
        rank, num_ranks = group.rank(), group.size()
        hidden, first = 2 * HIDDEN, drop_in.first_of(rank, num_ranks)
        adapter.register()
        prepare_finalize = all2all_utils.make_low_latency(
            all2all.DeepEPLLAll2AllManager(group), 12, hidden, NUM_EXPERTS, False, None
        )
        config = vllm_quant("bf16")
        config.quant_dtype, config.a1_gscale = "nvfp4", torch.full((1,), 448.0)
        x, ids, weights = drop_in.routed(rank, 5 + rank, hidden=hidden)
        x[:, ::16] = 6.0  # so that all values are exact
        rows, scales, meta, _, _ = prepare_finalize.prepare(
            x, weights, ids, NUM_EXPERTS, None, False, config
        )
        if is_asked:
            assert rows.shape[-1] == hidden // 2 and rows.is_contiguous()
            rows = drop_in.dequantised_nvfp4(rows.permute(1, 2, 0), scales, config.a1_gscale)
        else:
            assert rows.dtype == torch.bfloat16  # such experts quantise themselves
        out = drop_in.masked_experts(rows, meta.expert_num_tokens, first)
        output = torch.empty_like(x)
        prepare_finalize.finalize(output, out, weights, ids, False, TopKWeightAndReduceDelegate())
        assert torch.equal(output.float(), drop_in.dense(x, ids, weights))
        group.barrier()

    local.run(fn, 2, timeout_s=60)


def test_fault_tolerance_asks_the_buffer_made_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM does after each step, and once it has dealt with a fault."""
    parallel = SimpleNamespace(enable_fault_tolerance=True)
    config = SimpleNamespace(parallel_config=parallel)
    monkeypatch.setattr(vllm_config, "get_current_vllm_config", lambda: config)
    sizes = dict(
        max_num_tokens_per_dp_rank=8, token_hidden_size=HIDDEN, num_ep_ranks=2,
        num_global_experts=NUM_EXPERTS, num_local_experts=NUM_EXPERTS // 2,
    )  # fmt: skip

    def fn(group):
        rank = group.rank()
        manager = adapter.LowLatencyManager(group)
        assert manager.support_fault_tolerance
        with pytest.raises(UnsupportedError, match="no Buffer"):
            manager.query_active_mask()
        buffer = manager.get_handle(sizes)
        assert buffer.enable_shrink
        # Masks of many ranks take memory, too.
        many = (256, 7168, 128, 256)
        names = list(sizes)[:4]
        found = manager.buffer_arguments(dict(zip(names, many, strict=True)))["num_rdma_bytes"]
        hint = deep_comm.Buffer.get_low_latency_rdma_size_hint
        assert found == hint(*many, ranks_per_node=2, enable_shrink=True)
        assert found > hint(*many, ranks_per_node=2)
        assert manager.query_active_mask().tolist() == [0, 0] and not manager.query_fault()
        group.barrier()
        buffer.low_latency_update_mask_buffer(1 - rank, True)
        assert manager.query_fault() and manager.query_active_mask().sum() == 1
        group.barrier()
        manager.clean_buffers()
        assert not manager.query_fault()
        made = adapter.LowLatencyPrepareFinalize(buffer, 8, 2)
        assert room_of_a_right_step(made, rank, 3 + rank) == 8
        group.barrier()
        manager.destroy()

    local.run(fn, 2, timeout_s=60)


@run_by(local.run, 1, timeout_s=60)
def test_without_fault_tolerance_no_rank_is_masked_out(group, /) -> None:
    manager = adapter.LowLatencyManager(group)
    assert not manager.support_fault_tolerance
    sizes = dict(
        max_num_tokens_per_dp_rank=8, token_hidden_size=HIDDEN, num_ep_ranks=1,
        num_global_experts=NUM_EXPERTS,
    )  # fmt: skip
    assert manager.buffer_arguments(sizes)["enable_shrink"] is False
    with pytest.raises(UnsupportedError, match="fault tolerance is off"):
        manager.query_active_mask()
    with pytest.raises(UnsupportedError, match="low latency's alone"):
        adapter.NormalManager(group).query_active_mask()
    manager.clean_buffers()
