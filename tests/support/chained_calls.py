"""Layouts, dispatches (cached, bounded, counted, expanded) and combines, inside a node and between
nodes, one after the other and on several streams, give what the same calls of another Buffer give,
each alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import deep_comm

T, H, K, E = 40, 1024, 4, 16
NAMES = (
    "rows", "sums", "num_tokens_per_rank", "num_tokens_per_expert", "is_token_in_rank",
    "bounded rows", "indices", "weights", "sums of bounded rows", "sums of weights",
    "grouped rows", "their experts", "weights of grouped rows", "the same rows, cached",
    "weighted sums", "sums of grouped rows", "sums of weights of grouped rows", "rows of tokens",
    "bounded grouped rows", "their weighted sums",
    "counted rows", "their indices", "their weights", "their sums", "sums of their weights",
)  # fmt: skip
ASYNCHRONOUS = (*NAMES[:2], *NAMES[-5:])

Steps = Callable[[int], tuple[Tensor, ...]]


class _Inputs:
    def __init__(self, group: Any, device: torch.device, calls: int) -> None:
        rank = group.rank()
        generator = torch.Generator().manual_seed(rank)
        self.num_tokens = T + 7 * rank
        self.most_rows = sum(T + 7 * other for other in range(group.size()))
        self.idx = torch.rand(self.num_tokens, E, generator=generator).topk(K).indices.to(device)
        self.xs = [
            torch.randn(self.num_tokens, H, generator=generator).bfloat16().to(device)
            for _ in range(calls)
        ]
        self.weights = torch.rand(self.num_tokens, K, generator=generator).to(device)
        # Other tokens in every call.
        self.choices = [self.idx.roll(call, 0)[call % 3 :].contiguous() for call in range(calls)]

    def routing(self, call: int) -> tuple[Tensor, dict[str, Any]]:
        fewer = call % 3
        routing = dict(
            topk_idx=self.choices[call], topk_weights=self.weights[fewer:], num_experts=E
        )
        return self.xs[call][fewer:], routing


def _device(device_type: str) -> torch.device:
    if device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class _Calls:
    """Of one Buffer."""

    def __init__(self, buffer: Any, inputs: _Inputs) -> None:
        self._buffer, self._inputs = buffer, inputs
        self._handle = buffer.dispatch(inputs.xs[0], topk_idx=inputs.idx, num_experts=E)[4]

    def one(self, call: int) -> tuple[Tensor, ...]:
        buffer, inputs = self._buffer, self._inputs
        given = inputs.xs[call]
        rows = buffer.dispatch(given, handle=self._handle)[0]
        layout = buffer.get_dispatch_layout(inputs.choices[call], E)
        sums = buffer.combine(rows, self._handle)[0]
        bounded, recv_idx, recv_weights, _, again, _ = buffer.dispatch(
            given, topk_idx=inputs.idx, topk_weights=inputs.weights, num_experts=E,
            num_worst_tokens=inputs.most_rows,
        )  # fmt: skip
        back, back_weights, _ = buffer.combine(bounded, again, recv_weights)
        # Copies: the region holds the blocks of a few calls.
        received = bounded[: len(rows)].clone(), recv_idx.clone(), recv_weights.clone()
        del bounded, recv_idx, recv_weights
        x, routing = inputs.routing(call)
        counted = buffer.dispatch(x, **routing)  # the host waits for the counts
        assert sum(counted[3]) == int((counted[1] >= 0).sum())
        sums_counted = buffer.combine(counted[0], counted[4], counted[2])[:2]
        copies = [part.clone() for part in counted[:3]]
        del counted
        return (
            rows, sums, layout[0], layout[2], layout[3], *received, back, back_weights,
            *self._expanded(call), *copies, *sums_counted,
        )  # fmt: skip

    def _expanded(self, call: int) -> tuple[Tensor, ...]:
        buffer = self._buffer
        x, routing = self._inputs.routing(call)
        routing["expand"] = True
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
            x, **routing, num_worst_tokens=K * self._inputs.most_rows, zero_padding=True
        )
        back = buffer.combine(bounded, grouped, row_weights, apply_weights=True)[0]
        return (*copies, weighted, sums, weight_sums, places, bounded.clone(), back)

    def one_asynchronous(self, call: int) -> tuple[Tensor, ...]:
        """Of ASYNCHRONOUS, each after the one before it, while the caller's stream goes on."""
        buffer = self._buffer
        on_comm = dict(async_finish=True, allocate_on_comm_stream=True)
        rows, *_, event = buffer.dispatch(
            self._inputs.xs[call], handle=self._handle,
            previous_event=deep_comm.Buffer.capture(), **on_comm,
        )  # fmt: skip
        sums, _, event = buffer.combine(rows, self._handle, previous_event=event, **on_comm)
        x, routing = self._inputs.routing(call)
        counted = buffer.dispatch(x, **routing, async_finish=True)
        back, back_weights, event = buffer.combine(
            counted[0], counted[4], counted[2], previous_event=counted[5], async_finish=True
        )
        event.current_stream_wait()
        return rows, sums, *(part.clone() for part in counted[:3]), back, back_weights


def run_calls(group: Any, device_type: str, calls: int, ranks_per_node: int | None = None) -> None:
    device = _device(device_type)
    inputs = _Inputs(group, device, calls)
    num_bytes = (128 if device_type == "cuda" else 8) << 20

    def buffer() -> Any:
        return deep_comm.Buffer(
            group, num_bytes, 0 if ranks_per_node is None else num_bytes, device=device,
            num_direct_bytes=num_bytes // 2, timeout_s=30, ranks_per_node=ranks_per_node,
        )  # fmt: skip

    with buffer() as other:
        expected = _alone(_Calls(other, inputs).one, calls, device)
    with buffer() as chained:
        of = _Calls(chained, inputs)
        results = _chained(of.one, calls, device)
        asynchronous = [of.one_asynchronous(call) for call in range(calls)]
        _synchronize(device)
        for number, tensors in enumerate(results):
            _require_same(group, number, NAMES, tensors, expected[number % calls])
        for call, tensors in enumerate(asynchronous):
            wanted = [expected[call][NAMES.index(name)] for name in ASYNCHRONOUS]
            _require_same(group, call, ASYNCHRONOUS, tensors, wanted)


def _alone(steps: Steps, calls: int, device: torch.device) -> list[list[Tensor]]:
    expected = []
    for call in range(calls):
        expected.append([tensor.clone() for tensor in steps(call)])
        _synchronize(device)
    return expected


def _chained(steps: Steps, calls: int, device: torch.device) -> list[tuple[Tensor, ...]]:
    """One after the other, and on GPUs once more with every now and then another stream, where
    calls wait for the one before them."""
    results = [steps(call) for call in range(calls)]
    if device.type == "cuda":
        streams = [torch.cuda.Stream() for _ in range(3)]
        for call in range(calls):
            stream = streams[call // 2 % 3]
            scope = torch.cuda.stream(stream) if call % 4 < 2 else contextlib.nullcontext()
            stream.wait_stream(torch.cuda.current_stream())
            with scope:
                results.append(steps(call))
    return results


def _require_same(
    group: Any, number: int, names: tuple[str, ...], tensors: Any, wanted: Any
) -> None:
    for name, got, want in zip(names, tensors, wanted, strict=True):
        assert torch.equal(got, want), f"rank {group.rank()}, call {number}: {name}"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
