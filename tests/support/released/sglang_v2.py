"""SGLang's deepep_v2 backend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import drop_in
import torch
from drop_in import NUM_EXPERTS, NUM_TOPK
from torch import Tensor

from released import sglang_parts, vllm_parts
from released.package import released
from released.program import Checks, Program, synchronise
from released.sglang_parts import MOE

HIDDEN = 1024


def _experts(group: Any, arrived: Any) -> Tensor:
    first = drop_in.first_of(group.rank(), group.size())
    rows, scales = arrived.hidden_states, arrived.hidden_states_scale
    if not arrived.is_expanded:
        values = vllm_parts.values(rows, scales)
        return drop_in.local_experts(values, arrived.topk_ids, arrived.topk_weights, first)
    if scales is not None and scales.dtype == torch.int32:
        # Column by column, with room for a multiple of four rows.
        assert scales.stride() == (1, -(-rows.shape[0] // 4) * 4)
    out = torch.full(rows.shape, float("nan"), dtype=torch.bfloat16, device=rows.device)
    begin = 0
    for expert, end in enumerate(arrived.psum_num_recv_tokens_per_expert.tolist()):
        part = slice(begin, end)
        values = vllm_parts.values(rows[part], None if scales is None else scales[part])
        factor = arrived.topk_weights[part].unsqueeze(1) * (first + expert + 1)
        out[part] = (values * factor).to(torch.bfloat16)
        begin = -(-end // 128) * 128
    return out


def made(group: Any, dtype: str) -> Any:
    """SGLang's dispatcher of a layer; "fp8" or "bf16" between ranks."""
    v2 = released(f"{MOE}.token_dispatcher.deepep_v2")
    return v2.DeepEPv2Dispatcher(
        group=group, router_topk=NUM_TOPK, num_experts=NUM_EXPERTS,
        num_local_experts=NUM_EXPERTS // group.size(), hidden_size=HIDDEN,
        params_dtype=torch.bfloat16, use_fp8_dispatch=dtype == "fp8",
    )  # fmt: skip


def run(group: Any, checks: Checks) -> None:
    server = sglang_parts.server
    v2 = released(f"{MOE}.token_dispatcher.deepep_v2")
    seed = 0
    for generation in ("hopper", "blackwell"):
        for dtype in ("fp8", "bf16"):
            server.use(generation, dtype)
            dispatcher = made(group, dtype)
            dispatcher.prebuild()
            for is_extend in (True, False, True, False):
                server.is_extend_in_batch = is_extend
                num_tokens = drop_in.num_tokens_of(group.rank() + seed % 2)
                routing = "holes" if seed % 4 == 1 else "distinct"
                x, ids, weights = vllm_parts.routed(
                    group.rank(), num_tokens, hidden=HIDDEN, routing=routing, seed=seed
                )
                seed += 1
                topk = SimpleNamespace(topk_weights=weights, topk_ids=ids.to(torch.int32))
                arrived = dispatcher.dispatch(x, topk)
                combined = dispatcher.combine(
                    v2.DeepEPv2CombineInput(_experts(group, arrived), None)
                )
                synchronise()
                layout = "expanded" if arrived.is_expanded else "compact"
                phase = "prefill" if is_extend else "decoding"
                what = f"{phase}, {layout}, {dtype}, {generation}"
                checks.equal(combined, drop_in.dense(x, ids, weights), what)
    drop_in.barrier(group)
    v2.DeepEPv2Buffer.destroy()


PROGRAMS = (
    Program(
        "sglang-v2", "token_dispatcher/deepep_v2.py", sglang_parts.RELEASE, run,
        sglang_parts.stand_ins, backend="nccl",
        variables={
            "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK": str(sglang_parts.MAX_TOKENS)
        },
    ),
)  # fmt: skip
