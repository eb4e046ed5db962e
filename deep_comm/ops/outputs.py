"""Memory for what a dispatch receives: in the receive region while there is room, else anywhere."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deep_comm import _core
from deep_comm.backends import Heap, Launch
from deep_comm.checks import Payload, PayloadForm
from deep_comm.context import Context
from deep_comm.handle import KnownHandle
from deep_comm.handle_parts import Memory, Slab, SlabLayout, SourceRows

RecvX = Tensor | tuple[Tensor, Tensor]


class RowTensors:
    """What dispatch brings, N rows, of one tier or two.

    Attributes:
        x, scales: [N, H] and [N, S] or None.
        topk_idx, topk_weights: [N, K] or None; expanded: [M, 1], one a row.
        output_offset, src_offset: in the heap; 0: not in the receive region.
    """

    # Defaults of the class: a constructor, and that of a base, would be frames in every call.
    x: Tensor
    scales: Tensor | None = None
    topk_idx: Tensor | None = None
    topk_weights: Tensor | None = None
    output_offset = src_offset = 0

    def lay_over(
        self,
        heap: Heap,
        block: Any,
        layout: tuple[int, int, int, int, int],
        form: PayloadForm,
        idx: Tensor | None,
        weights: Tensor | None,
        num_rows: int,
    ) -> None:
        """Tensors over a block of the receive region. ``layout``: see output_layout."""
        x, scales, topk_idx, topk_weights, _ = layout
        offset: int = block.offset
        self.output_offset = offset
        self.x = heap.matrix(offset + x, num_rows, form.hidden, form.dtype, block)
        if form.scale_dtype is not None:
            self.scales = heap.matrix(
                offset + scales, num_rows, form.num_scales, form.scale_dtype, block
            )
        if idx is not None:
            self.topk_idx = heap.matrix(offset + topk_idx, num_rows, idx.shape[1], idx.dtype, block)
        if weights is not None:
            self.topk_weights = heap.matrix(
                offset + topk_weights, num_rows, weights.shape[1], weights.dtype, block
            )

    def make(
        self,
        launch: Launch,
        payload: Payload,
        idx: Tensor | None,
        weights: Tensor | None,
        num_rows: int,
    ) -> None:
        """Ordinary tensors: peers cannot write there."""
        self.x = launch.empty((num_rows, payload.hidden), payload.x.dtype)
        if payload.scales is not None:
            self.scales = launch.empty((num_rows, payload.num_scales), payload.scales.dtype)
        if idx is not None:
            self.topk_idx = launch.empty((num_rows, idx.shape[1]), idx.dtype)
        if weights is not None:
            self.topk_weights = launch.empty((num_rows, weights.shape[1]), weights.dtype)

    @property
    def payload(self) -> RecvX:
        return self.x if self.scales is None else (self.x, self.scales)


class Outputs(RowTensors):
    """Outputs of the dispatch kernel: tensors for the caller, addresses for the engine.

    Attributes:
        src_idx: int32 [N]; None where no handle will hold it, or where it can be had from src_rows.
        recv_rows: int32 [N, K] of an expanded dispatch; None likewise.
    """

    x_address: int
    scales_address = topk_idx_address = topk_weights_address = 0
    src_idx: Tensor | None = None
    src_rows: SourceRows | None = None
    recv_rows: Tensor | None = None
    src_idx_address = recv_rows_address = 0

    @staticmethod
    def blank(ctx: Context, reserved: Reservation) -> Outputs:
        """Places without tensors, for a launch before the number of rows is known. In direct mode
        no kernel follows these addresses of its own outputs; that they are not 0 says
        what the call carries."""
        out = Outputs()
        out.output_offset, out.src_offset = reserved.block.offset, reserved.src_offset
        address = ctx.heap.base + out.output_offset
        out.x_address = out.scales_address = address
        out.topk_idx_address = out.topk_weights_address = address
        out.src_idx_address = out.recv_rows_address = ctx.heap.base + out.src_offset
        return out


class Reservation:
    """Blocks of the receive region for a dispatch's outputs, of as many
    rows as there is room for.
    """

    __slots__ = ("block", "src_block", "memory", "slab_bytes", "src_offset", "num_rows")

    def __init__(
        self, heap: Heap, block: Any, src_block: Any, slab_bytes: int, num_rows: int
    ) -> None:
        self.block = block
        # What the handle keeps, without the payload: the slab of notify, then the source tokens.
        self.src_block = src_block
        self.memory = Memory(heap.place, heap.memory(), src_block)
        self.slab_bytes = slab_bytes
        self.src_offset: int = src_block.offset + slab_bytes
        self.num_rows = num_rows

    def slab(self, ctx: Context, layout: SlabLayout) -> Slab:
        return Slab(layout, ctx.heap.base + self.src_block.offset, self.memory)

    def keep_slab(self) -> None:
        """Give back the rest of its block, of which nothing has been written."""
        self.src_block.shrink(self.slab_bytes)


def take(
    ctx: Context, launch: Launch, num_bytes: int, is_scratch: bool = False
) -> tuple[Any, Sequence[Any]] | None:
    """A block of the receive region and the events of its last uses, or None."""
    taken: tuple[Any, Sequence[Any]] | None = ctx.take(
        num_bytes, launch.caller_stream, launch.is_behind_caller, launch.is_captured, is_scratch
    )
    return taken


def _source_bytes(ctx: Context, num_rows: int, places: int) -> int:
    """Of the handle's block: source tokens, and with expanded outputs ``places`` of each."""
    if places == 0:
        return 4 * num_rows
    return ctx.engine.source_layout(num_rows=num_rows, num_topk=places).num_bytes


def reserve(
    ctx: Context,
    launch: Launch,
    payload: Payload,
    idx: Tensor | None,
    num_rows: int,
    slab_bytes: int,
    places: int = 0,
) -> Reservation | None:
    """Room for ``num_rows`` rows and a slab, poisoned if outputs are; None if the region has none.
    ``places``: of a received token, with expanded outputs.
    """
    num_bytes = _layout(payload, idx, num_rows)[-1]
    # Only kernels use what the handle keeps, unless tensors are made of it, as expanded outputs do.
    sources = take(ctx, launch, slab_bytes + _source_bytes(ctx, num_rows, places), True)
    output = take(ctx, launch, num_bytes)
    if output is None or sources is None:
        return None
    for block, events in (output, sources):
        if events:
            launch.wait(events)
        if launch.poisons:
            launch.adopt(ctx.heap.view(block.offset, block.num_bytes))
    return Reservation(ctx.heap, output[0], sources[0], slab_bytes, num_rows)


def reserve_most(
    ctx: Context,
    launch: Launch,
    payload: Payload,
    idx: Tensor | None,
    choices: Sequence[int],
    slab_bytes: int,
    places: int = 0,
) -> Reservation | None:
    """Before anybody knows how many rows come: room for the first of ``choices`` that there is room
    for. What is too much goes back at once; if it was too little, nothing is lost against none at
    all: the rows move when the host knows their number.
    """
    for num_rows in choices:
        reserved = reserve(ctx, launch, payload, idx, num_rows, slab_bytes, places)
        if reserved is not None:
            return reserved
    return None


def allocate(
    ctx: Context,
    launch: Launch,
    payload: Payload,
    idx: Tensor | None,
    weights: Tensor | None,
    num_rows: int,
    places: int = 0,
) -> Outputs:
    """For a dispatch that makes a handle and has its slab."""
    reserved = reserve(ctx, launch, payload, idx, num_rows, 0, places)
    if reserved is None:
        return outputs_anywhere(ctx, launch, payload, idx, weights, num_rows, places)
    return outputs_in(ctx, reserved, payload, idx, weights, num_rows, places)


def outputs_in(
    ctx: Context,
    reserved: Reservation,
    payload: Payload,
    idx: Tensor | None,
    weights: Tensor | None,
    num_rows: int,
    places: int = 0,
) -> Outputs:
    """Tensors of ``num_rows`` rows over the region, where peers write them in place."""
    layout = x, scales, topk_idx, topk_weights, num_bytes = _layout(payload, idx, num_rows)
    block = reserved.block
    if num_rows < reserved.num_rows:
        block.shrink(num_bytes)
        reserved.src_block.shrink(reserved.slab_bytes + _source_bytes(ctx, num_rows, places))
    heap = ctx.heap
    out = Outputs()
    out.lay_over(heap, block, layout, payload.form, idx, weights, num_rows)
    out.src_offset = reserved.src_offset
    address = heap.base + out.output_offset
    out.x_address = address + x
    if out.scales is not None:
        out.scales_address = address + scales
    if idx is not None:
        out.topk_idx_address = address + topk_idx
    if weights is not None:
        out.topk_weights_address = address + topk_weights
    begin = reserved.src_offset
    out.src_idx_address = heap.base + begin
    out.src_rows = SourceRows(out.src_idx_address, num_rows, reserved.memory)
    if places > 0:
        out.src_idx = out.src_rows.tensor()
        begin += ctx.engine.source_layout(num_rows=num_rows, num_topk=places).recv_rows
        out.recv_rows = heap.matrix(begin, num_rows, places, torch.int32, reserved.src_block)
        out.recv_rows_address = heap.base + begin
    return out


def _layout(payload: Payload, idx: Tensor | None, num_rows: int) -> tuple[int, int, int, int, int]:
    form = payload.form
    num_topk, idx_bytes = (0, 0) if idx is None else (idx.shape[1], idx.element_size())
    return output_layout(num_rows, form.row_bytes, form.scale_row_bytes, num_topk, idx_bytes)


@functools.lru_cache(maxsize=4096)
def output_layout(
    num_rows: int, row_bytes: int, scale_row_bytes: int, num_topk: int, topk_idx_bytes: int
) -> tuple[int, int, int, int, int]:
    """Offsets of x, scales, indices and weights, and bytes of all."""
    layout = _core.Engine.output_layout(
        num_rows=num_rows,
        row_bytes=row_bytes,
        scale_row_bytes=scale_row_bytes,
        num_topk=num_topk,
        topk_idx_bytes=topk_idx_bytes,
    )
    return layout.x, layout.scales, layout.topk_idx, layout.topk_weights, layout.num_bytes


def outputs_anywhere(
    ctx: Context,
    launch: Launch,
    payload: Payload,
    idx: Tensor | None,
    weights: Tensor | None,
    num_rows: int,
    places: int,
) -> Outputs:
    """Ordinary tensors: the rows will come through the rings."""
    out = Outputs()
    out.make(launch, payload, idx, weights, num_rows)
    out.x_address = ctx.address(out.x)
    out.scales_address = ctx.address(out.scales)
    out.topk_idx_address = ctx.address(out.topk_idx)
    out.topk_weights_address = ctx.address(out.topk_weights)
    out.src_idx = launch.empty((num_rows,), torch.int32)
    out.src_idx_address = ctx.address(out.src_idx)
    if places > 0:
        out.recv_rows = launch.empty((num_rows, places), torch.int32)
        out.recv_rows_address = ctx.address(out.recv_rows)
    return out


def allocate_cached(
    ctx: Context, launch: Launch, form: PayloadForm, handle: KnownHandle
) -> Outputs:
    """For a dispatch that repeats ``handle``, which already knows sources and prefix matrix."""
    num_rows = handle.num_output_rows
    layout = handle.output_layouts.get(form)
    if layout is None:
        layout = _cached_layout(form, handle)
    x_offset, scales_offset, num_bytes = layout
    taken = ctx.take(
        num_bytes, launch.caller_stream, launch.is_behind_caller, launch.is_captured, False
    )
    out = Outputs()
    if taken is None:
        out.x = launch.empty((num_rows, form.hidden), form.dtype)
        out.x_address = ctx.address(out.x)
        if form.scale_dtype is not None:
            out.scales = launch.empty((num_rows, form.num_scales), form.scale_dtype)
            out.scales_address = ctx.address(out.scales)
        return out
    block, events = taken
    if events:
        launch.wait(events)
    heap, offset = ctx.heap, block.offset
    address = heap.base + offset
    out.output_offset = offset
    out.x = heap.matrix(offset + x_offset, num_rows, form.hidden, form.dtype, block)
    out.x_address = address + x_offset
    if form.scale_dtype is not None:
        scales = heap.matrix(
            offset + scales_offset, num_rows, form.num_scales, form.scale_dtype, block
        )
        out.scales = scales
        out.scales_address = address + scales_offset
    if launch.poisons:
        launch.adopt(out.x)
        if out.scales is not None:
            launch.adopt(out.scales)
    return out


def _cached_layout(form: PayloadForm, handle: KnownHandle) -> tuple[int, int, int]:
    """Offsets of x and scales, and bytes of both."""
    x, scales, _, _, num_bytes = output_layout(
        handle.num_output_rows, form.row_bytes, form.scale_row_bytes, 0, 0
    )
    known = handle.output_layouts[form] = (x, scales, num_bytes)
    return known
