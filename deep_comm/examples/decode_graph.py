"""Decoding with a CUDA graph: one capture, then replays with other tokens and other routings.

A decode step has fixed shapes and no host wait, so a whole step of the layer is one graph. Places
without a token are routed nowhere (index -1). Without GPUs the same steps run eagerly. Every step
is compared with the reference, bit by bit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import deep_comm
from deep_comm.launch import add_ranks, device_of, on_ranks, say
from deep_comm.reference import layer as reference_layer
from deep_comm.settings import command_line
from deep_comm.settings.command_line import at_least

NUM_EXPERTS, NUM_TOPK = 16, 4


def factor(expert: Tensor | int) -> Any:
    """Experts scale rows by powers of two and their halves: exact in bfloat16's products."""
    return 1.0 + 0.5 * (expert % 2)


def compute(batch: deep_comm.ExpertBatch) -> Tensor:
    """All local experts at once over the masked batch; rows of padding are computed along."""
    idx = batch.first_expert + torch.arange(batch.num_local_experts, device=batch.x.device)
    scaled = batch.masked() * factor(idx).view(-1, 1, 1).to(batch.x.dtype)
    return scaled.view(batch.x.shape)


def inputs(rank: int, step: int, num_places: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """A step of a server: as many requests as happen to be here, the other places empty."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    num_tokens = int(torch.randint(0, num_places + 1, (1,), generator=generator))
    x = torch.randn(num_places, hidden, generator=generator).bfloat16()
    idx = torch.rand(num_places, NUM_EXPERTS, generator=generator).topk(NUM_TOPK).indices
    idx[num_tokens:] = -1
    return x, idx, torch.rand(num_places, NUM_TOPK, generator=generator)


def rank_main(group: Any, num_places: int, hidden: int, num_steps: int) -> bool:
    device = device_of(group)
    rank, num_ranks = group.rank(), group.size()
    wrong = 0
    with deep_comm.ExpertParallel(
        group, hidden=hidden, num_experts=NUM_EXPERTS, num_topk=NUM_TOPK, max_tokens=num_places,
        mode="decode", device=device,
    ) as layer, torch.inference_mode():  # fmt: skip
        x, idx, weights = (part.to(device) for part in inputs(rank, 0, num_places, hidden))
        y = layer(x, idx, weights, compute)  # what is made on first use, before the capture
        step_again: Callable[[], object]
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.distributed.barrier(group)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = layer(x, idx, weights, compute)
            step_again = graph.replay
        else:

            def step_again() -> None:
                y.copy_(layer(x, idx, weights, compute))

        for step in range(num_steps):
            new = inputs(rank, step, num_places, hidden)
            for old, part in zip((x, idx, weights), new, strict=True):
                old.copy_(part)
            step_again()
            wanted = reference_layer.of_one_rank(
                *new, NUM_EXPERTS, num_ranks,
                lambda expert, rows: rows * torch.tensor(factor(expert), dtype=rows.dtype),
            )  # fmt: skip
            wrong += not torch.equal(y.cpu().view(torch.int16), wanted.view(torch.int16))
        if device.type == "cuda":
            torch.cuda.synchronize()
        torch.distributed.barrier(group)
        started = time.perf_counter()
        for _ in range(num_steps):
            step_again()
        if device.type == "cuda":
            torch.cuda.synchronize()
        micros = (time.perf_counter() - started) / num_steps * 1e6
        layer.buffer.check()
    how = "replays of a CUDA graph" if device.type == "cuda" else "eager steps on the host target"
    say(group, f"{num_steps} {how}, {micros:.0f} us each")
    say(group, "all steps gave the reference's bits" if not wrong else f"{wrong} steps are WRONG")
    return wrong == 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line.parser(
        "examples decode_graph",
        __doc__ or "",
        "deep_comm examples decode_graph --ranks 2 --places 6 --steps 20",
    )
    on_gpu = torch.cuda.is_available()
    parser.add_argument(
        "--places", type=at_least(1), default=64 if on_gpu else 6, help="tokens per rank at most"
    )
    parser.add_argument(
        "--hidden",
        type=at_least(8, multiple=8),
        default=7168 if on_gpu else 64,
        help="columns of a row",
    )
    parser.add_argument("--steps", type=at_least(1), default=20, help="steps to run and to time")
    add_ranks(parser, 2)
    parsed = parser.parse_args(arguments)
    return on_ranks(rank_main, parsed.ranks, parsed.places, parsed.hidden, parsed.steps)


if __name__ == "__main__":
    sys.exit(main())
