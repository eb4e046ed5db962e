"""vLLM's decoding adapters in CUDA graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import drop_in
import torch
from drop_in import NUM_EXPERTS
from torch import Tensor

from released import graphs, vllm_parts
from released.package import released
from released.program import Checks, Program
from released.vllm_parts import ALL2ALL, MOE

_HIDDEN = 2048


def run(group: Any, checks: Checks, backends: tuple[str, ...] = ("low latency", "v2")) -> None:
    all2all, utils = released(ALL2ALL), released(f"{MOE}.all2all_utils")
    rank, num_ranks = group.rank(), group.size()
    first, num_local = drop_in.first_of(rank, num_ranks), NUM_EXPERTS // num_ranks

    def batched(x: Tensor, meta: Any, ids: None) -> Tensor:
        return graphs.batched_experts(x, meta.expert_num_tokens, first)

    def standard(x: Tensor, meta: Any, ids: Tensor) -> Tensor:
        return vllm_parts.standard_experts(x, ids, first, num_local)

    vllm_parts.CONFIG.model_config.enforce_eager = False
    vllm_parts.FORWARD.dp_metadata = SimpleNamespace(
        num_tokens_across_dp_cpu=torch.tensor([graphs.NUM_TOKENS] * num_ranks)
    )
    ways = {
        "low latency": ("deepep_low_latency", all2all.DeepEPLLAll2AllManager, batched),
        "v2": ("deepep_v2", all2all.DeepEPV2All2AllManager, standard),
    }
    for way in backends:
        backend, manager_class, experts = ways[way]
        manager = manager_class(group)
        for kind in ("bf16", "fp8"):
            adapter = utils.maybe_make_prepare_finalize(
                vllm_parts.moe_config(group, backend, _HIDDEN), vllm_parts.quant_config(kind),
                all2all_manager=manager,
            )  # fmt: skip

            def layer(tokens: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
                vllm_parts.layer(adapter, tokens, kind, True, experts, output)

            def compare(output: Tensor, expected: Tensor, what: str) -> None:
                share = 0.08 if (way, kind) == ("low latency", "fp8") else 0.0
                checks.agrees(output, expected, share, f"{way}, {kind}, {what}")

            graphs.replayed(group, _HIDDEN, layer, compare)
        manager.destroy()
    vllm_parts.CONFIG.model_config.enforce_eager = True
    vllm_parts.FORWARD.dp_metadata = None


PROGRAMS = (
    Program(
        "vllm-graphs", "deepep_ll.py, deepep_v2.py", vllm_parts.RELEASE, run,
        vllm_parts.stand_ins,
        variables={"VLLM_DEEPEP_BUFFER_SIZE_MB": "128", "EP_DISABLE_GIN": "1"},
    ),
)  # fmt: skip
