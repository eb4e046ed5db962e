"""SGLang's decoding dispatchers in CUDA graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import drop_in
import torch
from torch import Tensor

from released import graphs, sglang_parts, sglang_v1, sglang_v2, vllm_parts
from released.package import released
from released.program import Checks, Program
from released.sglang_parts import MOE


def _expanded(arrived: Any, first: int) -> Tensor:
    """Weighted rows of the experts, which begin at multiples of 128; without asking the host."""
    rows = vllm_parts.values(arrived.hidden_states, arrived.hidden_states_scale)
    ends = arrived.psum_num_recv_tokens_per_expert
    begins = torch.nn.functional.pad((ends + 127) // 128 * 128, (1, -1))
    row = torch.arange(rows.shape[0], device=rows.device).unsqueeze(1)
    is_of = (row >= begins) & (row < ends)  # [N, L]
    factors = is_of * (first + 1 + torch.arange(len(ends), device=rows.device))
    factors = factors.sum(dim=1) * torch.where(is_of.any(dim=1), arrived.topk_weights, 0.0)
    is_row = is_of.any(dim=1, keepdim=True)
    return (torch.where(is_row, rows, 0.0) * factors.unsqueeze(1)).to(torch.bfloat16)


def run(group: Any, checks: Checks, is_v2_too: bool = True) -> None:
    server = sglang_parts.server
    server.is_extend_in_batch = False
    first = drop_in.first_of(group.rank(), group.size())
    for generation in ("hopper", "blackwell"):
        for dtype in ("fp8", "bf16"):
            server.use(generation, dtype)
            low_latency = sglang_v1.made(group, is_async=generation == "hopper")
            v1 = released(f"{MOE}.token_dispatcher.deepep")

            def v1_layer(tokens: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
                x, ids, weights = tokens
                topk = SimpleNamespace(topk_weights=weights, topk_ids=ids)
                arrived = low_latency.dispatch(hidden_states=x, topk_output=topk)
                rows = vllm_parts.values(arrived.hidden_states, arrived.hidden_states_scale)
                out = graphs.batched_experts(rows, arrived.masked_m, first)
                sent = v1.DeepEPLLCombineInput(out, arrived.topk_ids, arrived.topk_weights)
                output.copy_(low_latency.combine(combine_input=sent))

            def compare(output: Tensor, expected: Tensor, what: str) -> None:
                share = 0.08 if (generation, dtype) == ("hopper", "fp8") else 0.0
                checks.agrees(
                    output, expected, share, f"low latency, {dtype}, {generation}, {what}"
                )

            graphs.replayed(group, sglang_v1.HIDDEN, v1_layer, compare)
            if not is_v2_too:
                continue
            v2 = released(f"{MOE}.token_dispatcher.deepep_v2")
            elastic = sglang_v2.made(group, dtype)

            def v2_layer(tokens: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
                x, ids, weights = tokens
                arrived = elastic.dispatch(x, SimpleNamespace(topk_weights=weights, topk_ids=ids))
                sent = v2.DeepEPv2CombineInput(_expanded(arrived, first), None)
                output.copy_(elastic.combine(sent))

            def compare_v2(output: Tensor, expected: Tensor, what: str) -> None:
                checks.equal(output, expected, f"v2, {dtype}, {generation}, {what}")

            graphs.replayed(group, sglang_v2.HIDDEN, v2_layer, compare_v2)
    server.resources.buffers.clear()


PROGRAMS = (
    Program(
        "sglang-graphs", "deepep.py, deepep_v2.py", sglang_parts.RELEASE, run,
        sglang_parts.stand_ins, backend="nccl",
        variables={
            **sglang_v1.PROGRAMS[0].variables,
            **sglang_v2.PROGRAMS[0].variables,
        },
    ),
)  # fmt: skip
