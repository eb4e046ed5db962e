"""vLLM's fault tolerance over low latency: a rank misses a step, vLLM hears of it, all go on."""

from __future__ import annotations

from typing import Any

import drop_in
import torch
from drop_in import NUM_EXPERTS

from released import vllm_parts, vllm_v1
from released.package import released
from released.program import Checks, Program
from released.vllm_parts import ALL2ALL, MOE

_HIDDEN, _NUM_TOKENS = 2048, 16


def run(group: Any, checks: Checks) -> None:
    rank, num_ranks = group.rank(), group.size()
    num_local = NUM_EXPERTS // num_ranks
    silent = num_ranks - 1
    vllm_parts.CONFIG.parallel_config.enable_fault_tolerance = True
    manager = released(ALL2ALL).DeepEPLLAll2AllManager(group)
    adapter = released(f"{MOE}.all2all_utils").maybe_make_prepare_finalize(
        vllm_parts.moe_config(group, "deepep_low_latency", _HIDDEN),
        vllm_parts.quant_config("bf16"), all2all_manager=manager,
    )  # fmt: skip

    def step(seed: int, what: str, is_alone: bool = False) -> None:
        x, ids, weights = drop_in.routed(rank, _NUM_TOKENS, hidden=_HIDDEN, seed=seed)
        # What the silent rank's experts would have added is missing.
        counted = torch.where(ids < silent * num_local, ids, -1) if is_alone else ids
        vllm_parts.step(
            checks, adapter, (x, ids, weights), "bf16", True,
            vllm_v1.batched(rank * num_local), what, expected=drop_in.dense(x, counted, weights),
        )  # fmt: skip

    for turn in range(2):
        step(3 * turn, "all ranks")
        checks.true(not manager.query_fault(), "no fault yet")
        drop_in.barrier(group)
        if rank != silent:
            step(3 * turn + 1, "without the silent rank", is_alone=True)
            checks.true(manager.query_fault(), "vLLM hears of it")
            mask = torch.zeros(num_ranks, dtype=torch.int32)
            mask[silent] = 1
            checks.equal(manager.query_active_mask(), mask, "the mask names it")
        drop_in.barrier(group)
        manager.clean_buffers()  # on all ranks, as vLLM's retry does
        drop_in.barrier(group)
        step(3 * turn + 2, "all ranks again")
        checks.true(not manager.query_fault(), "no fault any more")
    drop_in.barrier(group)
    vllm_parts.CONFIG.parallel_config.enable_fault_tolerance = False
    manager.destroy()


PROGRAMS = (
    Program(
        "vllm-faults", "deepep_ll.py, a silent rank", vllm_parts.RELEASE, run,
        vllm_parts.stand_ins,
        variables={"VLLM_DEEPEP_BUFFER_SIZE_MB": "128", "DEEP_COMM_TIMEOUT_S": "2"},
    ),
)  # fmt: skip
