"""What calls of one form have in common: rings, and the engine's part, worked out once a form.

A call has a few microseconds of the host's time. The keys name all that plans depend on; a Buffer's
memory does not change. The engine's functions take plain numbers, in the order of
csrc/bind/bind_normal.hpp.
"""

from __future__ import annotations

from collections.abc import Callable

from deep_comm.checks import PayloadForm
from deep_comm.config import Config, RingPlan
from deep_comm.context import Context
from deep_comm.tuning import DefaultConfig

Launcher = Callable[..., None]

FILL_TAIL, ZERO_TAIL, FOLLOWS_NOTIFY, IS_SPECULATIVE = 1, 2, 4, 8
"""Flags of a dispatch."""

_MAX_CALLS = 512
"""Forms that a Buffer remembers; a program uses a handful."""


class DispatchPlan:
    """``launch``: num_experts, is_token_in_rank, send_head, rank_prefix_matrix,
    channel_prefix_matrix (a handle's ``routing``), x, num_tokens, x_scales, scale_token_stride,
    scale_column_stride, topk_idx, topk_weights, recv_x, recv_x_scales, recv_topk_idx,
    recv_topk_weights, recv_src_idx, recv_channel_prefix_matrix, num_recv_rows, output_offset,
    src_offset, flags, send_row, send_rows, num_expanded, recv_rows, source, stream.

    ``notify``, None where the routing is known: topk_idx, num_tokens_per_expert,
    is_token_in_rank, num_tokens, has_weights, output_offset, src_offset, num_output_rows, is_exact,
    rank_prefix_matrix, channel_prefix_matrix, send_head, num_recv_tokens_per_expert, recv_counts,
    first_rows, expert_offsets, expert_counts, num_expanded, stream."""

    __slots__ = ("rings", "launch", "notify")

    def __init__(self, rings: RingPlan, launch: Launcher, notify: Launcher | None) -> None:
        self.rings = rings
        self.launch = launch
        self.notify = notify


class CombinePlan:
    """``launch``: num_recv_rows, rank_prefix_matrix, channel_prefix_matrix,
    recv_channel_prefix_matrix, send_head (a handle's ``way_back``), x, topk_weights, bias_0,
    bias_1, num_tokens, combined_x, combined_topk_weights, staging_offset, num_staging_rows, stream.
    """

    __slots__ = ("rings", "launch", "staging_row_bytes")

    def __init__(self, rings: RingPlan, launch: Launcher, staging_row_bytes: int) -> None:
        self.rings = rings
        self.launch = launch
        self.staging_row_bytes = staging_row_bytes


def _remember(ctx: Context, key: tuple[object, ...], plan: object) -> None:
    if len(ctx.calls) >= _MAX_CALLS:
        ctx.calls.clear()
    ctx.calls[key] = plan


def plan_cached(
    ctx: Context,
    key: tuple[object, ...],
    config: Config | None,
    default: Config | DefaultConfig | None,
    form: PayloadForm,
    num_channels: int,
    is_expanded: bool,
) -> DispatchPlan:
    """Of a dispatch whose routing is known. Raises BufferTooSmall or
    ArgumentError. Remembered by ``key``.
    """
    rings = ctx.plan(
        config, default, form.row_bytes, form.scale_row_bytes, 0, num_channels, is_expanded
    )
    launch = _plan_dispatch(ctx, rings, form, 0, 0, False, is_expanded)
    plan = DispatchPlan(rings, launch, None)
    _remember(ctx, key, plan)
    return plan


def plan_new(
    ctx: Context,
    key: tuple[object, ...],
    config: Config | None,
    default: Config | DefaultConfig | None,
    form: PayloadForm,
    num_topk: int,
    topk_idx_bytes: int,
    num_experts: int,
    expert_alignment: int,
    counts_choices: bool,
    is_expanded: bool,
) -> DispatchPlan:
    """Of a dispatch with new routing; the same."""
    rings = ctx.plan(
        config, default, form.row_bytes, form.scale_row_bytes, num_topk, None, is_expanded
    )
    notify = ctx.engine.plan_notify(
        num_channels=rings.num_channels,
        num_send_tokens=rings.num_send_tokens,
        num_slots=rings.num_slots,
        row_bytes=form.row_bytes,
        scale_row_bytes=form.scale_row_bytes,
        num_topk=num_topk,
        topk_idx_bytes=topk_idx_bytes,
        num_experts=num_experts,
        expert_alignment=expert_alignment,
        counts_choices=counts_choices,
        is_expanded=is_expanded,
    )
    launch = _plan_dispatch(ctx, rings, form, num_topk, topk_idx_bytes, True, is_expanded)
    plan = DispatchPlan(rings, launch, notify)
    _remember(ctx, key, plan)
    return plan


def _plan_dispatch(
    ctx: Context,
    rings: RingPlan,
    form: PayloadForm,
    num_topk: int,
    topk_idx_bytes: int,
    makes_handle: bool,
    is_expanded: bool,
) -> Launcher:
    launch: Launcher = ctx.engine.plan_dispatch(
        num_channels=rings.num_channels,
        num_send_tokens=rings.num_send_tokens,
        num_slots=rings.num_slots,
        row_bytes=form.row_bytes,
        scale_bytes=form.scale_bytes,
        num_scales=form.num_scales,
        num_topk=num_topk,
        topk_idx_bytes=topk_idx_bytes,
        makes_handle=makes_handle,
        is_expanded=is_expanded,
        is_quantised=form.quantises,
        round_scale=form.round_scale,
        use_ue8m0=form.use_ue8m0,
    )
    return launch


def plan_combine(
    ctx: Context,
    key: tuple[object, ...],
    config: Config | None,
    default: Config | DefaultConfig | None,
    dtype: str,
    row_bytes: int,
    num_topk: int,
    num_channels: int,
    has_default_sms: bool,
) -> CombinePlan:
    """Raises BufferTooSmall or ArgumentError. Remembered by ``key``. ``has_default_sms``: of the
    handle."""
    rings = ctx.plan(config, default, row_bytes, 0, num_topk, num_channels)
    few_rows = few_rows_sms = 0
    if has_default_sms and config is None and isinstance(default, DefaultConfig):
        few_rows, few_rows_sms = default.of_few_rows(row_bytes, num_channels)
    launch = ctx.engine.plan_combine(
        num_channels=rings.num_channels,
        num_send_tokens=rings.num_send_tokens,
        num_slots=rings.num_slots,
        dtype=dtype,
        row_bytes=row_bytes,
        num_topk=num_topk,
        few_rows=few_rows,
        few_rows_sms=few_rows_sms,
    )
    staging = ctx.engine.staging_row_bytes(row_bytes=row_bytes, num_topk=num_topk)
    plan = CombinePlan(rings, launch, staging)
    _remember(ctx, key, plan)
    return plan
