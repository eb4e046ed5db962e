"""get_dispatch_layout: which ranks each token goes to, and how many tokens go where."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deep_comm import checks, integers
from deep_comm.backends import Launch
from deep_comm.context import Context
from deep_comm.errors import ArgumentError
from deep_comm.events import EventOverlap
from deep_comm.ops.call import StreamOptions


class Layout:
    """R ranks, E experts, T tokens of this rank."""

    __slots__ = (
        "num_tokens_per_rank",
        "num_tokens_per_node",
        "num_tokens_per_expert",
        "is_token_in_rank",
        "num_experts",
    )

    def __init__(
        self,
        num_tokens_per_rank: Tensor,
        num_tokens_per_expert: Tensor,
        is_token_in_rank: Tensor,
        num_tokens_per_node: Tensor | None = None,
    ) -> None:
        self.num_tokens_per_rank = num_tokens_per_rank  # int32 [R], a token counts once per rank
        self.num_tokens_per_node = (
            num_tokens_per_node  # int32 [nodes], likewise; None inside one node
        )
        self.num_tokens_per_expert = num_tokens_per_expert  # int32 [E], every selection counts
        self.is_token_in_rank = is_token_in_rank  # bool [T, R]
        self.num_experts: int = num_tokens_per_expert.shape[0]


def launch_layout(ctx: Context, launch: Launch, topk_idx: Tensor, num_experts: int) -> Layout:
    """Allocate and launch; what the kernel finds wrong with the indices is in the error record."""
    num_tokens, num_topk = topk_idx.shape
    layout = Layout(
        num_tokens_per_rank=launch.empty((ctx.num_ranks,), torch.int32),
        num_tokens_per_expert=launch.empty((num_experts,), torch.int32),
        is_token_in_rank=launch.empty((num_tokens, ctx.num_ranks), torch.bool),
    )
    per_rank, per_expert = layout.num_tokens_per_rank, layout.num_tokens_per_expert
    choices = topk_idx.data_ptr() or ctx.heap.base
    mask = layout.is_token_in_rank.data_ptr() or ctx.heap.base
    per_node = 0
    if ctx.topology.num_nodes > 1:
        layout.num_tokens_per_node = launch.empty((ctx.topology.num_nodes,), torch.int32)
        per_node = layout.num_tokens_per_node.data_ptr()
    ctx.count_layout(
        choices, topk_idx.element_size(), num_tokens, num_topk, num_experts, ctx.num_ranks,
        per_rank.data_ptr(), per_node, per_expert.data_ptr(), mask, launch.stream,
    )  # fmt: skip
    return layout


def get_dispatch_layout(
    ctx: Context,
    topk_idx: Any,
    num_experts: int,
    streams: StreamOptions,
) -> tuple[Layout, EventOverlap]:
    ctx.begin()
    topk_idx = checks.topk_idx(topk_idx, ctx.device)
    num_experts = checks.num_experts(num_experts, ctx.num_max_experts)
    with streams.launch(ctx) as launch:
        layout = launch_layout(ctx, launch, topk_idx, num_experts)
        event = launch.finish((topk_idx,))
    ctx.end()
    return layout, event


def checked_routing(
    ctx: Context,
    num_tokens: int,
    idx: Tensor | None,
    num_tokens_per_rank: Any,
    num_tokens_per_expert: Any,
    is_token_in_rank: Any,
    num_experts: int | None,
    expert_alignment: object,
    num_worst_tokens: object,
) -> tuple[Layout | None, int]:
    """What dispatch is told: a layout, or None where it is to be made of ``idx``; and E."""
    if num_experts is not None:
        num_experts = checks.num_experts(num_experts, ctx.num_max_experts)
    checks.expert_alignment(expert_alignment)
    integers.require("num_worst_tokens", num_worst_tokens, 0, integers.LARGEST)
    if (
        num_tokens_per_rank is None
        and is_token_in_rank is None
        and num_tokens_per_expert is None
        and num_experts is not None
    ):
        if idx is None:
            raise ArgumentError("topk_idx", None, "is needed to compute the layout")
        return None, num_experts
    layout = checked_layout(
        ctx, num_tokens, num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank
    )
    if num_experts is not None and num_experts != layout.num_experts:
        raise ArgumentError(
            "num_experts", num_experts, f"must be that of the layout ({layout.num_experts})"
        )
    return layout, layout.num_experts


def checked_layout(
    ctx: Context,
    num_tokens: int,
    num_tokens_per_rank: Any,
    num_tokens_per_expert: Any,
    is_token_in_rank: Any,
) -> Layout:
    """The three tensors as dispatch gets them back from the caller."""
    for name, value in (
        ("num_tokens_per_rank", num_tokens_per_rank),
        ("is_token_in_rank", is_token_in_rank),
        ("num_tokens_per_expert", num_tokens_per_expert),
    ):
        if value is None:
            raise ArgumentError(
                name, None, "is needed without a handle (or topk_idx and num_experts alone)"
            )
    layout = Layout(
        num_tokens_per_rank=checks.tensor(
            "num_tokens_per_rank",
            num_tokens_per_rank,
            ctx.device,
            shape=(ctx.num_ranks,),
            dtypes=(torch.int32,),
        ),
        num_tokens_per_expert=checks.tensor(
            "num_tokens_per_expert",
            num_tokens_per_expert,
            ctx.device,
            shape=(None,),
            dtypes=(torch.int32,),
        ),
        is_token_in_rank=checks.tensor(
            "is_token_in_rank",
            is_token_in_rank,
            ctx.device,
            shape=(num_tokens, ctx.num_ranks),
            dtypes=(torch.bool,),
        ),
    )
    checks.num_experts(layout.num_experts, ctx.num_max_experts)
    return layout
