"""The demo's table and its verdict."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deep_comm import reference
from deep_comm.demo.forward import STAGES, Forward
from deep_comm.demo.layer import NUM_EXPERTS, Experts, Tokens


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


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal shape, dtype and bytes; unlike ==, this tells 0.0 from -0.0 and accepts equal NaNs."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    as_bytes = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (left, right)]
    return torch.equal(*as_bytes)


def check(forwards: Sequence[Forward], shares: Sequence[Tokens], experts: Experts) -> list[str]:
    """What differs from the layer computed in this one process; empty when every bit agrees."""
    xs = [share.x for share in shares]
    topk_idxs = [share.topk_idx for share in shares]
    weights = [share.topk_weights for share in shares]
    dispatched = reference.dispatch(xs, topk_idxs, NUM_EXPERTS, weights)
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
