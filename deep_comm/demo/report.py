"""The demo's table and its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from deep_comm import reference
from deep_comm.bench.payload import same_bits
from deep_comm.bench.tables import align
from deep_comm.demo.forward import STAGES, Forward
from deep_comm.demo.layer import NUM_EXPERTS, Experts, Tokens
from deep_comm.reference import internode as reference_internode


def rows(forwards: Sequence[Forward]) -> list[dict[str, Any]]:
    """By rank: tokens, load of its experts, bytes, milliseconds."""
    return [
        {
            "rank": it.rank, "tokens": it.num_tokens, "sent": it.num_sent_tokens,
            "received": it.num_recv_tokens, "rows": it.num_rows,
            "expert load": it.tokens_per_expert, "MB sent": it.sent_bytes / 1e6,
            **{f"{stage} ms": it.times_s[stage] * 1e3 for stage in STAGES},
        }
        for it in forwards
    ]  # fmt: skip


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return f"{min(value)}..{max(value)}" if value else "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def table(forwards: Sequence[Forward]) -> str:
    """A line per rank."""
    found = rows(forwards)
    return align([[*found[0]], *([_cell(value) for value in row.values()] for row in found)], 0)


def check(
    forwards: Sequence[Forward],
    shares: Sequence[Tokens],
    experts: Experts,
    ranks_per_node: int | None = None,
) -> list[str]:
    """What differs from the layer computed in this one process; empty when every bit agrees.

    Between nodes sums are rounded once a node more, and so they are here.
    """
    xs = [share.x for share in shares]
    topk_idxs = [share.topk_idx for share in shares]
    weights = [share.topk_weights for share in shares]
    dispatched = reference.dispatch(xs, topk_idxs, NUM_EXPERTS, weights)
    if ranks_per_node is not None and ranks_per_node < len(shares):
        expected = _layer_of_nodes(shares, experts, ranks_per_node)
    else:
        expected = reference.moe_layer(xs, topk_idxs, weights, NUM_EXPERTS, experts)
    problems = []
    for forward, received, result in zip(forwards, dispatched, expected, strict=True):
        assert forward.recv_x is not None and forward.combined_x is not None
        if not same_bits(forward.recv_x, received.recv_x):
            problems.append(
                f"rank {forward.rank}: dispatch delivered other rows than the reference"
            )
        if forward.tokens_per_expert != received.num_recv_tokens_per_expert:
            problems.append(f"rank {forward.rank}: other tokens per expert than the reference")
        if not same_bits(forward.combined_x, result):
            difference = (forward.combined_x.float() - result.float()).abs().max()
            problems.append(
                f"rank {forward.rank}: the layer's output differs by up to {difference:.3g}"
            )
    return problems


def _layer_of_nodes(
    shares: Sequence[Tokens], experts: Experts, ranks_per_node: int
) -> list[Tensor]:
    dispatched = reference_internode.dispatch(
        [share.x for share in shares],
        [share.topk_idx for share in shares],
        NUM_EXPERTS,
        ranks_per_node,
        [share.topk_weights for share in shares],
    )
    received = [each.received for each in dispatched]
    outputs = reference.experts_of_ranks(received, NUM_EXPERTS, experts)
    return [combined for combined, _ in reference_internode.combine(outputs, dispatched)]
