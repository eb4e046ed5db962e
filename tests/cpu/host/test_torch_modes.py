"""What a program has told torch about all tensors is not for a Buffer's own: a default device,
inference mode around some of its calls.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from layer_cases import LayerCase, build, expert, inputs
from run_by import run_by

import deep_comm
from deep_comm import local

CASE = LayerCase(((5, 3),), max_tokens=8, decode_tokens=8, hidden=128)


@pytest.mark.parametrize("ranks_per_node", [None, 1])
@pytest.mark.parametrize("poisons", [False, True])
def test_a_default_device_is_not_that_of_outputs(
    ranks_per_node: int | None, poisons: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As around a model that is made on "meta"."""
    if poisons:
        monkeypatch.setenv("DEEP_COMM_POISON", "1")

    def main(group: Any) -> None:
        x, idx, weights = inputs(CASE, group.rank(), 0)
        copies = torch.zeros(len(x), 2).scatter_(1, idx // 4, 1.0).sum(1, keepdim=True)
        with torch.device("meta"), torch.no_grad():
            with build(group, dataclasses.replace(CASE, ranks_per_node=ranks_per_node)) as layer:
                buffer = layer.buffer
                for use_fp8 in (False, True):
                    received = buffer.dispatch(
                        x, topk_idx=idx, topk_weights=weights, num_experts=8, use_fp8=use_fp8
                    )
                rows = buffer.dispatch(x, topk_idx=idx, num_experts=8)[0]
                combined = buffer.combine(rows, received[4])[0]
                sums = [
                    layer(x, idx, weights, lambda batch: batch.x.clone(), mode=mode)
                    for mode in ("prefill", "decode", "auto")
                ]
        assert torch.equal(combined, (x.float() * copies).bfloat16())
        assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])

    local.run(main, 2)


@run_by(local.run, 2)
def test_the_buffer_of_rows_may_be_made_in_inference_mode(group: Any, /) -> None:
    x, idx, weights = inputs(CASE, group.rank(), 0)
    num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(8, 128, 2, 8)
    with deep_comm.Buffer(group, 0, num_bytes, low_latency_mode=True, device="cpu") as buffer:
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, 8, 8, use_fp8=False)
                expected = buffer.low_latency_combine(rows, idx, weights, handle)[0]
                place = buffer.get_next_low_latency_combine_buffer(handle)
                place.copy_(rows)
                sums = buffer.low_latency_combine(rows, idx, weights, handle, zero_copy=True)
                assert torch.equal(sums[0], expected)


@pytest.mark.parametrize("ranks_per_node", [None, 1])
@run_by(local.run, 2)
def test_a_training_step_that_another_call_receives_in_inference_mode(
    group: Any, /, ranks_per_node: int | None
) -> None:
    x, idx, weights = inputs(CASE, group.rank(), 0)
    factor = torch.ones(128, dtype=torch.bfloat16, requires_grad=True)
    with build(group, dataclasses.replace(CASE, ranks_per_node=ranks_per_node)) as layer:
        for _ in range(2):
            x.grad = None
            x.requires_grad_()
            with layer.dispatch_async(x, idx, weights, mode="prefill") as sent:
                with torch.inference_mode():
                    layer(x, idx, weights, lambda batch: batch.map(expert), mode="prefill")
            y = layer.combine(sent.result(), sent.result().x * factor)
            y.sum().backward()
            assert x.grad is not None and x.grad.abs().sum() > 0
