"""Our own adapters for vLLM and SGLang, registered in the released modules as a server does it, and
put through what the released ones are.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import SimpleNamespace
from typing import Any

import drop_in
import torch

from released import (
    sglang_graphs,
    sglang_parts,
    sglang_v1,
    vllm_dbo,
    vllm_faults,
    vllm_graphs,
    vllm_parts,
    vllm_v1,
)
from released.package import released
from released.program import Checks, Program
from released.vllm_parts import ALL2ALL, MOE

_DECODE_TOKENS = 12


def _registered(name: str) -> Any:
    """deep_comm.integrations.``name``, which finds the released package, in its place."""
    for module in [one for one in sys.modules if one.startswith("deep_comm.integrations")]:
        del sys.modules[module]
    adapter = importlib.import_module(f"deep_comm.integrations.{name}")
    adapter.register()
    return adapter


def vllm(group: Any, checks: Checks) -> None:
    adapter = _registered("vllm")
    vllm_v1.high_throughput(group, checks, adapter.NormalPrepareFinalize)
    vllm_v1.low_latency(group, checks, adapter.LowLatencyPrepareFinalize)
    _by_counts(group, checks)
    _room_by_counts(group, checks)


def _by_counts(group: Any, checks: Checks) -> None:
    """`auto`: a step goes in low-latency mode if no rank has many tokens."""
    rank, num_ranks, hidden = group.rank(), group.size(), 512
    os.environ["DEEP_COMM_DECODE_TOKENS"] = str(_DECODE_TOKENS)
    manager = released(ALL2ALL).DeepEPHTAll2AllManager(group)
    made = released(f"{MOE}.all2all_utils").maybe_make_prepare_finalize(
        vllm_parts.moe_config(group, "deepep_high_throughput", hidden),
        vllm_parts.quant_config("bf16"), all2all_manager=manager,
    )  # fmt: skip
    first, num_local = drop_in.first_of(rank, num_ranks), drop_in.num_local_of(rank, num_ranks)
    modes = set()

    def experts(x: torch.Tensor, meta: Any, ids: torch.Tensor) -> torch.Tensor:
        modes.add(made._handles[0][1] is not None)  # the ids of a decoding step
        return vllm_parts.standard_experts(x, ids, first, num_local)

    for step, most in enumerate((30, 8, 12, 13, 1)):
        counts = [most if other == step % num_ranks else other % most for other in range(num_ranks)]
        vllm_parts.FORWARD.dp_metadata = SimpleNamespace(
            num_tokens_across_dp_cpu=torch.tensor(counts)
        )
        for kind in ("bf16", "fp8"):
            tokens = drop_in.routed(rank, counts[rank], hidden=hidden, routing="holes", seed=step)
            what = f"auto, at most {most} tokens, {kind}"
            # Low latency casts by itself, with scales that are no powers of two.
            share = 0.08 if kind == "fp8" and most <= _DECODE_TOKENS else 0.0
            vllm_parts.step(checks, made, tokens, kind, step % 2 == 1, experts, what, share=share)
    checks.true(modes == {False, True}, "both modes were taken")
    vllm_parts.FORWARD.dp_metadata = None
    del os.environ["DEEP_COMM_DECODE_TOKENS"]
    manager.destroy()


def _room_by_counts(group: Any, checks: Checks) -> None:
    """Low latency: Triton experts have room for the step, and all room in the first one."""
    rank, num_ranks, hidden = group.rank(), group.size(), 512
    manager = released(ALL2ALL).DeepEPLLAll2AllManager(group)
    told = importlib.import_module(f"{MOE}.experts.fused_batched_moe").BatchedTritonExperts()
    compute = vllm_v1.batched(drop_in.first_of(rank, num_ranks))
    for kind in ("bf16", "fp8"):
        made = released(f"{MOE}.all2all_utils").maybe_make_prepare_finalize(
            vllm_parts.moe_config(group, "deepep_low_latency", hidden),
            vllm_parts.quant_config(kind), all2all_manager=manager,
        )  # fmt: skip
        made.post_init_setup(told)
        rooms = ((30, vllm_parts.MAX_TOKENS), (3, 4), (64, 64), (9, 16), (30, 32))
        for step, (most, room) in enumerate(rooms):
            most_of = [
                most if other == step % num_ranks else most // 2 for other in range(num_ranks)
            ]
            vllm_parts.FORWARD.dp_metadata = SimpleNamespace(
                num_tokens_across_dp_cpu=torch.tensor(most_of)
            )
            tokens = drop_in.routed(rank, most_of[rank], hidden=hidden, seed=step)
            what = f"low latency, at most {most} tokens, {kind}"
            share = 0.08 if kind == "fp8" else 0.0
            vllm_parts.step(checks, made, tokens, kind, step % 2 == 1, compute, what, share=share)
            checks.true(told.max_num_tokens == room, f"{what}: room for {told.max_num_tokens}")
    vllm_parts.FORWARD.dp_metadata = None
    manager.destroy()


def vllm_dual_batches(group: Any, checks: Checks) -> None:
    _registered("vllm")
    vllm_dbo.run(group, checks, vllm_dbo.V1)


def vllm_faults_and_graphs(group: Any, checks: Checks) -> None:
    _registered("vllm")
    vllm_faults.run(group, checks)
    vllm_graphs.run(group, checks, ("low latency",))


def sglang(group: Any, checks: Checks) -> None:
    adapter = _registered("sglang")
    sglang_v1.run(group, checks, adapter.DeepCommDispatcher)
    sglang_graphs.run(group, checks, is_v2_too=False)


PROGRAMS = (
    Program(
        "native-vllm", "integrations.vllm", vllm_parts.RELEASE, vllm, vllm_parts.stand_ins,
        ranks=(2,), variables={"VLLM_DEEPEP_BUFFER_SIZE_MB": "128"},
    ),
    Program(
        "native-vllm-dbo", "integrations.vllm, dual batches", vllm_parts.RELEASE,
        vllm_dual_batches, vllm_parts.stand_ins, ranks=(2,),
        variables={"VLLM_DEEPEP_BUFFER_SIZE_MB": "128"},
    ),
    Program(
        "native-vllm-ll", "integrations.vllm, faults, graphs", vllm_parts.RELEASE,
        vllm_faults_and_graphs, vllm_parts.stand_ins, ranks=(2,),
        variables=vllm_faults.PROGRAMS[0].variables,
    ),
    Program(
        "native-sglang", "integrations.sglang", sglang_parts.RELEASE, sglang,
        sglang_parts.stand_ins, ranks=(2,), backend="nccl",
        variables=sglang_v1.PROGRAMS[0].variables,
    ),
)  # fmt: skip
