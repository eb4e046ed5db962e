"""Expanded outputs between nodes: rows are numbered by the rank that has them, and gathered.

A dispatch brings each token once, as without ``expand``, into memory that nobody else sees. The
kernels here are local: docs/design/0025.
"""

from __future__ import annotations

import torch

from deep_comm.backends import Launch
from deep_comm.checks import Payload
from deep_comm.context import Context
from deep_comm.expansion import Expansion
from deep_comm.ops.internode_outputs import TierOutputs
from deep_comm.ops.internode_plan import TwoTierPlan
from deep_comm.ops.outputs import RowTensors


def number_received(
    ctx: Context,
    launch: Launch,
    plan: TwoTierPlan,
    received: TierOutputs,
    num_received: int,
    num_local_experts: int,
    expert_alignment: int,
    num_rows: int,
) -> Expansion:
    """Behind a dispatch, of whose rows the output shall have ``num_rows``. ``num_received``:
    address of an int32, how many tokens this rank has received."""
    idx = received.topk_idx
    assert idx is not None
    expansion = Expansion(
        expert_offsets=launch.empty((num_local_experts + 1,), torch.int32),
        expert_counts=launch.empty((num_local_experts,), torch.int32),
        recv_rows=launch.empty(tuple(idx.shape), torch.int32),
        num_rows=num_rows,
        expert_alignment=expert_alignment,
    )
    address = ctx.address
    ctx.engine.number_received(
        num_received=num_received,
        topk_idx=address(idx),
        topk_idx_bytes=idx.element_size(),
        num_tokens_limit=idx.shape[0],
        num_topk=idx.shape[1],
        num_local_experts=num_local_experts,
        expert_alignment=expert_alignment,
        num_rows=num_rows,
        expert_offsets=address(expansion.expert_offsets),
        expert_counts=address(expansion.expert_counts),
        recv_rows=address(expansion.recv_rows),
        num_channels=plan.num_local_blocks,
        stream=launch.stream,
    )
    return expansion


def expand_received(
    ctx: Context,
    launch: Launch,
    plan: TwoTierPlan,
    payload: Payload,
    received: TierOutputs,
    num_received: int,
    expansion: Expansion,
    zero_padding: bool,
) -> RowTensors:
    """``received`` by expert; what came without top-k has neither experts nor weights."""
    idx, weights, num_rows = received.topk_idx, received.topk_weights, expansion.num_rows
    out = RowTensors()
    out.make(
        launch,
        payload,
        None if idx is None else idx[:, :1],
        None if weights is None else weights[:, :1],
        num_rows,
    )
    address = ctx.address
    ctx.engine.expand_received(
        num_received=num_received,
        recv_x=address(received.x),
        recv_scales=address(received.scales),
        recv_weights=address(weights),
        recv_rows=address(expansion.recv_rows),
        expert_offsets=address(expansion.expert_offsets),
        expert_counts=address(expansion.expert_counts),
        num_topk=expansion.recv_rows.shape[1],
        num_local_experts=expansion.expert_counts.shape[0],
        num_rows=num_rows,
        num_tokens_limit=expansion.recv_rows.shape[0],
        row_bytes=payload.row_bytes,
        scale_row_bytes=payload.scale_row_bytes,
        zero_padding=zero_padding,
        x=address(out.x),
        scales=address(out.scales),
        expert_idx=address(out.topk_idx),
        expert_idx_bytes=0 if idx is None else idx.element_size(),
        weights=address(out.topk_weights),
        num_channels=plan.num_local_blocks,
        stream=launch.stream,
    )
    if out.topk_idx is not None:
        out.topk_idx = out.topk_idx.view(num_rows)
    if out.topk_weights is not None:
        out.topk_weights = out.topk_weights.view(num_rows)
    return out
