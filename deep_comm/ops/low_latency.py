"""Low-latency dispatch and combine: checks, outputs, phases and hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deep_comm import absent, checks, integers
from deep_comm.context import Context
from deep_comm.errors import ArgumentError, DeepCommError, HandleMismatch
from deep_comm.events import EventOverlap
from deep_comm.low_latency_handle import LowLatencyHandle
from deep_comm.low_latency_state import (
    FP4_SCALE_WORD,
    SCALE_BLOCK,
    LowLatencyShape,
    LowLatencyState,
    ShapeOptions,
)

Hook = Callable[[], None]
Payload = Tensor | tuple[Tensor, Tensor]
DispatchResult = tuple[Payload, Tensor, LowLatencyHandle, EventOverlap, Hook | None]
CombineResult = tuple[Tensor, EventOverlap, Hook | None]

_LOGFMT_PIECE = 16
_SUMS, _REDUCED, _SELECTIONS = range(3)
"""What travels back; CombineRows of the kernels."""


def check_num_max_tokens(value: Any) -> int:
    return integers.require("num_max_dispatch_tokens_per_rank", value, 1, 65535)


def check_hidden(name: str, hidden: int, *, multiple: int) -> None:
    if hidden == 0 or hidden % multiple != 0:
        raise ArgumentError(
            name,
            f"hidden {hidden}",
            f"must have a hidden size of a positive multiple of {multiple}",
        )


def aligned(name: str, x: Tensor) -> int:
    """The address of ``x``: a multiple of 16."""
    address = x.data_ptr()
    if address % 16 != 0:
        raise ArgumentError(name, f"address {address:#x}", "must start at a multiple of 16 bytes")
    return address


def _stats(name: str, value: Any, ctx: Context, size: int, dtype: torch.dtype) -> Tensor:
    return checks.tensor(name, value, ctx.device, shape=(size,), dtypes=(dtype,))


def shape_of(ctx: Context, state: LowLatencyState, options: ShapeOptions) -> LowLatencyShape:
    """The shape of calls with these options, which have not been checked yet."""
    (
        max_tokens, hidden, num_topk, num_experts,
        use_fp8, round_scale, use_ue8m0, compact, weights, use_nvfp4,
    ) = options  # fmt: skip
    max_tokens = check_num_max_tokens(max_tokens)
    multiple = FP4_SCALE_WORD if use_nvfp4 else SCALE_BLOCK if use_fp8 else 8
    check_hidden("x", hidden, multiple=multiple)
    num_experts = checks.num_experts(num_experts, ctx.num_max_experts)
    if use_ue8m0 and not (round_scale and use_fp8):
        raise ArgumentError("use_ue8m0", True, "needs use_fp8 and round_scale")
    if round_scale and not use_fp8:
        raise ArgumentError("round_scale", True, "needs use_fp8")
    return state.make_shape(
        (
            max_tokens, hidden, num_topk, num_experts, bool(use_fp8), bool(round_scale),
            bool(use_ue8m0), bool(compact), weights, bool(use_nvfp4),
        )
    )  # fmt: skip


def low_latency_dispatch(
    ctx: Context,
    state: LowLatencyState,
    x: Any,
    topk_idx: Any,
    num_max_tokens: Any,
    num_experts: Any,
    topk_weights: Any,
    cumulative_stats: Any,
    wait_stats: Any,
    use_fp8: bool,
    round_scale: bool,
    use_ue8m0: bool,
    compact: bool,
    report_num_tokens: bool,
    async_finish: bool,
    return_recv_hook: bool,
    use_nvfp4: bool = False,
    global_scale: Any = None,
) -> DispatchResult:
    ctx.begin_unordered()
    absent.require_low_latency(ctx)
    device = ctx.device
    x = checks.matrix("x", x, device, torch.bfloat16)
    num_tokens, hidden = x.shape
    idx, weights = checks.topk_pair(topk_idx, topk_weights, device, num_tokens)
    if idx is None:
        raise ArgumentError("topk_idx", None, "must be given")
    if use_nvfp4:
        use_fp8 = False
    options = (
        num_max_tokens, hidden, idx.shape[1], num_experts, use_fp8, round_scale, use_ue8m0, compact,
        weights is not None, use_nvfp4,
    )  # fmt: skip
    try:
        shape = state.shapes.get(options)
    except TypeError:  # something that cannot be a size
        shape = None
    if shape is None:
        shape = shape_of(ctx, state, options)
    if num_tokens > shape.max_tokens:
        raise ArgumentError(
            "x", f"{num_tokens} tokens", f"must have at most {shape.max_tokens} "
            "(num_max_dispatch_tokens_per_rank)",
        )  # fmt: skip
    x_address = aligned("x", x)
    if cumulative_stats is not None:
        cumulative_stats = _stats(
            "cumulative_local_expert_recv_stats", cumulative_stats, ctx, shape.num_local,
            torch.int32,
        )  # fmt: skip
    if wait_stats is not None:
        wait_stats = _stats(
            "dispatch_wait_recv_cost_stats", wait_stats, ctx, ctx.num_ranks, torch.int64
        )
    if global_scale is not None:
        _check_global_scale(global_scale, use_nvfp4, device)
    if async_finish and return_recv_hook:
        raise ArgumentError("return_recv_hook", True, "excludes async_finish")
    state.require_half("dispatch")

    with state.launch(async_finish) as launch:
        recv_x = launch.empty(shape.recv_shape, shape.recv_dtype)
        scales = None
        if shape.scales_shape is None:
            pass
        elif shape.is_nvfp4:
            scales = launch.empty(shape.scales_shape, shape.scales_dtype)
        else:
            scales = launch.empty_by_column(
                shape.scales_shape, shape.scales_strides, shape.scales_dtype
            )
        metadata = launch.empty(shape.metadata_shape, torch.int32)
        address = ctx.address
        call = (
            x_address or address(x),
            idx.data_ptr() or address(idx),
            idx.element_size(),
            0 if weights is None else weights.data_ptr() or address(weights),
            num_tokens,
            recv_x.data_ptr() or address(recv_x),
            0 if scales is None else scales.data_ptr() or address(scales),
            metadata.data_ptr(),
            0 if cumulative_stats is None else cumulative_stats.data_ptr(),
            0 if wait_stats is None else wait_stats.data_ptr(),
        )
        scale_address = 0 if global_scale is None else global_scale.data_ptr()
        hook = None
        if return_recv_hook:
            dispatch = shape.dispatch

            def run(send: bool, receive: bool, stream: int) -> None:
                is_reporting = report_num_tokens and receive
                dispatch(*call, send, receive, True, is_reporting, stream, scale_address)

            keep = (
                recv_x, metadata, scales, x, idx, weights,
                cumulative_stats, wait_stats, global_scale,
            )  # fmt: skip
            hook = state.hook("dispatch", launch, run, keep)
        else:
            shape.dispatch(
                *call, True, True, False, report_num_tokens, launch.stream, scale_address
            )
        event = launch.finish((x, idx, weights, cumulative_stats, wait_stats, global_scale))
        if hook is None:
            ctx.end()
    payload: Payload = recv_x if scales is None else (recv_x, scales)
    recv_count = metadata[: shape.num_local]  # the first part of the block
    return payload, recv_count, LowLatencyHandle(shape, metadata, num_tokens), event, hook


def _check_global_scale(value: Any, use_nvfp4: bool, device: torch.device) -> None:
    if not use_nvfp4:
        raise ArgumentError("x_global_scale", None, "needs use_nvfp4")
    if not (
        isinstance(value, Tensor)
        and value.dtype == torch.float32
        and value.numel() == 1
        and value.device == device
    ):
        given = type(value).__name__
        if isinstance(value, Tensor):
            given = f"{value.dtype} {list(value.shape)} on {value.device}"
        raise ArgumentError("x_global_scale", given, f"must be one float32 on {device}")


def wait_num_tokens(ctx: Context) -> int:
    """The most tokens that any rank had in the last dispatch with report_num_tokens."""
    most = ctx.engine.wait_low_latency_num_tokens()
    if most is None:
        ctx.check()
        raise DeepCommError("low_latency_dispatch failed and left no error record")
    return most


def low_latency_combine(
    ctx: Context,
    state: LowLatencyState,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    handle: Any,
    use_logfmt: bool,
    zero_copy: bool,
    one_rounding: bool,
    out: Any,
    wait_stats: Any,
    async_finish: bool,
    return_recv_hook: bool,
) -> CombineResult:
    ctx.begin_unordered()
    absent.require_low_latency(ctx)
    device = ctx.device
    handle = LowLatencyHandle.of(handle, ctx.rank, ctx.members)
    shape = state.shapes.get(handle.shape.options) or state.make_shape(handle.shape.options)
    num_tokens = handle.num_tokens
    if use_logfmt:
        check_logfmt(shape.hidden, zero_copy, one_rounding)
    x = checks.tensor(
        "x", x, device, shape=shape.rows_shape, dtypes=(torch.bfloat16,), contiguous=not zero_copy
    )
    if zero_copy:
        x = state.filled_combine_buffer(shape.rows_shape)
    x_address = aligned("x", x)
    idx, weights = checks.topk_pair(topk_idx, topk_weights, device, num_tokens)
    if idx is None:
        raise ArgumentError("topk_idx", None, "must be given")
    if idx.shape[1] != shape.num_topk:
        raise HandleMismatch(
            "handle", f"{shape.num_topk} selections a token", f"must be of this topk_idx "
            f"({idx.shape[1]} columns)",
        )  # fmt: skip
    rows = _REDUCED if shape.is_compact else _SUMS
    needs_weights = not (shape.is_compact or shape.weights_travel)
    if one_rounding:
        if shape.is_compact:
            raise ArgumentError("one_rounding", True, "needs rows that are not compact")
        state.num_blocks(
            shape.max_tokens, shape.hidden, shape.num_topk, shape.num_experts, one_rounding=True
        )
        rows, needs_weights = _SELECTIONS, True
    if needs_weights and weights is None:
        raise ArgumentError(
            "topk_weights", None, "must be given with one_rounding" if one_rounding
            else "must be given, here or to low_latency_dispatch",
        )  # fmt: skip
    if out is not None:
        out = checks.tensor(
            "out", out, device, shape=(num_tokens, shape.hidden), dtypes=(torch.bfloat16,)
        )
        aligned("out", out)
    if wait_stats is not None:
        wait_stats = _stats(
            "combine_wait_recv_cost_stats", wait_stats, ctx, ctx.num_ranks, torch.int64
        )
    if async_finish and return_recv_hook:
        raise ArgumentError("return_recv_hook", True, "excludes async_finish")
    state.require_half("combine")

    with state.launch(async_finish) as launch:
        combined_x = out
        if combined_x is None:
            combined_x = launch.empty((num_tokens, shape.hidden), torch.bfloat16)
        metadata, address = handle.metadata, ctx.address
        call = (
            x_address or address(x),
            metadata.data_ptr(),
            idx.data_ptr() or address(idx),
            idx.element_size(),
            address(weights) if needs_weights else 0,
            num_tokens,
            rows,
            use_logfmt,
            combined_x.data_ptr() or address(combined_x),
            0 if wait_stats is None else wait_stats.data_ptr(),
        )
        hook = None
        if return_recv_hook:
            combine, ticket = shape.combine, launch.empty((1,), torch.int32)

            def run(send: bool, receive: bool, stream: int) -> None:
                combine(*call, send, receive, ticket.data_ptr(), stream)

            keep = (combined_x, ticket, x, metadata, idx, weights, wait_stats)
            hook = state.hook("combine", launch, run, keep)
        else:
            shape.combine(*call, True, True, 0, launch.stream)
        event = launch.finish((x, idx, weights, out, wait_stats, metadata))
        if hook is None:
            ctx.end()
    return combined_x, event, hook


def check_logfmt(hidden: int, zero_copy: bool, one_rounding: bool) -> None:
    if zero_copy:
        raise ArgumentError("use_logfmt", True, "excludes zero_copy")
    if one_rounding:
        raise ArgumentError("use_logfmt", True, "excludes one_rounding")
    if hidden % _LOGFMT_PIECE != 0:
        raise ArgumentError(
            "use_logfmt",
            f"hidden {hidden}",
            f"needs a hidden size of a multiple of {_LOGFMT_PIECE}",
        )
