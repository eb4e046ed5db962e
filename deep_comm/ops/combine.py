"""combine: every token's rows come home and are summed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deep_comm import checks
from deep_comm.backends import Launch
from deep_comm.context import Context
from deep_comm.errors import ArgumentError, HandleMismatch
from deep_comm.events import EventOverlap
from deep_comm.handle import Handle, KnownHandle
from deep_comm.ops.call import CallOptions
from deep_comm.ops.expand import reduce_experts


def combine(
    ctx: Context,
    x: Any,
    handle: Handle | Sequence[Tensor],
    *,
    topk_weights: Any,
    bias: Any,
    apply_weights: bool,
    options: CallOptions,
) -> tuple[Tensor, Tensor | None, EventOverlap]:
    ctx.begin()
    x = checks.combine_input(x, ctx.device)
    num_rows, hidden = x.shape
    known = ctx.known_handle(handle)
    if known.num_output_rows != num_rows:
        raise HandleMismatch(
            "handle",
            f"{known.num_output_rows} received rows",
            f"must be of a dispatch that returned as many rows as x has ({num_rows})",
        )
    num_topk = 0
    row_weights = None  # multiplied with the rows, here
    expansion = known.expansion
    if apply_weights:
        if expansion is None:
            raise HandleMismatch(
                "handle", "without expansion", "must be of a dispatch with expand=True (apply_weights)"
            )
        if topk_weights is None:
            raise ArgumentError("topk_weights", None, "is needed with apply_weights")
    if topk_weights is not None and expansion is not None:
        topk_weights = checks.tensor(
            "topk_weights", topk_weights, ctx.device, shape=(num_rows,), dtypes=(torch.float32,)
        )
        if apply_weights:
            row_weights, topk_weights = topk_weights, None
        else:
            num_topk = expansion.recv_rows.shape[1]
    elif topk_weights is not None:
        topk_weights = checks.tensor(
            "topk_weights",
            topk_weights,
            ctx.device,
            shape=(num_rows, None),
            dtypes=(torch.float32,),
        )
        num_topk = topk_weights.shape[1]
    num_tokens = known.num_tokens
    bias_0, bias_1 = checks.biases(bias, (num_tokens, hidden), x)
    plan = ctx.plan(
        options.config,
        options.default_config,
        hidden * x.element_size(),
        0,
        num_topk,
        known.num_channels,
    )
    if plan.num_channels != known.num_channels:
        Handle.of(handle).require_num_channels(plan.num_channels)

    with options.streams.launch(ctx) as launch:
        inputs = (x, topk_weights, row_weights, bias_0, bias_1)
        if expansion is not None:
            x, topk_weights = reduce_experts(ctx, launch, plan, x, known, row_weights, topk_weights)
        staging, staging_offset, num_staging_rows = _staging(
            ctx, launch, known, hidden * x.element_size(), num_topk
        )
        combined_x = launch.empty((num_tokens, hidden), x.dtype)
        combined_topk_weights = None
        if topk_weights is not None:
            combined_topk_weights = launch.empty((num_tokens, num_topk), torch.float32)
        ctx.engine.combine(
            x=ctx.address(x),
            dtype=checks.COMBINE_DTYPES[x.dtype],
            hidden=hidden,
            topk_weights=ctx.address(topk_weights),
            num_topk=num_topk,
            bias_0=ctx.address(bias_0),
            bias_1=ctx.address(bias_1),
            num_tokens=num_tokens,
            num_recv_rows=known.num_recv_rows,
            rank_prefix_matrix=known.rank_prefix_matrix,
            channel_prefix_matrix=known.channel_prefix_matrix,
            recv_channel_prefix_matrix=known.recv_channel_prefix_matrix,
            send_head=known.send_head,
            combined_x=ctx.address(combined_x),
            combined_topk_weights=ctx.address(combined_topk_weights),
            staging_offset=staging_offset,
            num_staging_rows=num_staging_rows,
            num_channels=plan.num_channels,
            num_send_tokens=plan.num_send_tokens,
            num_slots=plan.num_slots,
            stream=launch.stream,
        )
        del staging  # whoever gets its memory next writes there behind this kernel
        event = launch.finish(inputs, known)
    ctx.end()
    return combined_x, combined_topk_weights, event


def _staging(
    ctx: Context, launch: Launch, handle: KnownHandle, row_bytes: int, num_topk: int
) -> tuple[object, int, int]:
    """Memory for all rows that may come: (its owner, offset in the heap, rows); offset 0 without room."""
    num_peers = ctx.num_ranks - 1
    if handle.num_topk > 0:
        num_peers = min(num_peers, handle.num_topk)
    num_rows = handle.num_tokens * num_peers
    num_bytes = num_rows * ctx.engine.staging_row_bytes(row_bytes=row_bytes, num_topk=num_topk)
    taken = ctx.region.allocate_scratch(num_bytes, launch.ordered_after)
    if taken is None:
        return None, 0, 0
    block, events = taken
    if events:
        launch.wait(events)
    return block, block.offset, num_rows
