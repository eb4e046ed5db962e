"""Two logical nodes: four ranks of one machine as two nodes of two, with a rail between them.

``ranks_per_node=2`` is all it takes. A token then crosses once to the other node, however many
ranks need it there, and is forwarded inside; sums return the same way. The example counts the bytes
on the rail, and compares ExpertParallel over the same nodes with the reference, bit by bit.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

import deep_comm
from deep_comm.launch import on_ranks, say
from deep_comm.reference import layer as reference_layer
from deep_comm.settings import command_line
from deep_comm.settings.command_line import at_least

HIDDEN, NUM_EXPERTS, NUM_TOPK = 256, 16, 4
RANKS_PER_NODE = 2


def rank_main(group: Any, num_tokens: int) -> bool:
    rank, num_ranks = group.rank(), group.size()
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
    topk_idx = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(NUM_TOPK).indices
    topk_weights = torch.rand(num_tokens, NUM_TOPK, generator=generator)

    # Rails exist on the host target in this version.
    layer = deep_comm.ExpertParallel(
        group,
        hidden=HIDDEN,
        num_experts=NUM_EXPERTS,
        num_topk=NUM_TOPK,
        max_tokens=max(num_tokens, 1),
        mode="prefill",
        ranks_per_node=RANKS_PER_NODE,
        device="cpu",
    )
    node = rank // RANKS_PER_NODE
    with layer, torch.inference_mode():
        _, per_node, _, in_rank, _ = layer.buffer.get_dispatch_layout(topk_idx, NUM_EXPERTS)
        before = [sum(queues) for queues in layer.buffer.rail_put_bytes]
        batch = layer.dispatch(x, topk_idx, topk_weights)
        sent = [sum(q) - b for q, b in zip(layer.buffer.rail_put_bytes, before, strict=True)]
        y = layer.combine(batch, batch.map(lambda expert, rows: rows * (1.0 + expert % 2)))

    other = 1 - node
    assert per_node is not None  # as it is inside one node
    crossing = int(per_node[other])
    elsewhere = in_rank.view(num_tokens, -1, RANKS_PER_NODE)[:, other]
    print(
        f"rank {rank} (node {node}): {crossing} tokens cross to node {other} for "
        f"{int(elsewhere.sum())} ranks there, {sent[other]} bytes on the rail",
        flush=True,
    )
    wanted = reference_layer.of_one_rank(
        x, topk_idx, topk_weights, NUM_EXPERTS, num_ranks,
        lambda expert, rows: rows * (1.0 + expert % 2), RANKS_PER_NODE,
    )  # fmt: skip
    row_bytes = HIDDEN * x.element_size()
    # Beside a row: scales, experts, weights, source; no row twice.
    crossed_once = crossing * row_bytes <= sent[other] < crossing * row_bytes * 2 + 4096
    is_right = torch.equal(y.view(torch.int16), wanted.view(torch.int16)) and crossed_once
    torch.distributed.barrier(group)
    say(group, "sums are right" if is_right else "sums, or bytes on the rail, are WRONG")
    return is_right


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line.parser(
        "examples two_nodes", __doc__ or "", "deep_comm examples two_nodes --tokens 12"
    )
    parser.add_argument("--tokens", type=at_least(1), default=12, help="tokens per rank")
    return on_ranks(rank_main, 2 * RANKS_PER_NODE, parser.parse_args(arguments).tokens)


if __name__ == "__main__":
    sys.exit(main())
