"""Memory for what a dispatch between nodes receives: in the receive region while there is
room, else anywhere.
"""

from __future__ import annotations

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
    if not _take_region(ctx, launch, payload, idx, weights, makes_handle, is_scratch, out):
        out.make(launch, payload, idx, weights, num_rows)
        if makes_handle:
            out.src_idx = launch.empty((num_rows,), torch.int32)
            out.src_meta = launch.empty((num_rows, 8), torch.uint8)
    if makes_handle:
        ranks_per_node = ctx.topology.ranks_per_node
        out.send_rank_head = launch.empty((num_forward_rows, ranks_per_node), torch.int32)
    return out


def _take_region(
    ctx: Context,
    launch: Launch,
    payload: Payload,
    idx: Tensor | None,
    weights: Tensor | None,
    makes_handle: bool,
    is_scratch: bool,
    out: TierOutputs,
) -> bool:
    """Outputs where neighbours write them in place, poisoned if outputs are. False: no room."""
    if ctx.num_direct_bytes == 0:
        return False
    form, num_rows = payload.form, out.num_rows
    num_topk, idx_bytes = (0, 0) if idx is None else (idx.shape[1], idx.element_size())
    layout = output_layout(num_rows, form.row_bytes, form.scale_row_bytes, num_topk, idx_bytes)
    taken = [take(ctx, launch, max(layout[-1], 1), is_scratch)]
    meta_offset, source_bytes = (
        ctx.engine.tier_source_layout(num_rows=num_rows) if makes_handle else (0, 0)
    )
    if makes_handle:
        taken.append(take(ctx, launch, max(source_bytes, 1)))
    if None in taken:
        return False
    blocks = []
    for item in taken:
        assert item is not None
        block, events = item
        if events:
            launch.wait(events)
        if launch.poisons:
            launch.adopt(ctx.heap.view(block.offset, block.num_bytes))
        blocks.append(block)
    heap = ctx.heap
    out.lay_over(heap, blocks[0], layout, form, idx, weights, num_rows)
    if makes_handle:
        sources = blocks[1]
        out.src_offset = sources.offset
        out.src_idx = heap.matrix(sources.offset, 1, num_rows, torch.int32, sources).view(num_rows)
        out.src_meta = heap.matrix(sources.offset + meta_offset, num_rows, 8, torch.uint8, sources)
    return True
