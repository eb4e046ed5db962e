"""What a dispatch with new routing is given, of one tier or two: checked."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from deep_comm import checks
from deep_comm.checks import Payload
from deep_comm.context import Context
from deep_comm.ops.expand import require_expandable
from deep_comm.ops.layout import Layout, checked_routing
from deep_comm.ops.scales import ScaleOptions


class NewRouting(NamedTuple):
    payload: Payload
    idx: Tensor | None
    weights: Tensor | None
    layout: Layout | None  # None: to be made of idx
    num_experts: int

    @property
    def num_topk(self) -> int:
        return 0 if self.idx is None else self.idx.shape[1]


def checked_new_routing(
    ctx: Context,
    x: Any,
    scale_options: ScaleOptions,
    *,
    num_tokens_per_rank: Any,
    is_token_in_rank: Any,
    num_tokens_per_expert: Any,
    topk_idx: Any,
    topk_weights: Any,
    num_experts: int | None,
    expert_alignment: int,
    num_worst_tokens: int,
    zero_tail: bool,
    expand: bool,
    zero_padding: bool,
) -> NewRouting:
    """The arguments of Buffer.dispatch; raises what that says. The operation begins."""
    ctx.begin()
    payload = scale_options.payload(x, ctx.device)
    idx, weights = checks.topk_pair(topk_idx, topk_weights, ctx.device, payload.num_tokens)
    require_expandable(idx, expand, zero_padding, zero_tail)
    layout, num_experts = checked_routing(
        ctx, payload.num_tokens, idx, num_tokens_per_rank, num_tokens_per_expert,
        is_token_in_rank, num_experts, expert_alignment, num_worst_tokens,
    )  # fmt: skip
    return NewRouting(payload, idx, weights, layout, num_experts)
