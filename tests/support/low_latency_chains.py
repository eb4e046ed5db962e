"""Low-latency pairs with nothing between their launches: where one may begin before the other ends,
no other kernel keeps them apart."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import deep_comm

T, M, H, K, E = 13, 16, 2048, 4, 24
Inputs = tuple[Tensor, Tensor, Tensor]


def inputs_of(rank: int, number: int, call: int, device: torch.device) -> Inputs:
    """Other tokens, as many as that, and another routing in every call."""
    generator = torch.Generator().manual_seed(1000 * number + 100 * call + rank)
    num_tokens = (T + 5 * call + 3 * rank) % (M + 1)
    x = torch.randn(num_tokens, H, generator=generator).bfloat16()
    idx = torch.rand(num_tokens, E, generator=generator).topk(K).indices
    weights = torch.rand(num_tokens, K, generator=generator)
    return x.to(device), idx.to(device), weights.to(device)


def pair(buffer: deep_comm.Buffer, inputs: Inputs, hooked: bool) -> Tensor:
    """Experts that change nothing: combine reads what dispatch has written."""
    x, idx, weights = inputs
    rows, _, handle, _, hook = buffer.low_latency_dispatch(
        x, idx, M, E, use_fp8=False, return_recv_hook=hooked
    )
    if hook is not None:
        hook()
    combined, _, hook = buffer.low_latency_combine(
        rows, idx, weights, handle, return_recv_hook=hooked
    )
    if hook is not None:
        hook()
    return combined


def run_chains(
    group: Any, device_type: str, num_buffers: int, calls: int, hooked: bool, captured: bool = False
) -> None:
    """Each Buffer's pairs on a stream of its own, without any order between the streams."""
    is_cuda = device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    rank, size = group.rank(), group.size()
    num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(M, H, size, E)
    buffers = [
        deep_comm.Buffer(
            group, 0, num_bytes, low_latency_mode=True, device=device, timeout_s=20
        )
        for _ in range(num_buffers)
    ]  # fmt: skip
    streams: list[Any] = [torch.cuda.Stream() if is_cuda else None for _ in buffers]
    inputs = [
        [inputs_of(rank, number, call, device) for call in range(calls)]
        for number in range(num_buffers)
    ]
    # One after the other, each alone.
    alone = [[_alone(buffer, of_call) for of_call in inputs[n]] for n, buffer in enumerate(buffers)]
    # On a GPU ranks need not agree on the order of two Buffers.
    order = range(num_buffers) if not is_cuda or rank % 2 == 0 else range(num_buffers)[::-1]
    chained: dict[tuple[int, int], Tensor] = {}
    graphs = {}
    if is_cuda:
        torch.cuda.synchronize()
    if captured:
        for number in order:
            graphs[number] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[number], stream=streams[number]):
                for call in range(calls):
                    chained[number, call] = pair(buffers[number], inputs[number][call], hooked)
        for _ in range(3):
            for number in order:
                with torch.cuda.stream(streams[number]):
                    graphs[number].replay()
    else:
        for call in range(calls):
            for number in order:
                scope = torch.cuda.stream(streams[number]) if is_cuda else contextlib.nullcontext()
                with scope:
                    chained[number, call] = pair(buffers[number], inputs[number][call], hooked)
    if is_cuda:
        torch.cuda.synchronize()
    _require_equal(chained, alone, rank)
    for buffer in buffers:
        buffer.destroy()


def _alone(buffer: deep_comm.Buffer, inputs: Inputs) -> Tensor:
    combined = pair(buffer, inputs, False)
    if combined.is_cuda:
        torch.cuda.synchronize()
    # What comes back without an expert that does anything: the token, weighted.
    x, _, weights = inputs
    expected = x.float() * weights.sum(1, keepdim=True)
    torch.testing.assert_close(combined.float(), expected, rtol=0.03, atol=0.03)
    return combined


def _require_equal(
    chained: dict[tuple[int, int], Tensor], alone: Sequence[Sequence[Tensor]], rank: int
) -> None:
    for (number, call), combined in chained.items():
        assert torch.equal(combined, alone[number][call]), f"rank {rank}, Buffer {number}, {call}"
