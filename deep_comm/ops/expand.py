"""Expanded outputs: rows are numbered before a dispatch, copied after it, added before a combine.

Between nodes they are numbered where they have come: see internode_expand.py. The kernels here are
local; peers take part in dispatch and combine alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deep_comm import checks
from deep_comm.backends import Launch
from deep_comm.checks import COMBINE_DTYPES, Payload
from deep_comm.config import RingPlan
from deep_comm.context import Context
from deep_comm.errors import ArgumentError, HandleMismatch
from deep_comm.expansion import Expansion, numbering_layout
from deep_comm.ops.outputs import Outputs
from deep_comm.topology import num_local_experts


class Numbering:
    """Where rows belong: filled by notify_dispatch, then by number_rows."""

    def __init__(
        self, ctx: Context, storage: Tensor | None, num_experts: int, idx: Tensor, launch: Launch
    ) -> None:
        """``storage``: of a native step; None: made here."""
        self._num_ranks = ctx.num_ranks
        num_local = num_local_experts(ctx.rank, num_experts, ctx.num_ranks)
        self._num_tokens, num_topk = idx.shape
        layout = numbering_layout(ctx.num_ranks, num_experts, num_local, self._num_tokens, num_topk)
        if storage is None:
            storage = launch.empty((layout.num_words,), torch.int32)
        self._layout, self._storage = layout, storage
        self._expert_offsets = storage.narrow(0, layout.expert_offsets, num_local + 1)
        self._expert_counts = storage.narrow(0, layout.expert_counts, num_local)

    def _at(self, part: int) -> int:
        return self._storage.data_ptr() + 4 * part

    def notify_arguments(self) -> tuple[int, int, int, int]:
        layout = self._layout
        return (
            self._at(layout.first_rows), self._at(layout.expert_offsets),
            self._at(layout.expert_counts), self._at(layout.num_expanded),
        )  # fmt: skip

    def launch(
        self, ctx: Context, launch: Launch, plan: RingPlan, idx: Tensor, num_experts: int
    ) -> None:
        """After notify."""
        ctx.engine.number_rows(
            topk_idx=ctx.address(idx),
            topk_idx_bytes=idx.element_size(),
            num_tokens=idx.shape[0],
            num_topk=idx.shape[1],
            num_experts=num_experts,
            first_rows=self._at(self._layout.first_rows),
            send_row=self._at(self._layout.send_row),
            send_rows=self._at(self._layout.send_rows),
            num_channels=plan.num_local_blocks,
            stream=launch.stream,
        )

    def dispatch_arguments(self, out: Outputs) -> tuple[int, int, int, int]:
        layout = self._layout
        return (
            self._at(layout.send_row), self._at(layout.send_rows), self._at(layout.num_expanded),
            out.recv_rows_address,
        )  # fmt: skip

    def expansion(
        self, out: Outputs, num_rows: int, num_tokens: int, expert_alignment: int
    ) -> Expansion:
        """Also gives ``out`` the shapes that callers see."""
        assert out.recv_rows is not None and out.src_idx is not None and out.topk_idx is not None
        out.src_idx, out.recv_rows = out.src_idx[:num_tokens], out.recv_rows[:num_tokens]
        out.topk_idx = out.topk_idx.view(num_rows)
        if out.topk_weights is not None:
            out.topk_weights = out.topk_weights.view(num_rows)
        return Expansion.fresh(
            self._storage,
            self._layout,
            self._num_ranks,
            self._num_tokens,
            expert_offsets=self._expert_offsets,
            expert_counts=self._expert_counts,
            recv_rows=out.recv_rows,
            num_rows=num_rows,
            expert_alignment=expert_alignment,
        )


def numbered_expansion(
    num_ranks: int,
    storage: Tensor,
    expert_offsets: Tensor,
    expert_counts: Tensor,
    num_experts: int,
    num_tokens: int,
    num_topk: int,
    expert_alignment: int,
) -> Expansion:
    """Of a native step; to be completed when the rows are known."""
    layout = numbering_layout(num_ranks, num_experts, expert_counts.shape[0], num_tokens, num_topk)
    return Expansion.fresh(
        storage,
        layout,
        num_ranks,
        num_tokens,
        expert_offsets=expert_offsets,
        expert_counts=expert_counts,
        expert_alignment=expert_alignment,
    )


def expand_rows(
    ctx: Context,
    launch: Launch,
    plan: RingPlan,
    payload: Payload,
    expansion: Expansion,
    rank_prefix_matrix: int,
    out: Outputs,
    *,
    zero_padding: bool,
    fill_handle: bool,
) -> None:
    """After dispatch: the other rows of each token, the padding.

    ``fill_handle``: in worst-case mode.
    """
    recv_rows = expansion.recv_rows
    ctx.engine.expand_rows(
        rank_prefix_matrix=rank_prefix_matrix,
        recv_rows=ctx.address(recv_rows),
        expert_offsets=ctx.address(expansion.expert_offsets),
        expert_counts=ctx.address(expansion.expert_counts),
        num_topk=recv_rows.shape[1],
        num_local_experts=expansion.expert_counts.shape[0],
        num_rows=expansion.num_rows,
        num_tokens_limit=recv_rows.shape[0],
        row_bytes=payload.row_bytes,
        scale_row_bytes=payload.scale_row_bytes,
        zero_padding=zero_padding,
        x=out.x_address,
        scales=out.scales_address,
        expert_idx=out.topk_idx_address,
        expert_idx_bytes=0 if out.topk_idx is None else out.topk_idx.element_size(),
        weights=out.topk_weights_address,
        fill_src_idx=out.src_idx_address if fill_handle else 0,
        fill_rows=out.recv_rows_address if fill_handle else 0,
        num_channels=plan.num_local_blocks,
        stream=launch.stream,
    )


def cached_arguments(ctx: Context, expansion: Expansion) -> tuple[int, int, int, int]:
    """The same for a cached dispatch."""
    return ctx.address(expansion.send_row), 0, ctx.address(expansion.num_expanded), 0


def reduce_experts(
    ctx: Context,
    launch: Launch,
    num_blocks: int,
    x: Tensor,
    expansion: Expansion,
    rank_prefix_matrix: int,
    row_weights: Tensor | None,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """x [M, H] as one row a received token [N, H]; ``weights`` [M] as [N, K].

    ``row_weights`` [M]: multiplied with the rows. ``rank_prefix_matrix``: between nodes of this
    rank alone, how many tokens it has received.
    """
    num_tokens, num_topk = expansion.recv_rows.shape
    reduced = launch.empty((num_tokens, x.shape[1]), x.dtype)
    reduced_weights = None
    if weights is not None:
        reduced_weights = launch.empty((num_tokens, num_topk), torch.float32)
    ctx.engine.reduce_experts(
        rank_prefix_matrix=rank_prefix_matrix,
        recv_rows=ctx.address(expansion.recv_rows),
        num_topk=num_topk,
        num_rows=expansion.num_rows,
        num_tokens_limit=num_tokens,
        dtype=COMBINE_DTYPES[x.dtype],
        hidden=x.shape[1],
        x=ctx.address(x),
        row_weights=ctx.address(row_weights),
        reduced_x=ctx.address(reduced),
        weights=ctx.address(weights),
        reduced_weights=ctx.address(reduced_weights),
        num_channels=num_blocks,
        stream=launch.stream,
    )
    return reduced, reduced_weights


def weights_of_rows(
    ctx: Context,
    expansion: Expansion | None,
    topk_weights: Any,
    apply_weights: bool,
    num_rows: int,
) -> tuple[Tensor | None, Tensor | None, int]:
    """What combine is given, as it is used: (weights to multiply rows with, weights to bring
    home, K of those).

    Raises:
        ArgumentError, HandleMismatch.
    """
    if apply_weights:
        if expansion is None:
            raise HandleMismatch(
                "handle",
                "without expansion",
                "must be of a dispatch with expand=True (apply_weights)",
            )
        if topk_weights is None:
            raise ArgumentError("topk_weights", None, "is needed with apply_weights")
    if topk_weights is None:
        return None, None, 0
    if expansion is None:
        topk_weights = checks.row_weights(topk_weights, ctx.device, num_rows)
        return None, topk_weights, topk_weights.shape[1]
    topk_weights = checks.tensor(
        "topk_weights", topk_weights, ctx.device, shape=(num_rows,), dtypes=(torch.float32,)
    )
    if apply_weights:
        return topk_weights, None, 0
    return None, topk_weights, expansion.recv_rows.shape[1]


def require_expandable(
    idx: Tensor | None, expand: bool, zero_padding: bool, zero_tail: bool
) -> None:
    """Options of a dispatch without a handle. Raises ArgumentError."""
    if expand and idx is None:
        raise ArgumentError("topk_idx", None, "is needed with expand")
    if zero_tail and expand:
        rule = "is for outputs without expand; zero_padding serves expanded ones"
        raise ArgumentError("zero_tail", True, rule)
    if zero_padding and not expand:
        raise ArgumentError("zero_padding", True, "needs expand=True")


def require_expanded(expansion: Expansion | None, expand: bool, zero_padding: bool) -> None:
    """The same of a cached one. Raises HandleMismatch."""
    if (expand or zero_padding) and expansion is None:
        raise HandleMismatch(
            "handle", "without expansion", "must be of a dispatch with expand=True"
        )
