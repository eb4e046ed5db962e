"""Cached dispatches and combines in one native step, one behind the other and on several streams,
give what the same calls give step by step, each alone. Without DEEP_COMM_POISON, with which there
are no calls in one step."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

import deep_comm
from deep_comm.ops import quick

T, H, K, E = 40, 1024, 4, 16


def run_calls(group: Any, device_type: str, calls: int) -> None:
    is_cuda = device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    rank = group.rank()
    generator = torch.Generator().manual_seed(rank)
    num_tokens = T + 7 * rank
    idx = torch.rand(num_tokens, E, generator=generator).topk(K).indices.to(device)
    inputs = [
        torch.randn(num_tokens, H, generator=generator).bfloat16().to(device) for _ in range(calls)
    ]
    num_bytes = (128 if is_cuda else 8) << 20
    with deep_comm.Buffer(
        group, num_bytes, num_direct_bytes=num_bytes // 2, device=device, timeout_s=30
    ) as buffer:
        handle = buffer.dispatch(inputs[0], topk_idx=idx, num_experts=E)[4]

        def pair(x: Tensor) -> tuple[Tensor, Tensor]:
            rows = buffer.dispatch(x, handle=handle)[0]
            return rows, buffer.combine(rows, handle)[0]

        kept = buffer._quick_dispatch, buffer._quick_combine
        buffer._quick_dispatch = buffer._quick_combine = quick.never
        expected = []
        for x in inputs:
            rows, sums = pair(x)
            expected.append((rows.clone(), sums.clone()))
            _synchronize(is_cuda)
        made: list[bool] = []

        def spied(native: Any) -> Any:
            def call(*arguments: Any) -> Any:
                result = native(*arguments)
                made.append(result is not None)
                return result

            return call

        buffer._quick_dispatch, buffer._quick_combine = map(spied, kept)
        pair(inputs[0])
        made.clear()
        results = [pair(x) for x in inputs]
        assert all(made) and len(made) == 2 * calls, made
        if is_cuda:
            # Now and then on another stream, where calls wait for the one before them.
            streams = [torch.cuda.Stream() for _ in range(3)]
            for call, x in enumerate(inputs):
                stream = streams[call // 2 % 3]
                scope = torch.cuda.stream(stream) if call % 4 < 2 else contextlib.nullcontext()
                stream.wait_stream(torch.cuda.current_stream())
                with scope:
                    results.append(pair(x))
        _synchronize(is_cuda)
        for call, (rows, sums) in enumerate(results):
            want_rows, want_sums = expected[call % calls]
            assert torch.equal(rows, want_rows), f"rank {rank}, call {call}: rows"
            assert torch.equal(sums, want_sums), f"rank {rank}, call {call}: sums"


def _synchronize(is_cuda: bool) -> None:
    if is_cuda:
        torch.cuda.synchronize()
