"""torchtitan's deepep backend: custom operators over ElasticBuffer."""

from __future__ import annotations

from typing import Any

import drop_in
import torch
from drop_in import NUM_EXPERTS, NUM_TOPK
from torch import Tensor

from released.package import released
from released.program import Checks, Program, Release, synchronise

RELEASE = Release("torchtitan", "0.3.0", "torchtitan", ("distributed.deepep.deepep",))
HIDDEN, MAX_TOKENS = 512, 32


def _experts(x: Tensor, counts: Tensor, first: int) -> Tensor:
    """Rows come by expert; those behind the last expert's are nobody's."""
    factors = torch.zeros(x.shape[0], 1, device=x.device)
    begin = 0
    for expert, count in enumerate(counts.tolist()):
        factors[begin : begin + count] = first + expert + 1
        begin += count
    return (torch.where(factors > 0, x.float(), 0.0) * factors).to(torch.bfloat16)


def run(group: Any, checks: Checks) -> None:
    module = released("torchtitan.distributed.deepep.deepep")
    if drop_in.device().type == "cpu":  # the operators are made for CUDA alone
        for name in ("dispatch", "combine"):
            torch.library.impl(module._lib, name, "CPU")(getattr(module, f"_{name}_op_impl"))
    rank, num_ranks = group.rank(), group.size()
    first, num_local = drop_in.first_of(rank, num_ranks), drop_in.num_local_of(rank, num_ranks)
    module.get_buffer(group, hidden=HIDDEN, num_max_tokens_per_rank=MAX_TOKENS, num_topk=NUM_TOPK)
    for step, routing in enumerate(("distinct", "holes", "distinct")):
        most = max(drop_in.num_tokens_of(other + step) for other in range(num_ranks))
        x, ids, scores = drop_in.routed(
            rank, drop_in.num_tokens_of(rank + step), hidden=HIDDEN, routing=routing, seed=step
        )
        x.requires_grad_()
        scores.requires_grad_()

        def layer(is_captured: bool) -> Tensor:
            rows, counts, state = module.dispatch_tokens(
                x, ids, scores, num_local, NUM_EXPERTS, num_tokens_per_rank=most,
                cudagraphable=is_captured,
            )  # fmt: skip
            out = module.combine_tokens(_experts(rows, counts, first), state)
            module.sync_combine()
            return out  # type: ignore[no-any-return]

        out = layer(False)
        towards = torch.arange(HIDDEN, device=x.device) % 3 - 1
        (out * towards).sum().backward()
        synchronise()
        dense_x = x.detach().clone().requires_grad_()
        dense_scores = scores.detach().clone().requires_grad_()
        expected = drop_in.dense(dense_x, ids, dense_scores)
        (expected * towards).sum().backward()
        assert x.grad is not None and dense_x.grad is not None
        assert scores.grad is not None and dense_scores.grad is not None
        checks.equal(out.detach(), expected.detach(), f"training, {routing}")
        checks.equal(x.grad, dense_x.grad, f"gradient of tokens, {routing}")
        # The adapter itself rounds these to the type of the tokens.
        checks.equal(
            scores.grad, dense_scores.grad.to(torch.bfloat16), f"gradient of scores, {routing}"
        )
        with torch.no_grad():
            out = layer(True)
            synchronise()
            checks.equal(out, expected.detach(), f"inference without the host, {routing}")
    drop_in.barrier(group)
    module._buffer.destroy()


PROGRAMS = (
    Program(
        "torchtitan", "deepep/deepep.py", RELEASE, run, ranks=(2, 3), backend="nccl",
        leaves_traces=True,
    ),
)  # fmt: skip
