"""SGLang's deepep backend: normal mode and low latency over one Buffer, two micro-batches."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import drop_in
import torch
from drop_in import NUM_EXPERTS, NUM_TOPK

from released import sglang_parts, vllm_parts
from released.package import released
from released.program import Checks, Program, synchronise
from released.sglang_parts import MOE

HIDDEN = 1024


def _experts(group: Any, arrived: Any) -> Any:
    """What a runner makes of a dispatched batch: the input of combine."""
    deepep = released(f"{MOE}.token_dispatcher.deepep")
    first = drop_in.first_of(group.rank(), group.size())
    rows, scales = arrived.hidden_states, arrived.hidden_states_scale
    if rows.dtype == torch.uint8:
        rows = rows.permute(2, 0, 1)
    rows = vllm_parts.values(rows, scales)
    if isinstance(arrived, deepep.DeepEPLLDispatchOutput):
        out = drop_in.masked_experts(rows, arrived.masked_m, first)
        return deepep.DeepEPLLCombineInput(out, arrived.topk_ids, arrived.topk_weights)
    num_local = NUM_EXPERTS // group.size()
    counts = [int((arrived.topk_ids == expert).sum()) for expert in range(num_local)]
    padded = [-(-count // 128) * 128 for count in counts]  # as DeepGEMM wants them
    assert arrived.num_recv_tokens_per_expert == padded
    out = drop_in.local_experts(rows, arrived.topk_ids, arrived.topk_weights, first)
    return deepep.DeepEPNormalCombineInput(out, arrived.topk_ids, arrived.topk_weights)


def _micro_batches(group: Any, checks: Checks, dispatcher: Any, seed: int, what: str) -> None:
    """Both micro-batches of a step are under way between their halves."""
    server, batches = sglang_parts.server, []
    for half in range(2):
        num_tokens = drop_in.num_tokens_of(group.rank() + (seed + half) % 4)
        routing = ("distinct", "holes")[(seed + half) % 2]
        x, ids, weights = vllm_parts.routed(
            group.rank(), num_tokens, hidden=HIDDEN, routing=routing, seed=2 * seed + half
        )
        if server.moe.deepep_dispatcher_output_dtype == "auto":
            vllm_parts.for_nvfp4(x)
        batches.append((x, ids, weights))
        topk = SimpleNamespace(topk_weights=weights, topk_ids=ids.to(torch.int32))
        dispatcher.dispatch_a(hidden_states=x, topk_output=topk, tbo_subbatch_index=half)
    inputs = []
    for half in range(2):
        arrived = dispatcher.dispatch_b(tbo_subbatch_index=half)
        inputs.append(_experts(group, arrived))
        dispatcher.combine_a(combine_input=inputs[half], tbo_subbatch_index=half)
    for half, (x, ids, weights) in enumerate(batches):
        combined = dispatcher.combine_b(tbo_subbatch_index=half)
        synchronise()
        expected = drop_in.dense(x, ids, weights)
        scales = released("sglang.srt.layers.deep_gemm_wrapper").DEEPGEMM_SCALE_UE8M0
        is_exact = server.is_extend_in_batch or scales
        # Scales that are no powers of two round.
        is_cast = server.moe.deepep_dispatcher_output_dtype == "fp8" and not is_exact
        checks.agrees(combined, expected, 0.08 if is_cast else 0.0, what)


def made(group: Any, is_async: bool) -> Any:
    """SGLang's dispatcher of a layer, as its layers make it; hooks and events if ``is_async``."""
    utils = released(f"{MOE}.utils")
    sglang_parts.server.flags.a2a_backend = utils.MoeA2ABackend.DEEPEP
    two_batches = released("sglang.srt.batch_overlap.two_batch_overlap")
    return two_batches.MaybeTboDeepEPDispatcher(
        group=group, router_topk=NUM_TOPK, permute_fusion=True, num_experts=NUM_EXPERTS,
        num_local_experts=NUM_EXPERTS // group.size(), hidden_size=HIDDEN,
        params_dtype=torch.bfloat16, deepep_mode=utils.DeepEPMode.AUTO, async_finish=is_async,
        return_recv_hook=is_async,
    )  # fmt: skip


def run(group: Any, checks: Checks, kind_of_dispatcher: type | None = None) -> None:
    """With the released dispatcher, or ours, registered in its place."""
    server = sglang_parts.server
    rings = dict(normal_dispatch=sglang_parts.RINGS, normal_combine=sglang_parts.RINGS)
    server.flags.deepep_config = json.dumps(rings)
    seed = 0
    for generation in ("hopper", "blackwell"):
        for dtype in ("fp8", "bf16", "nvfp4"):
            server.use(generation, "auto" if dtype == "nvfp4" else dtype)
            dispatcher = made(group, is_async=dtype == "fp8")
            if dtype == "nvfp4":  # while decoding
                scale = torch.full((1,), vllm_parts.NVFP4_SCALE, device=drop_in.device())
                dispatcher.set_quant_config({"input_global_scale": scale})
            theirs = released(f"{MOE}.token_dispatcher.deepep").DeepEPDispatcher
            kinds = [type(inner) for inner in dispatcher._inners]
            checks.true(kinds == [kind_of_dispatcher or theirs] * 2, "the dispatcher is meant")
            for is_extend in (True, False, True, False):  # a prefill, a decode, and again
                server.is_extend_in_batch = is_extend
                mode = "normal" if is_extend else "low latency"
                _micro_batches(group, checks, dispatcher, seed, f"{mode}, {dtype}, {generation}")
                seed += 1
    if kind_of_dispatcher is None:
        checks.true(len(server.resources.buffers) == 1, "one Buffer for all")
    drop_in.barrier(group)
    server.resources.buffers.clear()


PROGRAMS = (
    Program(
        "sglang-v1", "token_dispatcher/deepep.py", sglang_parts.RELEASE, run,
        sglang_parts.stand_ins, backend="nccl",
        variables={
            "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": str(sglang_parts.MAX_TOKENS)
        },
    ),
)  # fmt: skip
