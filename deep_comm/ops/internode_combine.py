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
from deep_comm.internode_handle import KnownTierHandle
from deep_comm.ops.call import CallOptions
from deep_comm.ops.expand import reduce_experts, weights_of_rows
from deep_comm.ops.internode import known_handle
from deep_comm.ops.internode_plan import combine_launcher, plan_two_tiers
from deep_comm.ops.quick import remember_tier_combine


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
    dtype, row_bytes = x.dtype, hidden * x.element_size()
    plan = plan_two_tiers(ctx, options, row_bytes, 0, num_topk, known.num_channels)
    launcher = combine_launcher(ctx, plan, checks.COMBINE_DTYPES[dtype], row_bytes, num_topk)
    address = ctx.address
    with options.streams.launch(ctx) as launch:
        inputs = (x, topk_weights, row_weights, bias_0, bias_1)
        if expansion is not None:
            x, topk_weights = reduce_experts(
                ctx, launch, plan.num_local_blocks, x, expansion, known.num_received, row_weights,
                topk_weights,
            )  # fmt: skip
        combined_x = launch.empty((num_tokens, hidden), dtype)
        combined_topk_weights = None
        if topk_weights is not None:
            combined_topk_weights = launch.empty((num_tokens, num_topk), torch.float32)
        staging, staging_offset, num_staging_rows = _staging(
            ctx, launch, known, row_bytes, num_topk
        )
        launcher(
            *known.way_back,
            address(x),
            address(topk_weights),
            address(bias_0),
            address(bias_1),
            num_tokens,
            address(combined_x),
            address(combined_topk_weights),
            staging_offset,
            num_staging_rows,
            launch.stream,
        )
        del staging  # whoever gets its memory next writes there behind this kernel
        event = launch.finish(inputs, known)
    ctx.end()
    if options.streams.is_quick and bias is None and expansion is None:
        remember_tier_combine(
            ctx, options, known.num_channels, dtype, hidden, num_topk,
            _staging_row_bytes(ctx, row_bytes, num_topk), launcher,
        )  # fmt: skip
    return combined_x, combined_topk_weights, event


def _staging_row_bytes(ctx: Context, row_bytes: int, num_topk: int) -> int:
    return ctx.engine.staging_row_bytes(row_bytes=row_bytes, num_topk=num_topk)


def _staging(
    ctx: Context, launch: Launch, known: KnownTierHandle, row_bytes: int, num_topk: int
) -> tuple[object, int, int]:
    """Memory for all rows and sums that may come and cross: (its owner, offset in the heap, rows);
    offset 0 without room, or without a handle that knows their places."""
    if known.forward_places == 0:
        return None, 0, 0
    num_rows = known.num_staging_rows
    taken = ctx.take(
        num_rows * _staging_row_bytes(ctx, row_bytes, num_topk),
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
    ctx.may_be_read = ctx.reads_late
    return block, block.offset, num_rows
