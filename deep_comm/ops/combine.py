"""combine: every token's rows come home and are summed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deep_comm import checks
from deep_comm.backends import Launch
from deep_comm.config import Config, require_config
from deep_comm.context import Context
from deep_comm.events import EventOverlap
from deep_comm.handle import Handle, KnownHandle
from deep_comm.ops.call import StreamOptions
from deep_comm.ops.expand import reduce_experts, weights_of_rows
from deep_comm.ops.plans import plan_combine
from deep_comm.ops.quick import remember_combine
from deep_comm.tuning import DefaultConfig


def combine(
    ctx: Context,
    x: Any,
    handle: Sequence[Tensor],
    *,
    topk_weights: Any,
    bias: Any,
    apply_weights: bool,
    config: Config | None,
    default: Config | DefaultConfig | None,
    streams: StreamOptions,
) -> tuple[Tensor, Tensor | Any, EventOverlap]:
    ctx.begin()
    x = checks.combine_input(x, ctx.device)
    num_rows, hidden = x.shape
    known = ctx.known_handle(handle)
    if known.num_output_rows != num_rows:
        checks.require_num_rows(known.num_output_rows, num_rows)
    expansion = known.expansion
    num_topk = 0
    row_weights = None  # multiplied with the rows, here
    if topk_weights is not None or apply_weights:
        row_weights, topk_weights, num_topk = weights_of_rows(
            ctx, expansion, topk_weights, apply_weights, num_rows
        )
    num_tokens = known.num_tokens
    bias_0, bias_1 = checks.biases(bias, (num_tokens, hidden), x)
    dtype = x.dtype
    key = (config, default, dtype, hidden, num_topk, known.num_channels, known.has_default_sms)
    if config is not None and type(config) is not Config:
        require_config(config)  # or it might be no key
    plan = ctx.calls.get(key) or plan_combine(
        ctx, key, config, default, checks.COMBINE_DTYPES[dtype], hidden * dtype.itemsize, num_topk,
        known.num_channels, known.has_default_sms,
    )  # fmt: skip
    if plan.rings.num_channels != known.num_channels:
        Handle.of(handle).require_num_channels(plan.rings.num_channels)

    with streams.launch(ctx) as launch:
        inputs = (x, topk_weights, row_weights, bias_0, bias_1)
        if expansion is not None:
            x, topk_weights = reduce_experts(
                ctx, launch, plan.rings.num_local_blocks, x, expansion, known.rank_prefix_matrix,
                row_weights, topk_weights,
            )  # fmt: skip
        staging, staging_offset, num_staging_rows = _staging(
            ctx, launch, known, plan.staging_row_bytes
        )
        combined_x = launch.empty((num_tokens, hidden), dtype)
        combined_topk_weights = None
        combined_weights = weights = 0
        empty_address = ctx.heap.base
        if topk_weights is not None:
            weights = topk_weights.data_ptr() or empty_address
            combined_topk_weights = launch.empty((num_tokens, num_topk), torch.float32)
            combined_weights = combined_topk_weights.data_ptr() or empty_address
        plan.launch(
            *known.way_back,
            x.data_ptr() or empty_address,
            weights,
            0 if bias_0 is None else bias_0.data_ptr() or empty_address,
            0 if bias_1 is None else bias_1.data_ptr() or empty_address,
            num_tokens,
            combined_x.data_ptr() or empty_address,
            combined_weights,
            staging_offset,
            num_staging_rows,
            launch.stream,
        )
        del staging  # whoever gets its memory next writes there behind this kernel
        event = launch.finish(inputs, known)
    ctx.end()
    if streams.is_quick and bias is None:
        remember_combine(ctx, config, default, known, plan, dtype, hidden, num_topk)
    return combined_x, combined_topk_weights, event


def _num_staging_rows(ctx: Context, handle: KnownHandle) -> int:
    num_peers = ctx.num_ranks - 1
    if 0 < handle.num_topk < num_peers:
        num_peers = handle.num_topk
    return handle.num_tokens * num_peers


def _staging(
    ctx: Context, launch: Launch, handle: KnownHandle, row_bytes: int
) -> tuple[object, int, int]:
    """Memory for all rows that may come: (its owner, offset in the heap,
    rows); offset 0 without room.
    """
    num_rows = _num_staging_rows(ctx, handle)
    taken = ctx.take(
        num_rows * row_bytes,
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
    return block, block.offset, num_rows
