"""Low-latency dispatch and combine: checks, outputs, phases and hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deep_comm import checks
from deep_comm.context import Context
from deep_comm.errors import ArgumentError, DeepCommError, HandleMismatch, UnsupportedError
from deep_comm.events import EventOverlap
from deep_comm.low_latency_handle import LowLatencyHandle
from deep_comm.low_latency_state import LowLatencyState, Phases
from deep_comm.topology import num_local_experts

Hook = Callable[[], None]
Payload = Tensor | tuple[Tensor, Tensor]
DispatchResult = tuple[Payload, Tensor, LowLatencyHandle, EventOverlap, Hook | None]
CombineResult = tuple[Tensor, EventOverlap, Hook | None]

_SCALE_BLOCK = 128
_ROWS_PER_PACK = 4


@dataclass(frozen=True)
class DispatchOptions:
    use_fp8: bool
    round_scale: bool
    use_ue8m0: bool
    compact: bool
    phases: Phases

    def __post_init__(self) -> None:
        if self.use_ue8m0 and not (self.round_scale and self.use_fp8):
            raise ArgumentError("use_ue8m0", True, "needs use_fp8 and round_scale")
        if self.round_scale and not self.use_fp8:
            raise ArgumentError("round_scale", True, "needs use_fp8")


def check_num_max_tokens(value: Any) -> int:
    if not isinstance(value, int) or not 1 <= value < 1 << 16:
        raise ArgumentError("num_max_dispatch_tokens_per_rank", value, "must be 1 to 65535")
    return value


def check_rows(name: str, x: Any, device: torch.device, *, multiple: int) -> Tensor:
    """bfloat16 rows whose width is a positive multiple of ``multiple``."""
    x = checks.tensor(name, x, device, shape=(None, None), dtypes=(torch.bfloat16,))
    if x.shape[1] == 0 or x.shape[1] % multiple != 0:
        raise ArgumentError(
            name, f"hidden {x.shape[1]}", f"must have a hidden size of a positive multiple of {multiple}"
        )
    return aligned(name, x)


def aligned(name: str, x: Tensor) -> Tensor:
    if x.data_ptr() % 16 != 0:
        raise ArgumentError(name, f"address {x.data_ptr():#x}", "must start at a multiple of 16 bytes")
    return x


def _stats(name: str, value: Any, ctx: Context, size: int, dtype: torch.dtype) -> Tensor | None:
    if value is None:
        return None
    return checks.tensor(name, value, ctx.device, shape=(size,), dtypes=(dtype,))


def low_latency_dispatch(
    ctx: Context,
    state: LowLatencyState,
    x: Any,
    topk_idx: Any,
    num_max_tokens: Any,
    num_experts: Any,
    *,
    topk_weights: Any,
    cumulative_stats: Any,
    wait_stats: Any,
    report_num_tokens: bool,
    options: DispatchOptions,
) -> DispatchResult:
    ctx.begin()
    max_tokens = check_num_max_tokens(num_max_tokens)
    x = check_rows("x", x, ctx.device, multiple=_SCALE_BLOCK if options.use_fp8 else 8)
    num_tokens, hidden = x.shape
    if num_tokens > max_tokens:
        raise ArgumentError(
            "x", f"{num_tokens} tokens", f"must have at most {max_tokens} "
            "(num_max_dispatch_tokens_per_rank)",
        )  # fmt: skip
    idx, weights = checks.topk_pair(topk_idx, topk_weights, ctx.device, num_tokens)
    if idx is None:
        raise ArgumentError("topk_idx", None, "must be given")
    num_topk = idx.shape[1]
    experts = checks.num_experts(num_experts, ctx.num_max_experts)
    num_local = num_local_experts(ctx.rank, experts, ctx.num_ranks)
    cumulative_stats = _stats(
        "cumulative_local_expert_recv_stats", cumulative_stats, ctx, num_local, torch.int32
    )
    wait_stats = _stats("dispatch_wait_recv_cost_stats", wait_stats, ctx, ctx.num_ranks, torch.int64)
    num_blocks = state.num_blocks(max_tokens, hidden, num_topk, experts, options.use_fp8)
    state.require_half("dispatch")

    num_rows = ctx.num_ranks * max_tokens
    groups = () if options.compact else (num_local,)
    compact_rows = num_rows if options.compact else 0
    with state.launch(options.phases.async_finish) as launch:

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return launch.empty(shape, dtype)

        dtype = torch.float8_e4m3fn if options.use_fp8 else torch.bfloat16
        recv_x = launch.empty((*groups, num_rows, hidden), dtype)
        recv_count = ints(num_local)
        scales = None
        if options.use_fp8:
            num_scales = hidden // _SCALE_BLOCK
            if options.use_ue8m0:
                num_scales = -(-num_scales // _ROWS_PER_PACK)
            # By column, as grouped kernels want them.
            scales = launch.empty(
                (*groups, num_scales, num_rows),
                torch.int32 if options.use_ue8m0 else torch.float32,
            )
        token_shape = (ctx.num_ranks, max_tokens)
        recv_topk_weights = recv_weights = None
        if weights is not None and options.compact:
            recv_topk_weights = launch.empty((compact_rows, num_topk), torch.float32)
        elif weights is not None:
            recv_weights = launch.empty((*token_shape, num_topk), torch.float32)
        handle = LowLatencyHandle(
            src_info=ints(*groups, num_rows),
            layout_range=ints(*groups, ctx.num_ranks, dtype=torch.int64),
            num_max_dispatch_tokens_per_rank=max_tokens,
            hidden=hidden,
            num_experts=experts,
            num_tokens=num_tokens,
            num_topk=num_topk,
            is_compact=options.compact,
            rank=ctx.rank,
            members=ctx.members,
            recv_tokens=ints(ctx.num_ranks),
            places=ints(*token_shape) if options.compact else ints(*token_shape, num_topk),
            recv_weights=recv_weights,
            num_recv_tokens=ints(1) if options.compact else None,
            recv_topk_idx=ints(compact_rows, num_topk) if options.compact else None,
            recv_topk_weights=recv_topk_weights,
        )

        def run(send: bool, receive: bool, ticket: Tensor | None, stream: int) -> None:
            ctx.engine.low_latency_dispatch(
                x=ctx.address(x),
                topk_idx=ctx.address(idx),
                topk_idx_bytes=idx.element_size(),
                topk_weights=ctx.address(weights),
                num_tokens=num_tokens,
                num_max_tokens=max_tokens,
                hidden=hidden,
                num_topk=num_topk,
                num_experts=experts,
                num_blocks=num_blocks,
                format="fp8" if options.use_fp8 else "bfloat16",
                round_scale=options.round_scale,
                use_ue8m0=options.use_ue8m0,
                is_compact=options.compact,
                send=send,
                receive=receive,
                ticket=ctx.address(ticket),
                recv_x=ctx.address(recv_x),
                recv_scales=ctx.address(scales),
                recv_count=ctx.address(recv_count),
                src_info=ctx.address(handle.src_info),
                layout_range=ctx.address(handle.layout_range),
                num_recv=ctx.address(handle.num_recv_tokens),
                compact_idx=ctx.address(handle.recv_topk_idx),
                compact_weights=ctx.address(handle.recv_topk_weights),
                recv_tokens=ctx.address(handle.recv_tokens),
                places=ctx.address(handle.places),
                recv_weights=ctx.address(handle.recv_weights),
                cumulative_stats=ctx.address(cumulative_stats),
                wait_stats=ctx.address(wait_stats),
                is_reporting=report_num_tokens and receive,
                stream=stream,
            )

        inputs = [x, idx, weights, cumulative_stats, wait_stats]
        event, hook = state.run("dispatch", options.phases, launch, run, inputs)
    payload: Payload = recv_x if scales is None else (recv_x, scales.transpose(-1, -2))
    return payload, recv_count, handle, event, hook


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
    *,
    zero_copy: bool,
    one_rounding: bool,
    out: Any,
    wait_stats: Any,
    phases: Phases,
) -> CombineResult:
    ctx.begin()
    handle = LowLatencyHandle.of(handle, ctx.rank, ctx.members)
    x = checks.tensor(
        "x", x, ctx.device, shape=handle.rows_shape, dtypes=(torch.bfloat16,),
        contiguous=not zero_copy,
    )  # fmt: skip
    if zero_copy:
        x = state.filled_combine_buffer(handle.rows_shape)
    aligned("x", x)
    idx, weights = checks.topk_pair(topk_idx, topk_weights, ctx.device, handle.num_tokens)
    if idx is None:
        raise ArgumentError("topk_idx", None, "must be given")
    if idx.shape[1] != handle.num_topk:
        raise HandleMismatch(
            "handle", f"{handle.num_topk} selections a token", f"must be of this topk_idx "
            f"({idx.shape[1]} columns)",
        )  # fmt: skip
    if one_rounding and handle.is_compact:
        raise ArgumentError("one_rounding", True, "needs rows that are not compact")
    if one_rounding and weights is None:
        raise ArgumentError("topk_weights", None, "must be given with one_rounding")
    needs_weights = one_rounding or (not handle.is_compact and handle.recv_weights is None)
    if needs_weights and weights is None:
        raise ArgumentError("topk_weights", None, "must be given, here or to low_latency_dispatch")
    rows = "selections" if one_rounding else "reduced" if handle.is_compact else "sums"
    hidden, max_tokens = handle.hidden, handle.num_max_dispatch_tokens_per_rank
    if out is not None:
        out = aligned(
            "out",
            checks.tensor(
                "out", out, ctx.device, shape=(handle.num_tokens, hidden), dtypes=(torch.bfloat16,)
            ),
        )
    wait_stats = _stats("combine_wait_recv_cost_stats", wait_stats, ctx, ctx.num_ranks, torch.int64)
    num_blocks = state.num_blocks(
        max_tokens, hidden, handle.num_topk, handle.num_experts, one_rounding=one_rounding
    )
    state.require_half("combine")

    with state.launch(phases.async_finish) as launch:
        combined_x = out
        if combined_x is None:
            combined_x = launch.empty((handle.num_tokens, hidden), torch.bfloat16)

        def run(send: bool, receive: bool, ticket: Tensor | None, stream: int) -> None:
            ctx.engine.low_latency_combine(
                x=ctx.address(x),
                recv_tokens=ctx.address(handle.recv_tokens),
                places=ctx.address(handle.places),
                recv_weights=ctx.address(handle.recv_weights),
                topk_idx=ctx.address(idx),
                topk_idx_bytes=idx.element_size(),
                topk_weights=ctx.address(weights) if needs_weights else 0,
                num_tokens=handle.num_tokens,
                num_max_tokens=max_tokens,
                hidden=hidden,
                num_topk=handle.num_topk,
                num_experts=handle.num_experts,
                num_blocks=num_blocks,
                rows=rows,
                send=send,
                receive=receive,
                ticket=ctx.address(ticket),
                combined_x=ctx.address(combined_x),
                wait_stats=ctx.address(wait_stats),
                stream=stream,
            )

        inputs: Sequence[Tensor | None] = [
            x, idx, weights, out, wait_stats, handle.recv_tokens, handle.places, handle.recv_weights
        ]  # fmt: skip
        event, hook = state.run("combine", phases, launch, run, inputs)
    return combined_x, event, hook


def require_no_logfmt(use_logfmt: bool, zero_copy: bool) -> None:
    if use_logfmt and zero_copy:
        raise ArgumentError("use_logfmt", True, "excludes zero_copy")
    if use_logfmt:
        raise UnsupportedError("use_logfmt is not in this version: rows travel as bfloat16")

