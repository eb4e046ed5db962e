"""Memory for what a dispatch receives: in the receive region while there is room, else anywhere."""

from __future__ import annotations

import torch
from torch import Tensor

from deep_comm.backends import Launch
from deep_comm.checks import Payload
from deep_comm.config import RingPlan
from deep_comm.context import Context
from deep_comm.handle import KnownHandle

RecvX = Tensor | tuple[Tensor, Tensor]
_LINE_BYTES = 128  # parts of a block that the engine knows by their offset start at multiples of it


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // _LINE_BYTES) * _LINE_BYTES


class Outputs:
    """Outputs of the dispatch kernel, N rows: tensors for the caller, addresses for the engine.

    Attributes:
        x, scales: [N, H] and [N, S] or None.
        topk_idx, topk_weights: [N, K] or None.
        src_idx: int32 [N]; None where no handle will hold it.
        channel_prefix_matrix: int32 [R, C], recv_channel_prefix_matrix; None likewise.
        rest: memory of what the kernel writes and nobody gets to see, or None.
        output_offset, src_offset: in the heap; 0: not in the receive region.
    """

    __slots__ = (
        "x",
        "scales",
        "topk_idx",
        "topk_weights",
        "src_idx",
        "channel_prefix_matrix",
        "x_address",
        "scales_address",
        "topk_idx_address",
        "topk_weights_address",
        "src_idx_address",
        "channel_prefix_matrix_address",
        "rest",
        "output_offset",
        "src_offset",
    )

    def __init__(self) -> None:
        self.scales: Tensor | None = None
        self.topk_idx: Tensor | None = None
        self.topk_weights: Tensor | None = None
        self.src_idx: Tensor | None = None
        self.channel_prefix_matrix: Tensor | None = None
        self.rest: Tensor | None = None
        self.scales_address = self.topk_idx_address = self.topk_weights_address = 0
        self.output_offset = self.src_offset = 0
        self.x: Tensor
        self.x_address: int
        self.src_idx_address: int
        self.channel_prefix_matrix_address: int

    @property
    def payload(self) -> RecvX:
        return self.x if self.scales is None else (self.x, self.scales)


def allocate(
    ctx: Context,
    launch: Launch,
    plan: RingPlan,
    payload: Payload,
    idx: Tensor | None,
    weights: Tensor | None,
    num_rows: int,
) -> Outputs:
    """For a dispatch that makes a handle."""
    out = _in_region(ctx, launch, payload, idx, weights, num_rows)
    if out is None:
        out = _anywhere(ctx, launch, payload, idx, weights, num_rows)
    matrix = launch.empty((ctx.num_ranks, plan.num_channels), torch.int32)
    out.channel_prefix_matrix = matrix
    out.channel_prefix_matrix_address = ctx.address(matrix)
    return out


def _in_region(
    ctx: Context,
    launch: Launch,
    payload: Payload,
    idx: Tensor | None,
    weights: Tensor | None,
    num_rows: int,
) -> Outputs | None:
    """Tensors over the receive region, where peers can write the rows in place; None without room."""
    num_topk = 0 if idx is None else idx.shape[1]
    layout = ctx.engine.output_layout(
        num_rows=num_rows,
        row_bytes=payload.row_bytes,
        scale_row_bytes=payload.scale_row_bytes,
        num_topk=num_topk,
        topk_idx_bytes=0 if idx is None else idx.element_size(),
    )
    output = ctx.region.allocate(layout.num_bytes, launch.ordered_after)
    # The handle keeps the source tokens, and must not keep the payload's memory with them.
    sources = ctx.region.allocate(4 * num_rows, launch.ordered_after)
    if output is None or sources is None:
        return None
    launch.wait(output[1])
    launch.wait(sources[1])
    block, src_block = output[0], sources[0]
    base, offset = ctx.heap.base, block.offset

    def part(part_offset: int, columns: int, dtype: torch.dtype) -> Tensor:
        return launch.adopt(
            ctx.heap.matrix(offset + part_offset, num_rows, columns, dtype, block)
        )

    out = Outputs()
    out.output_offset, out.src_offset = offset, src_block.offset
    out.x = part(layout.x, payload.hidden, payload.x.dtype)
    out.x_address = base + offset + layout.x
    if payload.scales is not None:
        out.scales = part(layout.scales, payload.num_scales, payload.scales.dtype)
        out.scales_address = base + offset + layout.scales
    if idx is not None:
        out.topk_idx = part(layout.topk_idx, num_topk, idx.dtype)
        out.topk_idx_address = base + offset + layout.topk_idx
    if weights is not None:
        out.topk_weights = part(layout.topk_weights, num_topk, weights.dtype)
        out.topk_weights_address = base + offset + layout.topk_weights
    src_idx = ctx.heap.matrix(src_block.offset, 1, num_rows, torch.int32, src_block)
    out.src_idx = launch.adopt(src_idx.view(num_rows))
    out.src_idx_address = base + src_block.offset
    return out


def _anywhere(
    ctx: Context,
    launch: Launch,
    payload: Payload,
    idx: Tensor | None,
    weights: Tensor | None,
    num_rows: int,
) -> Outputs:
    """Ordinary tensors: the rows will come through the rings."""
    out = Outputs()
    out.x = launch.empty((num_rows, payload.hidden), payload.x.dtype)
    out.x_address = ctx.address(out.x)
    if payload.scales is not None:
        out.scales = launch.empty((num_rows, payload.num_scales), payload.scales.dtype)
        out.scales_address = ctx.address(out.scales)
    if idx is not None:
        out.topk_idx = launch.empty((num_rows, idx.shape[1]), idx.dtype)
        out.topk_idx_address = ctx.address(out.topk_idx)
    if weights is not None:
        out.topk_weights = launch.empty((num_rows, weights.shape[1]), weights.dtype)
        out.topk_weights_address = ctx.address(out.topk_weights)
    out.src_idx = launch.empty((num_rows,), torch.int32)
    out.src_idx_address = ctx.address(out.src_idx)
    return out


def allocate_cached(
    ctx: Context, launch: Launch, payload: Payload, handle: KnownHandle
) -> Outputs:
    """For a dispatch that repeats ``handle``: one allocation.

    The kernel writes the source tokens and the prefix matrix again; nobody gets to see them, so they
    share the payload's memory.
    """
    num_rows = handle.num_recv_rows
    x_offset, scales_offset, src_offset, matrix_offset, num_bytes = _cached_layout(
        ctx, payload, handle
    )
    taken = ctx.region.allocate(num_bytes, launch.ordered_after)
    out = Outputs()
    if taken is None:
        out.x = launch.empty((num_rows, payload.hidden), payload.x.dtype)
        out.x_address = ctx.address(out.x)
        if payload.scales is not None:
            out.scales = launch.empty((num_rows, payload.num_scales), payload.scales.dtype)
            out.scales_address = ctx.address(out.scales)
        rest = launch.empty((num_bytes - src_offset,), torch.uint8)
        out.rest = rest
        out.src_idx_address = ctx.address(rest)
        out.channel_prefix_matrix_address = out.src_idx_address + matrix_offset - src_offset
        return out
    block, events = taken
    if events:
        launch.wait(events)
    heap, offset = ctx.heap, block.offset
    address = heap.base + offset
    out.output_offset = offset
    out.src_offset = offset + src_offset
    out.x = launch.adopt(
        heap.matrix(offset + x_offset, num_rows, payload.hidden, payload.x.dtype, block)
    )
    out.x_address = address + x_offset
    if payload.scales is not None:
        out.scales = launch.adopt(
            heap.matrix(
                offset + scales_offset, num_rows, payload.num_scales, payload.scales.dtype, block
            )
        )
        out.scales_address = address + scales_offset
    out.src_idx_address = address + src_offset
    out.channel_prefix_matrix_address = address + matrix_offset
    return out


def _cached_layout(
    ctx: Context, payload: Payload, handle: KnownHandle
) -> tuple[int, int, int, int, int]:
    """Offsets of x, scales, source tokens and prefix matrix, and bytes of all."""
    key = (payload.row_bytes, payload.scale_row_bytes)
    known = handle.output_layouts.get(key)
    if known is None:
        layout = ctx.engine.output_layout(
            num_rows=handle.num_recv_rows,
            row_bytes=payload.row_bytes,
            scale_row_bytes=payload.scale_row_bytes,
            num_topk=0,
            topk_idx_bytes=0,
        )
        src = _lines(layout.num_bytes)
        matrix = src + _lines(4 * handle.num_recv_rows)
        num_bytes = matrix + 4 * ctx.num_ranks * handle.num_channels
        known = handle.output_layouts[key] = (layout.x, layout.scales, src, matrix, num_bytes)
    return known
