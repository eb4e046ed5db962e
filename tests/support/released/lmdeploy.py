"""lmdeploy's dispatchers: permuting, normal and low latency, over one Buffer."""

from __future__ import annotations

from typing import Any

import drop_in
import torch
from drop_in import NUM_EXPERTS
from torch import Tensor

from released import vllm_parts
from released.package import released
from released.program import Checks, Program, Release, synchronise

RELEASE = Release(
    "lmdeploy", "0.18.0", "lmdeploy",
    (
        "pytorch.backends.cuda.token_dispatcher",
        "pytorch.backends.default.token_dispatcher",
        "pytorch.backends.token_dispatcher",
        "pytorch.envs",
    ),
)  # fmt: skip
HIDDEN, MAX_TOKENS = 1024, 64


def _tokens(group: Any, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens = drop_in.num_tokens_of(group.rank() + seed)
    routing = "holes" if seed % 2 else "distinct"
    return vllm_parts.routed(group.rank(), num_tokens, hidden=HIDDEN, routing=routing, seed=seed)


def _permuting(group: Any, checks: Checks, dispatcher: Any, seed: int) -> None:
    x, ids, weights = _tokens(group, seed)
    rows, _, _, counts = dispatcher.dispatch(x, ids, weights)
    first = drop_in.first_of(group.rank(), group.size())
    experts = torch.arange(len(counts), device=x.device).repeat_interleave(counts)
    out = (rows.float() * (first + experts + 1).unsqueeze(1)).to(torch.bfloat16)
    combined = dispatcher.combine(out)
    synchronise()
    checks.equal(combined, drop_in.dense(x, ids, weights), "permuting")
    dispatcher.release()


def _normal(
    group: Any, checks: Checks, dispatcher: Any, seed: int, is_fp8: bool, is_async: bool
) -> None:
    x, ids, weights = _tokens(group, seed)
    sent = vllm_parts.quantise(x, 128) if is_fp8 else x
    if is_async:
        event = dispatcher.get_buffer().capture()
        rows, local, recv_weights, counts, handle, event = dispatcher.dispatch_normal_async(
            sent, ids, weights, previous_event=event
        )
        event.current_stream_wait()
    else:
        rows, local, recv_weights, counts = dispatcher.dispatch(sent, ids, weights)
    num_local = NUM_EXPERTS // group.size()
    padded = [-(-int((local == expert).sum()) // 128) * 128 for expert in range(num_local)]
    assert counts == padded
    values = vllm_parts.values(*rows) if is_fp8 else rows
    first = drop_in.first_of(group.rank(), group.size())
    out = drop_in.local_experts(values, local, recv_weights, first)
    if is_async:
        event = dispatcher.get_buffer().capture()
        combined, event = dispatcher.combine_normal_async(out, handle, previous_event=event)
        event.current_stream_wait()
    else:
        combined = dispatcher.combine(out)
    synchronise()
    what = f"normal, {'fp8' if is_fp8 else 'bf16'}, {'async' if is_async else 'sync'}"
    checks.equal(combined, drop_in.dense(x, ids, weights), what)
    dispatcher.release()


def _low_latency(group: Any, checks: Checks, dispatcher: Any, seed: int, is_async: bool) -> None:
    x, ids, weights = _tokens(group, seed)
    if is_async:
        packed, counts, handle, event, hook = dispatcher.dispatch_async(x, ids)
        event.current_stream_wait()
    else:
        packed, _, _, counts, _ = dispatcher.dispatch(x, ids, weights, NUM_EXPERTS)
    rows = drop_in.dequantised(packed[0].value, packed[1].value)
    out = drop_in.masked_experts(rows, counts, drop_in.first_of(group.rank(), group.size()))
    if is_async:
        combined, event, hook = dispatcher.combine_async(out, ids, weights, handle, True)
        event.current_stream_wait()
    else:
        combined = dispatcher.combine(out, ids, weights)
    synchronise()
    # Scales that are no powers of two round.
    checks.close(combined, drop_in.dense(x, ids, weights), 0.08, "low latency, fp8")


def run(group: Any, checks: Checks) -> None:
    module = released("lmdeploy.pytorch.backends.cuda.token_dispatcher")
    module.DeepEPBuffer.set_explicitly_destroy()
    options = dict(
        group=group, num_experts=NUM_EXPERTS, num_local_experts=NUM_EXPERTS // group.size(),
        hidden_size=HIDDEN, params_dtype=torch.bfloat16,
        num_max_dispatch_tokens_per_rank=MAX_TOKENS,
    )  # fmt: skip
    permuting = module.DeepEPTokenDispatcher(**options)
    normal = module.DeepEPTokenDispatcherNormal(**options)
    low_latency = [
        module.DeepEPTokenDispatcherLowLatency(**options, return_recv_hook=hook)
        for hook in (False, True)
    ]
    mode = module.DeepEPMode
    for turn in range(2):
        module.DeepEPBuffer.set_deepep_mode(mode.NORMAL)
        _permuting(group, checks, permuting, 4 * turn)
        for is_fp8 in (False, True):
            for is_async in (False, True):
                _normal(group, checks, normal, 4 * turn + 1 + is_fp8, is_fp8, is_async)
        _, is_cleaned = module.DeepEPBuffer.set_deepep_mode(mode.LOW_LATENCY)
        checks.true(is_cleaned, "the region is cleaned when decoding begins")
        for is_async in (False, True):
            for dispatcher in low_latency:
                _low_latency(group, checks, dispatcher, 4 * turn + 3, is_async)
    drop_in.barrier(group)
    checks.true(module.DeepEPBuffer.destroy(), "one Buffer served all")


PROGRAMS = (
    Program("lmdeploy", "cuda/token_dispatcher.py", RELEASE, run, backend="nccl"),
)  # fmt: skip
