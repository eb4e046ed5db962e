"""Memory for what a dispatch between nodes receives: in the receive region while there is
room, else anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deep_comm.backends import Launch
from deep_comm.checks import Payload
from deep_comm.context import Context
from deep_comm.ops.outputs import RecvX, output_layout, take


class TierOutputs:
    """Q received rows, F forwarded ones.

    Attributes:
        x, scales: [Q, H] and [Q, S] or None.
        topk_idx, topk_weights: [Q, K] or None.
        src_idx, src_meta: int32 [Q] and uint8 [Q, 8]; None of a cached dispatch, as
        send_rank_head: int32 [F, M].
        output_offset, src_offset: in the heap; 0: not in the receive region.
    """

    __slots__ = (
        "num_rows",
        "num_forward_rows",
        "x",
        "scales",
        "topk_idx",
        "topk_weights",
        "src_idx",
        "src_meta",
        "send_rank_head",
        "output_offset",
        "src_offset",
    )

    def __init__(self, num_rows: int, num_forward_rows: int) -> None:
        self.num_rows = num_rows
        self.num_forward_rows = num_forward_rows
        self.x: Tensor
        self.scales: Tensor | None = None
        self.topk_idx: Tensor | None = None
        self.topk_weights: Tensor | None = None
        self.src_idx: Tensor | None = None
        self.src_meta: Tensor | None = None
        self.send_rank_head: Tensor | None = None
        self.output_offset = self.src_offset = 0

    @staticmethod
    def anywhere(
        launch: Launch,
        payload: Payload,
        idx: Tensor | None,
        weights: Tensor | None,
        num_rows: int,
        num_forward_rows: int = 0,
    ) -> TierOutputs:
        """Ordinary tensors for rows: peers cannot write there."""
        out = TierOutputs(num_rows, num_forward_rows)
        out.x = launch.empty((num_rows, payload.hidden), payload.x.dtype)
        if payload.scales is not None:
            out.scales = launch.empty((num_rows, payload.num_scales), payload.scales.dtype)
        if idx is not None:
            out.topk_idx = launch.empty((num_rows, idx.shape[1]), idx.dtype)
        if weights is not None:
            out.topk_weights = launch.empty((num_rows, weights.shape[1]), weights.dtype)
        return out

    @property
    def payload(self) -> RecvX:
        return self.x if self.scales is None else (self.x, self.scales)


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
        out = TierOutputs.anywhere(launch, payload, idx, weights, num_rows, num_forward_rows)
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
    x, scales, topk_idx, topk_weights, num_bytes = output_layout(
        num_rows, form.row_bytes, form.scale_row_bytes, num_topk, idx_bytes
    )
    taken = [take(ctx, launch, max(num_bytes, 1), is_scratch)]
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
    heap, block = ctx.heap, blocks[0]
    offset = out.output_offset = block.offset
    out.x = heap.matrix(offset + x, num_rows, form.hidden, form.dtype, block)
    if form.scale_dtype is not None:
        out.scales = heap.matrix(
            offset + scales, num_rows, form.num_scales, form.scale_dtype, block
        )
    if idx is not None:
        out.topk_idx = heap.matrix(offset + topk_idx, num_rows, num_topk, idx.dtype, block)
    if weights is not None:
        out.topk_weights = heap.matrix(
            offset + topk_weights, num_rows, num_topk, weights.dtype, block
        )
    if makes_handle:
        sources = blocks[1]
        out.src_offset = sources.offset
        out.src_idx = heap.matrix(sources.offset, 1, num_rows, torch.int32, sources).view(num_rows)
        out.src_meta = heap.matrix(sources.offset + meta_offset, num_rows, 8, torch.uint8, sources)
    return True
