"""vLLM's dual-batch overlap: two threads of a rank by turns, by vLLM's own micro-batch contexts."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import drop_in
import torch

from released import host, vllm_parts, vllm_v1, vllm_v2
from released.package import released
from released.program import Checks, Program
from released.vllm_parts import ALL2ALL, MOE

_JOIN_S = 60.0


def _overlapped(steps: list[Any]) -> None:
    """Run one callable for each micro-batch, as vLLM's wrapper of a model does."""
    forwards = [SimpleNamespace(dp_metadata=vllm_parts.FORWARD.dp_metadata) for _ in steps]
    barrier = threading.Barrier(len(steps) + 1)
    contexts = released("vllm.v1.worker.ubatching").make_ubatch_contexts(
        num_micro_batches=len(steps), compute_stream=torch.cuda.current_stream(),
        comm_stream=torch.cuda.Stream(), forward_contexts=forwards, ready_barrier=barrier,
    )  # fmt: skip
    failures: list[BaseException] = []
    on_host = drop_in.device().type == "cpu"

    def micro_batch(context: Any, step: Any) -> None:
        try:
            with host.cuda_means_host() if on_host else torch.cuda.device(device), context:
                step()
        except BaseException as error:  # noqa: BLE001 - raised again by the rank's own thread
            failures.append(error)

    device = None if on_host else torch.cuda.current_device()
    threads = [
        threading.Thread(target=micro_batch, args=both, daemon=True)
        for both in zip(contexts, steps, strict=True)
    ]
    for thread in threads:
        thread.start()
    barrier.wait(_JOIN_S)
    contexts[0].cpu_wait_event.set()
    for thread in threads:
        thread.join(_JOIN_S)
    if failures:
        raise failures[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError("a micro-batch did not end")


V1 = ("deepep_high_throughput", "deepep_low_latency")


def run(group: Any, checks: Checks, backends: tuple[str, ...] = (*V1, "deepep_v2")) -> None:
    all2all, utils = released(ALL2ALL), released(f"{MOE}.all2all_utils")
    rank, hidden = group.rank(), 2048
    first = drop_in.first_of(rank, group.size())
    ways = (
        ("deepep_high_throughput", all2all.DeepEPHTAll2AllManager, vllm_v1.standard(group)),
        ("deepep_low_latency", all2all.DeepEPLLAll2AllManager, vllm_v1.batched(first)),
        ("deepep_v2", all2all.DeepEPV2All2AllManager, vllm_v2.experts(group, True)),
    )
    for backend, manager_class, experts in ways:
        if backend not in backends:
            continue
        manager = manager_class(group)
        manager.set_num_sms(8)
        for kind in ("bf16", "fp8"):
            adapter = utils.maybe_make_prepare_finalize(
                vllm_parts.moe_config(group, backend, hidden), vllm_parts.quant_config(kind),
                all2all_manager=manager,
            )  # fmt: skip
            for turn in range(2):

                def half(index: int) -> None:
                    seed = 2 * turn + index
                    num_tokens = drop_in.num_tokens_of(rank + seed)
                    routing = "holes" if index else "distinct"
                    tokens = vllm_parts.routed(
                        rank, num_tokens, hidden=hidden, routing=routing, seed=seed
                    )
                    share = 0.08 if (backend, kind) == ("deepep_low_latency", "fp8") else 0.0
                    vllm_parts.step(
                        checks, adapter, tokens, kind, True, experts,
                        f"{backend}, {kind}, micro-batch {index}", share=share,
                    )  # fmt: skip

                _overlapped([lambda: half(0), lambda: half(1)])
        drop_in.barrier(group)
        manager.destroy()


PROGRAMS = (
    Program(
        "vllm-dbo", "all three, dual batches", vllm_parts.RELEASE, run, vllm_parts.stand_ins,
        variables={"VLLM_DEEPEP_BUFFER_SIZE_MB": "128", "EP_DISABLE_GIN": "1"},
    ),
)  # fmt: skip
