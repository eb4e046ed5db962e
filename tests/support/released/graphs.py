"""Steps captured once and repeated over the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import drop_in
import torch
from torch import Tensor

from released import vllm_parts
from released.program import synchronise

NUM_TOKENS = 16


def captured(body: Callable[[], None]) -> Callable[[], None]:
    """What repeats ``body``: on a GPU a CUDA graph's replay, on the host ``body`` itself."""
    if drop_in.device().type == "cpu":
        return body
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            body()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        body()
    return graph.replay


def replayed(
    group: Any, hidden: int, layer: Callable[[tuple[Tensor, Tensor, Tensor], Tensor], None],
    compare: Callable[[Tensor, Tensor, str], None],
) -> None:  # fmt: skip
    """Capture ``layer(tokens, output)`` and replay it with other tokens; ``compare(output,
    expected, what)`` each time.
    """
    rank = group.rank()
    tokens = vllm_parts.routed(rank, NUM_TOKENS, hidden=hidden)
    output = torch.empty_like(tokens[0])
    replay = captured(lambda: layer(tokens, output))
    drop_in.barrier(group)
    for seed in range(4):
        routing = "holes" if seed % 2 else "distinct"
        others = vllm_parts.routed(rank, NUM_TOKENS, hidden=hidden, routing=routing, seed=seed)
        for memory, value in zip(tokens, others, strict=True):
            memory.copy_(value)
        output.fill_(float("nan"))
        replay()
        synchronise()
        compare(output, drop_in.dense(*others), f"replay {seed}")
    drop_in.barrier(group)


def batched_experts(x: Tensor, counts: Tensor, first: int) -> Tensor:
    """`drop_in.masked_experts` of float32 [L, N, H], without asking the host for counts."""
    num_local, num_slots, _ = x.shape
    slots = torch.arange(num_slots, device=x.device)
    is_row = (slots < counts.unsqueeze(1)).unsqueeze(-1)
    factors = (first + 1 + torch.arange(num_local, device=x.device)).view(-1, 1, 1)
    return (torch.where(is_row, x, 0.0) * factors).to(torch.bfloat16)
