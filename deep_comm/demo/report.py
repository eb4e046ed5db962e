"""The demo's table and its verdict."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from deep_comm import reference
from deep_comm.bench.payload import same_bits
from deep_comm.demo.forward import STAGES, Forward
from deep_comm.demo.layer import NUM_EXPERTS, Experts, Tokens
from deep_comm.reference import internode as reference_internode


def table(forwards: Sequence[Forward]) -> str:
    """One line per rank: tokens, load of its experts, bytes, times."""
    header = ["rank", "tokens", "sent", "received", "rows", "expert load", "MB sent"]
    header += [f"{stage} ms" for stage in STAGES]
    rows = [header]
    for forward in forwards:
        load = forward.tokens_per_expert
        row = [str(forward.rank), str(forward.num_tokens), str(forward.num_sent_tokens)]
        row += [str(forward.num_recv_tokens), str(forward.num_rows)]
        row += [f"{min(load)}..{max(load)}" if load else "-", f"{forward.sent_bytes / 1e6:.2f}"]
        row += [f"{forward.times_s[stage] * 1e3:.1f}" for stage in STAGES]
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


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
