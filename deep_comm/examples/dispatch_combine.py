"""Dispatch and combine by hand: six tokens, four experts, and what arrives where.

A Buffer moves rows; everything else is plain torch. Every token says where it comes from. The
experts multiply by 10, 20, 30 and 40. The sums that return are computed a second time without any
communication.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

import deep_comm
from deep_comm.launch import add_ranks, device_of, on_ranks, say
from deep_comm.settings import command_line

HIDDEN = 16
NUM_EXPERTS = 4
# Two experts per token; -1: no second one. Rank r takes the tokens t with t % ranks == r.
TOPK_IDX = ((0, 1), (2, 0), (3, -1), (1, 3), (0, 2), (2, 3))
TOPK_WEIGHTS = ((0.5, 0.5), (0.75, 0.25), (1.0, 0.0), (0.5, 0.5), (0.25, 0.75), (0.5, 0.5))


def factor(expert: int) -> float:
    return 10.0 * (expert + 1)


def rank_main(group: Any) -> bool:
    device = device_of(group)
    mine = range(group.rank(), len(TOPK_IDX), group.size())
    x = torch.tensor([[float(token)] * HIDDEN for token in mine]).view(-1, HIDDEN)
    x = x.to(device, torch.bfloat16)
    topk_idx = torch.tensor([TOPK_IDX[token] for token in mine]).view(-1, 2).to(device)
    topk_weights = torch.tensor([TOPK_WEIGHTS[token] for token in mine]).view(-1, 2).to(device)

    num_bytes = deep_comm.Config().get_nvl_buffer_size_hint(2 * HIDDEN, group.size())
    with deep_comm.Buffer(group, num_bytes, device=device) as buffer:
        # Each token goes once to every rank that holds one of its experts.
        rows, idx, weights, counts, handle, _ = buffer.dispatch(
            x, topk_idx=topk_idx, topk_weights=topk_weights, num_experts=NUM_EXPERTS
        )
        # idx holds local experts, -1 where the expert lives elsewhere;
        # counts are tokens per expert.
        first = deep_comm.ranks.topology.first_expert(group.rank(), NUM_EXPERTS, group.size())
        lines = [
            f"  token {int(row[0])} for local experts {[e for e in chosen if e >= 0]}"
            for row, chosen in zip(rows.cpu(), idx.tolist(), strict=True)
        ]
        for rank in range(group.size()):
            if rank == group.rank():
                print(f"rank {rank} received {len(lines)} tokens, {counts} by expert:", flush=True)
                print("\n".join(lines), flush=True)
            torch.distributed.barrier(group)
        # The experts of this rank, weighted and added; a rank sends one row a token back.
        sums = torch.zeros(rows.shape, dtype=torch.float32, device=device)
        for k in range(idx.shape[1]):
            is_here = (idx[:, k] >= 0).unsqueeze(1)
            scale = 10.0 * (first + idx[:, k] + 1).unsqueeze(1) * weights[:, k : k + 1]
            sums += torch.where(is_here, rows.float() * scale, 0.0)
        # combine adds the ranks' rows of a token.
        y, _, _ = buffer.combine(sums.to(x.dtype), handle)

    expected = []
    for token in mine:
        chosen = zip(TOPK_IDX[token], TOPK_WEIGHTS[token], strict=True)
        expected.append(token * sum(w * factor(e) for e, w in chosen if e >= 0))
    wanted = torch.tensor(expected).view(-1, 1).expand(-1, HIDDEN)
    is_right = torch.allclose(y.float().cpu(), wanted, rtol=1e-2)
    say(
        group,
        "sums are right" if is_right else f"sums are WRONG: {y[:, 0].tolist()}, not {expected}",
    )
    return is_right


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line.parser(
        "examples dispatch_combine", __doc__ or "", "deep_comm examples dispatch_combine --ranks 3"
    )
    add_ranks(parser, 2)
    return on_ranks(rank_main, parser.parse_args(arguments).ranks)


if __name__ == "__main__":
    sys.exit(main())
