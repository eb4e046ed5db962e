"""vLLM's deepep_v2 backend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import drop_in
import torch
from drop_in import NUM_EXPERTS
from torch import Tensor

from released import vllm_parts
from released.package import released
from released.program import Checks, Program
from released.vllm_parts import ALL2ALL, MOE


def experts(group: Any, is_expanded: bool) -> Any:
    """Experts of expanded rows, or of compact ones with room behind them."""
    num_local = NUM_EXPERTS // group.size()
    first = num_local * group.rank()

    def compute(x: Tensor, meta: Any, ids: Tensor) -> Tensor:
        if is_expanded:
            counts = [int((ids == first + expert).sum()) for expert in range(num_local)]
            assert meta.expert_num_tokens_cpu.tolist() == counts
            assert ids.shape == (x.shape[0], 1)
        else:
            # Rows behind those that came are nobody's, whatever they hold.
            num_came = int(meta.psum_recv_per_rank[-1])
            assert bool((ids[num_came:] == -1).all())
        return vllm_parts.standard_experts(x, ids, first, num_local)

    return compute


def elastic(group: Any, checks: Checks) -> None:
    all2all, utils = released(ALL2ALL), released(f"{MOE}.all2all_utils")
    rank, num_ranks, hidden = group.rank(), group.size(), 512
    manager = all2all.DeepEPV2All2AllManager(group, device_group=group)
    moe = vllm_parts.moe_config(group, "deepep_v2", hidden)
    for is_captured in (False, True):
        # Where CUDA graphs are captured rows are compact and the host does not wait for counts.
        vllm_parts.CONFIG.model_config.enforce_eager = not is_captured
        for kind in ("bf16", "fp8", "mxfp8"):
            adapter = utils.maybe_make_prepare_finalize(
                moe, vllm_parts.quant_config(kind), all2all_manager=manager
            )
            name = "DeepEPV2PrepareAndFinalize"
            mine = getattr(released(f"{MOE}.prepare_finalize.deepep_v2"), name)
            checks.true(type(adapter) is mine, "the adapter is the released one")
            for step, routing in enumerate(("distinct", "holes", "distinct")):
                counts = [drop_in.num_tokens_of(other + step) for other in range(num_ranks)]
                vllm_parts.FORWARD.dp_metadata = SimpleNamespace(
                    num_tokens_across_dp_cpu=torch.tensor(counts)
                )
                tokens = vllm_parts.routed(
                    rank, counts[rank], hidden=hidden, routing=routing, seed=step
                )
                layout = "compact without sync" if is_captured else "expanded"
                vllm_parts.step(
                    checks, adapter, tokens, kind, step > 0, experts(group, not is_captured),
                    f"{layout}, {kind}, {routing}",
                )  # fmt: skip
    checks.true(manager.max_sms_used() > 0, "a number of SMs")
    vllm_parts.CONFIG.model_config.enforce_eager = True
    manager.destroy()


PROGRAMS = (
    Program(
        "vllm-v2", "deepep_v2.py", vllm_parts.RELEASE, elastic, vllm_parts.stand_ins,
        backend="nccl", variables={"EP_DISABLE_GIN": "1"},
    ),
)  # fmt: skip
