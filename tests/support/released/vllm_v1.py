"""vLLM's deepep_high_throughput and deepep_low_latency backends."""

from __future__ import annotations

import os
from typing import Any

import drop_in
import torch
from drop_in import NUM_EXPERTS
from torch import Tensor

from released import vllm_parts
from released.package import released
from released.program import Checks, Program
from released.vllm_parts import ALL2ALL, MOE


def standard(group: Any) -> Any:
    """Experts of rows that come once a rank."""
    num_local = NUM_EXPERTS // group.size()
    first = num_local * group.rank()

    def experts(x: Tensor, meta: Any, ids: Tensor) -> Tensor:
        counts = [int((ids == first + expert).sum()) for expert in range(num_local)]
        assert meta.expert_num_tokens_cpu.tolist() == counts
        return vllm_parts.standard_experts(x, ids, first, num_local)

    return experts


def batched(first: int) -> Any:
    """Experts of rows that come by expert, with room."""

    def experts(x: Tensor, meta: Any, ids: None) -> Tensor:
        return drop_in.masked_experts(x, meta.expert_num_tokens, first)

    return experts


def high_throughput(group: Any, checks: Checks, kind_of_adapter: type | None = None) -> None:
    """With the released adapter, or that of ours which is registered in its place."""
    all2all, utils = released(ALL2ALL), released(f"{MOE}.all2all_utils")
    rank, hidden = group.rank(), 512
    manager = all2all.DeepEPHTAll2AllManager(group)
    adapter = utils.maybe_make_prepare_finalize(
        vllm_parts.moe_config(group, "deepep_high_throughput", hidden),
        vllm_parts.quant_config("bf16"), all2all_manager=manager,
    )  # fmt: skip
    theirs = released(f"{MOE}.prepare_finalize.deepep_ht").DeepEPHTPrepareAndFinalize
    checks.true(type(adapter) is (kind_of_adapter or theirs), "the adapter is the one meant")
    for kind in ("bf16", "fp8"):
        for is_async in (False, True):
            for step, routing in enumerate(("distinct", "holes", "duplicates")):
                num_tokens = drop_in.num_tokens_of(rank + step)
                tokens = vllm_parts.routed(
                    rank, num_tokens, hidden=hidden, routing=routing, seed=step
                )
                what = f"prefill, {kind}, {'async' if is_async else 'sync'}, {routing}"
                vllm_parts.step(checks, adapter, tokens, kind, is_async, standard(group), what)
    for step in range(2):
        tokens = vllm_parts.routed(
            rank, drop_in.num_tokens_of(rank + step), hidden=hidden, num_topk=1, seed=step
        )
        vllm_parts.step(
            checks, adapter, tokens, "bf16", True, standard(group), "top-1, weighted input", True
        )
    manager.destroy()


def low_latency(group: Any, checks: Checks, kind_of_adapter: type | None = None) -> None:
    """As :func:`high_throughput`."""
    all2all, utils = released(ALL2ALL), released(f"{MOE}.all2all_utils")
    rank, num_ranks, hidden = group.rank(), group.size(), 2048
    num_local = NUM_EXPERTS // num_ranks
    vllm_parts.CONFIG.parallel_config.enable_fault_tolerance = True
    manager = all2all.DeepEPLLAll2AllManager(group)
    moe = vllm_parts.moe_config(group, "deepep_low_latency", hidden)

    def make(kind: str, tables: Any = None) -> Any:
        return utils.maybe_make_prepare_finalize(
            moe, vllm_parts.quant_config(kind), tables, all2all_manager=manager
        )

    def steps(adapter: Any, kind: str, what: str, share: float = 0.0, experts: Any = None) -> None:
        experts = experts or batched(rank * num_local)
        for step in range(2):
            num_tokens = min(vllm_parts.MAX_TOKENS, drop_in.num_tokens_of(rank + step))
            routing = "holes" if step else "distinct"
            tokens = vllm_parts.routed(rank, num_tokens, hidden=hidden, routing=routing, seed=step)
            if kind == "nvfp4":
                vllm_parts.for_nvfp4(tokens[0])
            vllm_parts.step(checks, adapter, tokens, kind, step == 1, experts, what, share=share)

    plain = make("bf16")
    theirs = released(f"{MOE}.prepare_finalize.deepep_ll").DeepEPLLPrepareAndFinalize
    checks.true(type(plain) is (kind_of_adapter or theirs), "the adapter is the one meant")
    steps(plain, "bf16", "decoding, bf16")
    steps(make("fp8"), "fp8", "decoding, fp8", share=0.08)
    packed = make("fp8")
    packed.post_init_setup(_PacksScales())
    steps(packed, "fp8", "decoding, fp8 with packed exponents")
    os.environ["VLLM_DEEPEPLL_NVFP4_DISPATCH"] = "1"
    steps(make("nvfp4"), "nvfp4", "decoding, nvfp4")
    del os.environ["VLLM_DEEPEPLL_NVFP4_DISPATCH"]
    # Experts that have moved: expert e lives where expert 5 e mod 16 did.
    ids = torch.arange(NUM_EXPERTS, device=drop_in.device())
    to_physical = ids * 5 % NUM_EXPERTS
    to_global = torch.argsort(to_physical)
    local = to_global[rank * num_local : (rank + 1) * num_local]

    def moved(x: Tensor, meta: Any, _: None) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.bfloat16, device=x.device)
        for slot, count in enumerate(meta.expert_num_tokens.tolist()):
            out[slot, :count] = (x[slot, :count] * (local[slot] + 1)).to(out.dtype)
        return out

    # Without holes: the table has no entry for -1.
    adapter = make("bf16", (to_physical, to_global, local))
    tokens = vllm_parts.routed(rank, drop_in.num_tokens_of(rank), hidden=hidden, seed=7)
    vllm_parts.step(checks, adapter, tokens, "bf16", True, moved, "decoding, moved experts")
    # Fault tolerance with everyone alive.
    mask = manager.query_active_mask()
    checks.equal(mask, torch.zeros_like(mask), "nobody is masked")
    checks.true(not manager.query_fault(), "no fault")
    drop_in.barrier(group)
    manager.clean_buffers()
    drop_in.barrier(group)
    steps(plain, "bf16", "decoding after cleaning")
    vllm_parts.CONFIG.parallel_config.enable_fault_tolerance = False
    manager.destroy()


class _PacksScales:
    """Experts that take four exponents in an int32."""

    def supports_packed_ue8m0_act_scales(self) -> bool:
        return True


PROGRAMS = (
    Program(
        "vllm-ht", "deepep_ht.py", vllm_parts.RELEASE, high_throughput, vllm_parts.stand_ins,
        variables={"VLLM_DEEPEP_BUFFER_SIZE_MB": "128"},
    ),
    Program(
        "vllm-ll", "deepep_ll.py", vllm_parts.RELEASE, low_latency, vllm_parts.stand_ins,
        variables={"VLLM_DEEPEP_BUFFER_SIZE_MB": "128"},
    ),
)  # fmt: skip
