"""combine of a group of several nodes: rows are added in each node, sums cross and are added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deep_comm import checks
from deep_comm.backends import Launch
from deep_comm.context import Context
from deep_comm.events import EventOverlap
from deep_comm.internode_handle import InternodeHandle
from deep_comm.ops.call import CallOptions
from deep_comm.ops.expand import reduce_experts, weights_of_rows
from deep_comm.ops.internode import known_handle
from deep_comm.ops.internode_expand import num_received
from deep_comm.ops.internode_plan import plan_two_tiers


def internode_combine(
    ctx: Context,
    x: Any,
    handle: Sequence[Tensor],
    *,
    topk_weights: Any,
    bias: Any,
    apply_weights: bool,
    options: CallOptions,
) -> tuple[Tensor, Tensor | Any, EventOverlap]:
    ctx.begin()
    x = checks.combine_input(x, ctx.device)
    num_rows, hidden = x.shape
    known = known_handle(ctx, handle)
    checks.require_num_rows(known.num_output_rows, num_rows)
    expansion = known.expansion
    row_weights, topk_weights, num_topk = weights_of_rows(
        ctx, expansion, topk_weights, apply_weights, num_rows
    )
    num_tokens = known.num_tokens
    bias_0, bias_1 = checks.biases(bias, (num_tokens, hidden), x)
    plan = plan_two_tiers(
        ctx,
        options,
        hidden * x.element_size(),
        0,
        num_topk,
        known.num_channels,
    )
    address = ctx.address
    with options.streams.launch(ctx) as launch:
        inputs = (x, topk_weights, row_weights, bias_0, bias_1)
        if expansion is not None:
            x, topk_weights = reduce_experts(
                ctx, launch, plan.num_local_blocks, x, expansion,
                num_received(ctx, known.recv_gbl_rank_prefix_sum), row_weights, topk_weights,
            )  # fmt: skip
        combined_x = launch.empty((num_tokens, hidden), x.dtype)
        combined_topk_weights = None
        if topk_weights is not None:
            combined_topk_weights = launch.empty((num_tokens, num_topk), torch.float32)
        staging, staging_offset, num_staging_rows = _staging(
            ctx, launch, known, hidden * x.element_size(), num_topk
        )
        ctx.engine.internode_combine(
            x=address(x),
            dtype=checks.COMBINE_DTYPES[x.dtype],
            hidden=hidden,
            topk_weights=address(topk_weights),
            num_topk=num_topk,
            bias_0=address(bias_0),
            bias_1=address(bias_1),
            num_tokens=num_tokens,
            num_recv_rows=known.num_recv_rows,
            send_node_head=address(known.send_rdma_head),
            send_rank_head=address(known.send_nvl_head),
            recv_node_channel_prefix=address(known.recv_rdma_channel_prefix_matrix),
            recv_node_prefix_sum=address(known.recv_rdma_rank_prefix_sum),
            recv_rank_channel_start=address(known.recv_gbl_channel_prefix_matrix),
            recv_rank_prefix_sum=address(known.recv_gbl_rank_prefix_sum),
            combined_x=address(combined_x),
            combined_topk_weights=address(combined_topk_weights),
            node_channel_prefix=address(known.rdma_channel_prefix_matrix),
            forward_places=address(known.forward_places),
            num_forward_rows=known.num_forward_rows,
            staging_offset=staging_offset,
            num_staging_rows=num_staging_rows,
            stream=launch.stream,
            **plan.as_arguments(),
        )
        del staging  # whoever gets its memory next writes there behind this kernel
        event = launch.finish((*inputs, known.forward_places, *known.all_tensors))
    ctx.end()
    return combined_x, combined_topk_weights, event


def _staging(
    ctx: Context, launch: Launch, handle: InternodeHandle, row_bytes: int, num_topk: int
) -> tuple[object, int, int]:
    """Memory for all rows and sums that may come and cross: (its owner, offset in the heap, rows);
    offset 0 without room, or without a handle that knows their places."""
    if handle.forward_places is None:
        return None, 0, 0
    topology = ctx.topology

    def most(num_targets: int) -> int:
        """Of them that a token can go to."""
        return min(handle.num_topk, num_targets) if handle.num_topk else num_targets

    returning = handle.num_returning_rows
    if returning is None:
        returning = handle.num_forward_rows * most(topology.ranks_per_node - 1)
    crossing = handle.num_tokens * most(topology.num_nodes - 1)
    num_rows = max(1, returning + crossing + handle.num_forward_rows)
    taken = ctx.take(
        num_rows * ctx.engine.staging_row_bytes(row_bytes=row_bytes, num_topk=num_topk),
        launch.caller_stream,
        launch.is_behind_caller,
        launch.is_captured,
        True,
    )
    if taken is None:
        return None, 0, 0
    block, events = taken
    if events:
        launch.wait(events)
    ctx.staged = range(block.offset, block.offset + block.num_bytes)
    return block, block.offset, num_rows
