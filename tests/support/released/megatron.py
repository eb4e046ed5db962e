"""Megatron Core's flex dispatcher (deepep), and NeMo Automodel's, which grew from it and replays
recorded dispatches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import drop_in
import torch
from drop_in import NUM_EXPERTS
from torch import Tensor

from released.package import released
from released.program import Checks, Program, Release, synchronise

MEGATRON = Release("megatron-core", "0.16.1", "megatron", ("core.transformer.moe.fused_a2a",))
NEMO = Release(
    "nemo-automodel", "0.7.0", "nemo_automodel", ("components.moe.megatron.fused_a2a",)
)  # fmt: skip
HIDDEN = 512


def stand_ins() -> Mapping[str, Mapping[str, Any]]:
    return {"megatron.core.utils": {"internal_api": lambda fn: fn}}


def _experts(group: Any, rows: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    first = drop_in.first_of(group.rank(), group.size())
    return drop_in.local_experts(rows, ids, probs, first)


def _train(module: Any, group: Any, checks: Checks, routing: str, is_async: bool) -> None:
    """Forward and backward, against the gradients of the layer written densely."""
    x, ids, probs = drop_in.routed(
        group.rank(), drop_in.num_tokens_of(group.rank()), hidden=HIDDEN, routing=routing
    )
    x.requires_grad_()
    probs.requires_grad_()
    recv_x, recv_ids, recv_probs, counts, handle = module.fused_dispatch(
        x, ids, probs, NUM_EXPERTS, group, is_async, is_async
    )
    rows = _experts(group, recv_x, recv_ids, recv_probs)
    out, _ = module.fused_combine(rows, group, handle, is_async, is_async)
    towards = torch.arange(HIDDEN, device=x.device) % 3 - 1  # not the same for every column
    (out * towards).sum().backward()
    synchronise()
    dense_x = x.detach().clone().requires_grad_()
    dense_probs = probs.detach().clone().requires_grad_()
    expected = drop_in.dense(dense_x, ids, dense_probs)
    (expected * towards).sum().backward()
    what = f"{routing}, {'async' if is_async else 'sync'}"
    assert x.grad is not None and dense_x.grad is not None
    assert probs.grad is not None and dense_probs.grad is not None
    checks.equal(out.detach(), expected.detach(), f"forward, {what}")
    checks.equal(x.grad, dense_x.grad, f"gradient of tokens, {what}")
    checks.equal(probs.grad, dense_probs.grad, f"gradient of probabilities, {what}")
    num_local = drop_in.num_local_of(group.rank(), group.size())
    per_expert = [int((recv_ids == expert).sum()) for expert in range(num_local)]
    checks.equal(counts, torch.tensor(per_expert), f"tokens per expert, {what}")


def megatron(group: Any, checks: Checks) -> None:
    module = released("megatron.core.transformer.moe.fused_a2a")
    module.set_deepep_num_sms(20)
    for is_async in (False, True):
        for routing in ("distinct", "holes", "duplicates"):
            _train(module, group, checks, routing, is_async)
    drop_in.barrier(group)
    module._buffer = None


def nemo(group: Any, checks: Checks) -> None:
    module = released("nemo_automodel.components.moe.megatron.fused_a2a")
    module.set_deepep_num_sms(20)
    for is_async in (False, True):
        for routing in ("distinct", "holes", "duplicates"):
            _train(module, group, checks, routing, is_async)
        # Under activation checkpointing layers run again, over the handles of their first run.
        recorder = module.DispatchReplayRecorder()
        layers = [
            drop_in.routed(
                group.rank(), drop_in.num_tokens_of(group.rank() + layer), hidden=HIDDEN,
                routing="holes", seed=layer,
            )
            for layer in range(3)
        ]  # fmt: skip
        kept = []
        with module.dispatch_replay_scope(recorder, "record"):
            for x, ids, probs in layers:
                kept.append(
                    module.fused_dispatch(x, ids, probs, NUM_EXPERTS, group, is_async, is_async)
                )
        recorder.rewind()
        with module.dispatch_replay_scope(recorder, "replay"):
            for (x, ids, probs), first in zip(layers, kept, strict=True):
                again = module.fused_dispatch(x, ids, probs, NUM_EXPERTS, group, is_async, is_async)
                checks.equal(again[0], first[0], "rows of a replayed dispatch")
                rows = _experts(group, again[0], again[1], again[2])
                out, _ = module.fused_combine(rows, group, again[4], is_async, is_async)
                synchronise()
                checks.equal(out, drop_in.dense(x, ids, probs), "a replayed layer")
        checks.true(recorder.replay_misses == 0, "every dispatch was replayed")
    drop_in.barrier(group)
    module.free_buffer()


PROGRAMS = (
    Program(
        "megatron", "transformer/moe/fused_a2a.py", MEGATRON, megatron, stand_ins, backend="nccl",
    ),
    Program("nemo", "moe/megatron/fused_a2a.py", NEMO, nemo, ranks=(2, 3), backend="nccl"),
)  # fmt: skip
