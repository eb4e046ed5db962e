"""Layouts, dispatches (cached, bounded, counted) and combines in one native step, one behind the
other and on several streams, give what the same calls give step by step, each alone. Without
DEEP_COMM_POISON, with which there are no calls in one step."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

import deep_comm
from deep_comm.ops import quick

T, H, K, E = 40, 1024, 4, 16
NAMES = (
    "rows", "sums", "num_tokens_per_rank", "num_tokens_per_expert", "is_token_in_rank",
    "bounded rows", "indices", "weights", "sums of bounded rows", "sums of weights",
    "grouped rows", "their experts", "weights of grouped rows", "the same rows, cached",
    "weighted sums", "sums of grouped rows", "sums of weights of grouped rows", "rows of tokens",
    "bounded grouped rows", "their weighted sums",
    "counted rows", "their indices", "their weights", "their sums", "sums of their weights",
)  # fmt: skip


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
        weights = torch.rand(num_tokens, K, generator=generator).to(device)
        most_rows = sum(T + 7 * other for other in range(group.size()))

        choices = [idx.roll(call, 0)[call % 3 :].contiguous() for call in range(calls)]

        def steps(call: int) -> tuple[Tensor, ...]:
            rows = buffer.dispatch(inputs[call], handle=handle)[0]
            layout = buffer.get_dispatch_layout(choices[call], E)
            sums = buffer.combine(rows, handle)[0]
            bounded, recv_idx, recv_weights, _, again, _ = buffer.dispatch(
                inputs[call], topk_idx=idx, topk_weights=weights, num_experts=E,
                num_worst_tokens=most_rows,
            )  # fmt: skip
            back, back_weights, _ = buffer.combine(bounded, again, recv_weights)
            # Copies: the region holds the blocks of a few calls.
            received = bounded[: len(rows)].clone(), recv_idx.clone(), recv_weights.clone()
            del bounded, recv_idx, recv_weights
            # Other tokens in every call, and the host waits for the counts.
            fewer = call % 3
            counted = buffer.dispatch(
                inputs[call][fewer:], topk_idx=choices[call], topk_weights=weights[fewer:],
                num_experts=E,
            )  # fmt: skip
            assert sum(counted[3]) == int((counted[1] >= 0).sum())
            sums_counted = buffer.combine(counted[0], counted[4], counted[2])[:2]
            copies = [part.clone() for part in counted[:3]]
            del counted
            return (
                rows, sums, layout[0], layout[2], layout[3], *received, back, back_weights,
                *expanded_steps(call), *copies, *sums_counted,
            )  # fmt: skip

        def expanded_steps(call: int) -> tuple[Tensor, ...]:
            fewer = call % 3
            x = inputs[call][fewer:]
            routing: dict[str, Any] = dict(
                topk_idx=choices[call], topk_weights=weights[fewer:], num_experts=E, expand=True
            )
            rows, experts, row_weights, _, grouped, _ = buffer.dispatch(
                x, **routing, expert_alignment=8, zero_padding=True
            )
            again = buffer.dispatch(x, handle=grouped, zero_padding=True)[0]
            weighted = buffer.combine(rows, grouped, row_weights, apply_weights=True)[0]
            sums, weight_sums, _ = buffer.combine(rows, grouped, row_weights)
            places = grouped.expansion.recv_rows.clone()
            copies = [part.clone() for part in (rows, experts, row_weights, again)]
            del rows, experts, row_weights, again, grouped
            bounded, _, row_weights, _, grouped, _ = buffer.dispatch(
                x, **routing, num_worst_tokens=K * most_rows, zero_padding=True
            )
            back = buffer.combine(bounded, grouped, row_weights, apply_weights=True)[0]
            return (*copies, weighted, sums, weight_sums, places, bounded.clone(), back)

        def asynchronous_steps(call: int) -> dict[str, Tensor]:
            """The same, each behind the one before it, while the caller's stream goes on."""
            on_comm = dict(async_finish=True, allocate_on_comm_stream=True)
            rows, *_, event = buffer.dispatch(
                inputs[call], handle=handle, previous_event=deep_comm.Buffer.capture(), **on_comm
            )
            sums, _, event = buffer.combine(rows, handle, previous_event=event, **on_comm)
            fewer = call % 3
            counted = buffer.dispatch(
                inputs[call][fewer:], topk_idx=choices[call], topk_weights=weights[fewer:],
                num_experts=E, async_finish=True,
            )  # fmt: skip
            back, back_weights, event = buffer.combine(
                counted[0], counted[4], counted[2], previous_event=counted[5], async_finish=True
            )
            event.current_stream_wait()
            parts = (rows, sums, *(part.clone() for part in counted[:3]), back, back_weights)
            return dict(zip((*NAMES[:2], *NAMES[-5:]), parts, strict=True))

        ctx = buffer._context
        kept = (
            buffer._quick_dispatch, buffer._quick_combine, buffer._quick_new_dispatch,
            ctx.quick_layout,
        )  # fmt: skip
        buffer._quick_dispatch = buffer._quick_combine = ctx.quick_layout = quick.never
        buffer._quick_new_dispatch = quick.never
        expected = []
        for call in range(calls):
            expected.append([tensor.clone() for tensor in steps(call)])
            _synchronize(is_cuda)
        made: list[bool] = []
        (
            buffer._quick_dispatch, buffer._quick_combine, buffer._quick_new_dispatch,
            ctx.quick_layout,
        ) = (_spied(native, made) for native in kept)  # fmt: skip
        steps(0)
        made.clear()
        results = [steps(call) for call in range(calls)]
        assert all(made) and len(made) == 13 * calls, made
        if is_cuda:
            # Now and then on another stream, where calls wait for the one before them.
            streams = [torch.cuda.Stream() for _ in range(3)]
            for call in range(calls):
                stream = streams[call // 2 % 3]
                scope = torch.cuda.stream(stream) if call % 4 < 2 else contextlib.nullcontext()
                stream.wait_stream(torch.cuda.current_stream())
                with scope:
                    results.append(steps(call))
        made.clear()
        asynchronous = [asynchronous_steps(call) for call in range(calls)]
        assert all(made) and len(made) == 4 * calls, made
        _synchronize(is_cuda)
        for call, tensors in enumerate(results):
            for name, got, want in zip(NAMES, tensors, expected[call % calls], strict=True):
                assert torch.equal(got, want), f"rank {rank}, call {call}: {name}"
        for call, parts in enumerate(asynchronous):
            for name, got in parts.items():
                want = expected[call][NAMES.index(name)]
                assert torch.equal(got, want), f"rank {rank}, asynchronous call {call}: {name}"


def _spied(native: Any, made: list[bool]) -> Any:
    """A native step that notes whether it was taken."""

    def call(*arguments: Any) -> Any:
        result = native(*arguments)
        made.append(result is not None)
        return result

    return call


def _synchronize(is_cuda: bool) -> None:
    if is_cuda:
        torch.cuda.synchronize()
