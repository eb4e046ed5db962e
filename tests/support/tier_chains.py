"""Layouts, dispatches (cached, bounded, counted, expanded) and combines between nodes, one after
the other and on several streams, give what the same calls give alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import deep_comm

T, H, K, E = 40, 1024, 4, 16


def run_tier_calls(group: Any, device_type: str, calls: int, ranks_per_node: int) -> None:
    is_cuda = device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    rank = group.rank()

    def synchronize() -> None:
        if is_cuda:
            torch.cuda.synchronize()

    generator = torch.Generator().manual_seed(rank)
    num_tokens, num_bytes = T + 7 * rank, (128 if is_cuda else 8) << 20
    idx = torch.rand(num_tokens, E, generator=generator).topk(K).indices.to(device)
    inputs = [
        torch.randn(num_tokens, H, generator=generator).bfloat16().to(device) for _ in range(calls)
    ]
    with deep_comm.Buffer(
        group, num_bytes, num_bytes, num_direct_bytes=num_bytes // 2, device=device, timeout_s=30,
        ranks_per_node=ranks_per_node,
    ) as buffer:  # fmt: skip
        weights = torch.rand(num_tokens, K, generator=generator).to(device)
        most_rows = sum(T + 7 * other for other in range(group.size()))

        def steps(call: int) -> tuple[Tensor, ...]:
            # A new handle each time, of other tokens, and what is left of the one before.
            fewer = call % 3
            x, choices = inputs[call][fewer:], idx.roll(call, 0)[fewer:].contiguous()
            routing: dict[str, Any] = dict(
                topk_idx=choices, topk_weights=weights[fewer:], num_experts=E
            )
            *layout, _ = buffer.get_dispatch_layout(choices, E)
            rows, _, recv_weights, counts, handle, _ = buffer.dispatch(x, **routing)
            rows, recv_weights = rows.clone(), recv_weights.clone()
            again = buffer.dispatch(x, handle)[0]
            sums, weight_sums, _ = buffer.combine(again, handle, recv_weights)
            copies = again.clone(), handle.recv_src_idx.clone(), torch.tensor(counts)
            del again, handle
            bounded, recv_idx, recv_weights2, _, handle, _ = buffer.dispatch(
                x, **routing, num_worst_tokens=most_rows
            )
            back, back_weights, _ = buffer.combine(bounded, handle, recv_weights2)
            bounded = bounded[: len(rows)].clone()
            parts = (
                rows, copies[0], sums, weight_sums, *layout, *copies[1:], bounded,
                recv_idx.clone(), back, back_weights,
            )  # fmt: skip
            del handle, recv_idx, recv_weights2
            return *parts, *expanded_steps(x, routing)

        def expanded_steps(
            x: Tensor, routing: dict[str, Any], **streams: Any
        ) -> tuple[Tensor, ...]:
            grouped, experts, row_weights, _, handle, event = buffer.dispatch(
                x, **routing, expand=True, expert_alignment=8, zero_padding=True, **streams
            )
            if streams:
                streams = dict(streams, previous_event=event)
            weighted, _, event = buffer.combine(
                grouped, handle, row_weights, apply_weights=True, **streams
            )
            if streams:
                event.current_stream_wait()
            return grouped.clone(), experts.clone(), row_weights.clone(), weighted

        def asynchronous_steps(call: int) -> tuple[Tensor, ...]:
            on_comm = dict(async_finish=True, allocate_on_comm_stream=True)
            fewer = call % 3
            x, choices = inputs[call][fewer:], idx.roll(call, 0)[fewer:].contiguous()
            routing: dict[str, Any] = dict(
                topk_idx=choices, topk_weights=weights[fewer:], num_experts=E
            )
            grouped = expanded_steps(x, routing, async_finish=True)
            rows, _, recv_weights, _, handle, event = buffer.dispatch(
                x, **routing, previous_event=deep_comm.Buffer.capture(), **on_comm
            )
            again, *_, event = buffer.dispatch(x, handle, previous_event=event, **on_comm)
            sums, weight_sums, event = buffer.combine(
                again, handle, recv_weights, previous_event=event, **on_comm
            )
            event.current_stream_wait()
            return rows.clone(), again.clone(), sums, weight_sums, *grouped

        expected = []
        for call in range(calls):
            expected.append([tensor.clone() for tensor in steps(call)])
            synchronize()
        results = [steps(call) for call in range(calls)]
        results += [asynchronous_steps(call) for call in range(calls)]
        if is_cuda:
            streams = [torch.cuda.Stream() for _ in range(3)]
            for call in range(calls):
                stream = streams[call % 3]
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    results.append(steps(call))
        synchronize()
        for number, tensors in enumerate(results):
            wanted = expected[number % calls]
            if len(tensors) < len(wanted):  # asynchronous ones have but the first and the last
                wanted = [*wanted[:4], *wanted[-4:]]
            for part, (got, want) in enumerate(zip(tensors, wanted, strict=True)):
                assert torch.equal(got, want), f"rank {rank}, call {number}, tensor {part}"
