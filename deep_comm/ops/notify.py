"""notify_dispatch: what a rank tells its peers before rows move, and what it learns from them."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deep_comm.backends import Launch
from deep_comm.checks import Payload
from deep_comm.config import RingPlan
from deep_comm.context import Context
from deep_comm.errors import DeepCommError
from deep_comm.ops.layout import Layout
from deep_comm.ops.plans import DispatchPlan
from deep_comm.topology import num_local_experts

if TYPE_CHECKING:
    from deep_comm._core import Counts


class Notified:
    """The routing of a dispatch as the kernels write it: addresses for the engine, tensors for the handle.

    R ranks, T tokens, C channels, L local experts. All but the mask lies in one allocation, which the
    handle keeps:

        rank_prefix [R, R] | channel_prefix [R, C] | recv_channel_prefix [R, C] | per expert [L]
        | send_head [T, R] | all rows, rows by source [1 + R]
    """

    __slots__ = (
        "num_experts",
        "is_token_in_rank",
        "send_head",
        "rank_prefix_matrix",
        "channel_prefix_matrix",
        "recv_channel_prefix_matrix",
        "num_recv_tokens_per_expert",
        "recv_counts",
        "_shape",
        "_parts",
        "_slab",
        "_mask",
    )

    def __init__(
        self, ctx: Context, launch: Launch, plan: RingPlan, num_tokens: int, num_experts: int,
        layout: Layout | None,
    ) -> None:  # fmt: skip
        ranks, channels = ctx.num_ranks, plan.num_channels
        num_local = num_local_experts(ctx.rank, num_experts, ranks)
        self._shape = (ranks, channels, num_local, num_tokens)
        self._parts = parts = _parts(ranks, channels, num_local, num_tokens)
        self._slab = launch.empty((parts[-1],), torch.int32)
        # Not in the slab: torch does not save tensors of two types that share memory.
        self._mask = (
            launch.empty((num_tokens, ranks), torch.bool)
            if layout is None
            else layout.is_token_in_rank
        )
        self.num_experts = num_experts
        address = self._slab.data_ptr()
        self.rank_prefix_matrix = address
        self.channel_prefix_matrix = address + 4 * parts[0]
        self.recv_channel_prefix_matrix = address + 4 * parts[1]
        self.num_recv_tokens_per_expert = address + 4 * parts[2]
        self.send_head = address + 4 * parts[3]
        self.recv_counts = address + 4 * parts[4]
        self.is_token_in_rank = self._mask.data_ptr() or ctx.heap.base

    @property
    def routing(self) -> tuple[int, int, int, int, int]:
        """As a KnownHandle's."""
        return (
            self.num_experts, self.is_token_in_rank, self.send_head, self.rank_prefix_matrix,
            self.channel_prefix_matrix,
        )  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """As the handle names them."""
        ranks, channels, num_local, num_tokens = self._shape
        slab, parts = self._slab, self._parts
        return dict(
            rank_prefix_matrix=slab.as_strided((ranks, ranks), (ranks, 1), 0),
            channel_prefix_matrix=slab.as_strided((ranks, channels), (channels, 1), parts[0]),
            recv_channel_prefix_matrix=slab.as_strided((ranks, channels), (channels, 1), parts[1]),
            is_token_in_rank=self._mask,
            send_head=slab.as_strided((num_tokens, ranks), (ranks, 1), parts[3]),
            num_recv_tokens_per_expert=slab.as_strided((num_local,), (1,), parts[2]),
            num_recv_tokens_tensor=slab.as_strided((1,), (1,), parts[4]),
            num_recv_tokens_per_rank=slab.as_strided((ranks,), (1,), parts[4] + 1),
        )


@functools.lru_cache(maxsize=256)
def _parts(ranks: int, channels: int, num_local: int, num_tokens: int) -> tuple[int, ...]:
    """Where the parts of a slab end, in words: each begins at a multiple of 16 bytes."""
    sizes = (
        ranks * ranks, ranks * channels, ranks * channels, num_local, num_tokens * ranks, 1 + ranks
    )  # fmt: skip
    return tuple(itertools.accumulate((size + 3) // 4 * 4 for size in sizes))


class Place:
    """Where the outputs of the dispatch that follows lie in this rank's receive region."""

    __slots__ = ("output_offset", "src_offset", "num_rows", "is_exact")

    def __init__(
        self, output_offset: int, src_offset: int, num_rows: int, is_exact: bool
    ) -> None:
        self.output_offset = output_offset  # 0: not there
        self.src_offset = src_offset
        self.num_rows = num_rows  # that fit
        self.is_exact = is_exact  # laid out for as many rows as come


NOWHERE = Place(0, 0, 0, False)


NO_EXPANSION = (0, 0, 0, 0)


def launch_notify(
    ctx: Context,
    launch: Launch,
    plan: DispatchPlan,
    payload: Payload,
    idx: Tensor | None,
    num_experts: int,
    layout: Layout | None,
    place: Place,
    expansion: tuple[int, int, int, int],
) -> Notified:
    """With ``layout`` from get_dispatch_layout, else from ``idx``. ``expansion``: addresses of what expanded
    outputs add."""
    out = Notified(ctx, launch, plan.rings, payload.num_tokens, num_experts, layout)
    if layout is None:
        assert idx is not None
        choices, per_rank, per_expert = idx.data_ptr() or ctx.heap.base, 0, 0
    else:
        choices = 0
        per_rank = layout.num_tokens_per_rank.data_ptr()
        per_expert = layout.num_tokens_per_expert.data_ptr()
    assert plan.notify is not None
    plan.notify(
        choices,
        per_rank,
        per_expert,
        out.is_token_in_rank,
        payload.num_tokens,
        place.output_offset,
        place.src_offset,
        place.num_rows,
        place.is_exact,
        out.rank_prefix_matrix,
        out.channel_prefix_matrix,
        out.send_head,
        out.num_recv_tokens_per_expert,
        out.recv_counts,
        *expansion,
        launch.stream,
    )
    ctx.end()
    return out


def wait_counts(ctx: Context) -> Counts:
    """Blocks until the peers' counts have come; raises what the kernel recorded if they did not."""
    counts = ctx.engine.wait_counts()
    if counts is None:
        ctx.check()
        raise DeepCommError("notify_dispatch failed and left no error record")
    return counts
