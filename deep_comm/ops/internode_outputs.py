"""Memory for what a dispatch between nodes receives: in the receive region while there is
room, else anywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deep_comm.backends import Launch
from deep_comm.checks import Payload
from deep_comm.context import Context
from deep_comm.ops.outputs import RowTensors, output_layout, take


class TierOutputs(RowTensors):
    """Q received rows, F forwarded ones.

    Attributes:
        src_idx, src_meta: int32 [Q] and uint8 [Q, 8]; None of a cached dispatch, as
        send_rank_head: int32 [F, M].
    """

    src_idx: Tensor | None = None
    src_meta: Tensor | None = None
    send_rank_head: Tensor | None = None

    def __init__(self, num_rows: int, num_forward_rows: int = 0) -> None:
        self.num_rows = num_rows
        self.num_forward_rows = num_forward_rows

    @staticmethod
    def blank(reserved: TierReservation | None, anything: Tensor) -> TierOutputs:
        """Places without tensors, for a launch before the number of rows is known. In direct mode
        no kernel follows the addresses of its own outputs; that they are not 0 says what
        the call carries. None: no places."""
        out = TierOutputs(0)
        out.x = anything
        if reserved is not None:
            out = TierOutputs(reserved.num_rows, reserved.send_rank_head.shape[0])
            out.x = out.src_idx = out.src_meta = out.send_rank_head = reserved.send_rank_head
            out.output_offset = reserved.block.offset
            out.src_offset = reserved.src_block.offset
        return out


def allocate(
    ctx: Context,
    launch: Launch,
    payload: Payload,
    idx: Tensor | None,
    weights: Tensor | None,
    num_rows: int,
    num_forward_rows: int,
    makes_handle: bool,
    is_scratch: bool,
) -> TierOutputs:
    """``is_scratch``: rows that only kernels see."""
    out = TierOutputs(num_rows, num_forward_rows)
    blocks = _take_blocks(ctx, launch, payload, idx, num_rows, makes_handle, is_scratch)
    if blocks is not None:
        _lay_over(ctx, payload, idx, weights, blocks, out)
    else:
        out.make(launch, payload, idx, weights, num_rows)
        if makes_handle:
            out.src_idx = launch.empty((num_rows,), torch.int32)
            out.src_meta = launch.empty((num_rows, 8), torch.uint8)
    if makes_handle:
        ranks_per_node = ctx.topology.ranks_per_node
        out.send_rank_head = launch.empty((num_forward_rows, ranks_per_node), torch.int32)
    return out


class TierReservation:
    """Blocks of the receive region for as many rows as there is room for, and memory for what the
    handle keeps of forwarded ones.
    """

    __slots__ = ("block", "num_rows", "send_rank_head", "src_block")

    def __init__(self, block: Any, src_block: Any, num_rows: int, send_rank_head: Tensor) -> None:
        self.block = block
        self.src_block = src_block
        self.num_rows = num_rows
        self.send_rank_head = send_rank_head


def reserve_unknown(
    ctx: Context,
    launch: Launch,
    payload: Payload,
    idx: Tensor | None,
    num_forward_rows: int,
    is_scratch: bool,
) -> TierReservation | None:
    """For as many rows as may come, before anybody knows the number; None: there is no room."""
    for num_rows in ctx.expected.choices(payload.num_tokens):
        blocks = _take_blocks(ctx, launch, payload, idx, num_rows, True, is_scratch)
        if blocks is not None:
            shape = (num_forward_rows, ctx.topology.ranks_per_node)
            head = launch.empty(shape, torch.int32)
            return TierReservation(blocks[0], blocks[1], num_rows, head)
    return None


def outputs_in(
    ctx: Context,
    reserved: TierReservation,
    payload: Payload,
    idx: Tensor | None,
    weights: Tensor | None,
    num_rows: int,
    num_forward_rows: int,
) -> TierOutputs:
    """Tensors of ``num_rows`` rows, for which the blocks have been laid out."""
    out = TierOutputs(num_rows, num_forward_rows)
    num_bytes = _layout(payload, idx, num_rows)[-1]
    _, source_bytes = ctx.engine.tier_source_layout(num_rows=num_rows)
    if num_rows < reserved.num_rows:
        reserved.block.shrink(max(num_bytes, 1))
        reserved.src_block.shrink(max(source_bytes, 1))
    _lay_over(ctx, payload, idx, weights, (reserved.block, reserved.src_block), out)
    out.send_rank_head = reserved.send_rank_head[:num_forward_rows]
    return out


def _layout(payload: Payload, idx: Tensor | None, num_rows: int) -> tuple[int, int, int, int, int]:
    form = payload.form
    num_topk, idx_bytes = (0, 0) if idx is None else (idx.shape[1], idx.element_size())
    return output_layout(num_rows, form.row_bytes, form.scale_row_bytes, num_topk, idx_bytes)


def _take_blocks(
    ctx: Context,
    launch: Launch,
    payload: Payload,
    idx: Tensor | None,
    num_rows: int,
    makes_handle: bool,
    is_scratch: bool,
) -> tuple[Any, ...] | None:
    """Where neighbours write outputs in place, and for a handle; poisoned if outputs are and the
    rail reads nothing there any more."""
    if ctx.num_direct_bytes == 0:
        return None
    taken = []
    if makes_handle:  # first: it is small, lives longer, and must not part the region
        _, source_bytes = ctx.engine.tier_source_layout(num_rows=num_rows)
        taken.append(take(ctx, launch, max(source_bytes, 1)))
    taken.insert(0, take(ctx, launch, max(_layout(payload, idx, num_rows)[-1], 1), is_scratch))
    if None in taken:
        return None
    blocks = []
    for item in taken:
        assert item is not None
        block, events = item
        if events:
            launch.wait(events)
        # No kernel writes over what the rail may still read before its rail peers have come, who
        # have it by then; a fill would. What a graph's last combine stages, its next replay meets.
        end = block.offset + block.num_bytes
        is_read = block.offset < ctx.staged.stop and ctx.staged.start < end
        if launch.poisons and not is_read and not launch.is_captured:
            launch.adopt(ctx.heap.view(block.offset, block.num_bytes))
        blocks.append(block)
    return tuple(blocks)


def _lay_over(
    ctx: Context,
    payload: Payload,
    idx: Tensor | None,
    weights: Tensor | None,
    blocks: tuple[Any, ...],
    out: TierOutputs,
) -> None:
    """Tensors over these blocks; the second is the handle's."""
    heap, num_rows = ctx.heap, out.num_rows
    layout = _layout(payload, idx, num_rows)
    out.lay_over(heap, blocks[0], layout, payload.form, idx, weights, num_rows)
    if len(blocks) == 1:
        return
    sources = blocks[1]
    meta_offset, _ = ctx.engine.tier_source_layout(num_rows=num_rows)
    out.src_offset = sources.offset
    out.src_idx = heap.matrix(sources.offset, 1, num_rows, torch.int32, sources).view(num_rows)
    out.src_meta = heap.matrix(sources.offset + meta_offset, num_rows, 8, torch.uint8, sources)
