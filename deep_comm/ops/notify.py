"""notify_dispatch: what a rank tells its peers before rows move, and what it learns from them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deep_comm.backends import Launch
from deep_comm.checks import Payload
from deep_comm.context import Context
from deep_comm.errors import DeepCommError
from deep_comm.handle_parts import Memory, Slab, SlabLayout
from deep_comm.ops.layout import Layout
from deep_comm.ops.plans import DispatchPlan


class Notified:
    """The routing of a dispatch as the kernels write it, in a slab that the handle keeps:
    addresses for the engine.
    """

    __slots__ = (
        "slab",
        "storage",
        "mask",
        "routing",
        "recv_channel_prefix_matrix",
    )

    def __init__(
        self,
        ctx: Context,
        launch: Launch,
        slab_layout: SlabLayout,
        num_experts: int,
        layout: Layout | None,
        slab: Slab | None,
    ) -> None:
        """``slab``: in the receive region; None: made here."""
        self.storage: Tensor | None = None  # torch's, of the slab
        if slab is None:
            self.storage = launch.empty((slab_layout.num_bytes,), torch.uint8)
            address = self.storage.data_ptr()
            slab = Slab(slab_layout, address, Memory(ctx.heap.place, self.storage, None))
        self.slab = slab
        address = slab.address
        if layout is None:
            self.mask: Tensor | None = None
            mask = address + slab_layout.is_token_in_rank
        else:
            self.mask = layout.is_token_in_rank
            mask = self.mask.data_ptr() or ctx.heap.base
        self.recv_channel_prefix_matrix = address + slab_layout.recv_channel_prefix_matrix
        # As a KnownHandle's.
        self.routing = (
            num_experts, mask, address + slab_layout.send_head, address,
            address + slab_layout.channel_prefix_matrix,
        )  # fmt: skip


class Place:
    """Where the outputs of the dispatch that follows lie in this rank's receive region."""

    __slots__ = ("output_offset", "src_offset", "num_rows", "is_exact")

    def __init__(self, output_offset: int, src_offset: int, num_rows: int, is_exact: bool) -> None:
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
    weights: Tensor | None,
    out: Notified,
    layout: Layout | None,
    place: Place,
    expansion: tuple[int, int, int, int],
) -> None:
    """With ``layout`` from get_dispatch_layout, else from ``idx``. ``expansion``: addresses of
    what expanded outputs add.
    """
    slab, parts = out.slab.address, out.slab.layout
    _, mask, send_head, rank_prefix_matrix, channel_prefix_matrix = out.routing
    if layout is None:
        assert idx is not None
        choices, per_expert = idx.data_ptr() or ctx.heap.base, 0
    else:
        choices = 0
        per_expert = layout.num_tokens_per_expert.data_ptr()
    assert plan.notify is not None
    plan.notify(
        choices,
        per_expert,
        mask,
        payload.num_tokens,
        weights is not None,
        place.output_offset,
        place.src_offset,
        place.num_rows,
        place.is_exact,
        rank_prefix_matrix,
        channel_prefix_matrix,
        send_head,
        slab + parts.num_recv_tokens_per_expert,
        slab + parts.recv_counts,
        *expansion,
        launch.stream,
    )
    ctx.end()


class Counts(NamedTuple):
    """What notify_dispatch or internode_notify learned."""

    num_recv_tokens: int
    max_num_tokens: int  # of all ranks
    # The outputs announced to notify_dispatch serve all ranks; between nodes, an early dispatch has
    # sent its rows.
    is_direct: bool
    num_recv_tokens_per_expert: list[int]  # per local expert, rounded up to expert_alignment
    num_forward_tokens: int = 0  # between nodes: that ranks of this local index send to this node
    num_returning_rows: int = 0  # likewise: that the node's other ranks return in combine


def counts_of(ctx: Context, waited: tuple[Any, ...] | None) -> Counts:
    """From what ``ctx.wait_counts`` or ``ctx.wait_tier_counts`` returned, behind a notify; raises
    what the kernel recorded if the peers' counts have not come.
    """
    if waited is None:
        ctx.check()
        raise DeepCommError("the kernel that exchanges counts failed and left no error record")
    return Counts(*waited)
