"""Which way a dispatch treats scales: what quantises its rows, and how received scales lie."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deep_comm import checks
from deep_comm.backends import Launch
from deep_comm.checks import Payload, QuantisedPayload
from deep_comm.config import RingPlan
from deep_comm.context import Context
from deep_comm.errors import ArgumentError
from deep_comm.ops.internode_plan import TwoTierPlan
from deep_comm.ops.outputs import RowTensors

_TMA_ROWS = 4  # 16 bytes: what a column must start at a multiple of


@dataclass(frozen=True)
class ScaleOptions:
    """As the caller gave them; see Buffer.dispatch."""

    use_fp8: bool = False
    round_scale: bool = False
    use_ue8m0: bool = False
    column_major: bool = False

    def __post_init__(self) -> None:
        if self.round_scale and not self.use_fp8:
            raise ArgumentError("round_scale", True, "needs use_fp8")
        if self.use_ue8m0 and not (self.round_scale and self.use_fp8):
            raise ArgumentError("use_ue8m0", True, "needs use_fp8 and round_scale")

    @property
    def cast(self) -> int:
        """For calls in one native step: how rows are cast, 0: not at all; -1: no such call."""
        if self.column_major:
            return -1
        return self.use_fp8 | self.round_scale << 1 | self.use_ue8m0 << 2

    def payload(self, x: Any, device: torch.device) -> Payload:
        if self.use_fp8:
            payload: Payload = checks.quantised_payload(x, device, self.round_scale, self.use_ue8m0)
        else:
            payload = checks.payload(x, device)
        if self.column_major and payload.scale_bytes != 4:
            rule = "needs scales of 4 bytes"
            raise ArgumentError("column_major_scales", True, rule)
        return payload


PLAIN = ScaleOptions()


@functools.lru_cache(maxsize=64)
def options_of(
    use_fp8: bool, round_scale: bool, use_ue8m0: bool, column_major: bool
) -> ScaleOptions:
    """As the caller gives them; raises ArgumentError."""
    if not (use_fp8 or round_scale or use_ue8m0 or column_major):
        return PLAIN
    return ScaleOptions(bool(use_fp8), bool(round_scale), bool(use_ue8m0), bool(column_major))


def allocate_source(ctx: Context, launch: Launch, payload: Payload) -> int:
    """The address of what is to be quantised, or 0; allocates the scratch of that."""
    if not isinstance(payload, QuantisedPayload):
        return 0
    payload.allocate(launch)
    return ctx.address(payload.source)


def inputs_of(payload: Payload) -> tuple[Tensor | None, ...]:
    """The caller's tensors, which must outlive the operation."""
    source = payload.source if isinstance(payload, QuantisedPayload) else None
    return (payload.x, payload.scales, source)


def turn_scales(
    ctx: Context, launch: Launch, plan: RingPlan | TwoTierPlan, out: RowTensors
) -> None:
    """Behind a dispatch: received scales column by column."""
    rows = out.scales
    assert rows is not None
    num_rows, num_columns = rows.shape
    column_stride = max(1, -(-num_rows // _TMA_ROWS)) * _TMA_ROWS
    columns = launch.empty((num_columns, column_stride), rows.dtype)
    ctx.engine.transpose_scales(
        src=ctx.address(rows),
        dst=ctx.address(columns),
        num_rows=num_rows,
        num_columns=num_columns,
        column_stride=column_stride,
        num_channels=plan.num_channels,
        stream=launch.stream,
    )
    out.scales = columns[:, :num_rows].t()
