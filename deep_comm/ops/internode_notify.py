"""What a rank tells its peers of all nodes before rows move, and what it learns from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deep_comm.backends import Launch
from deep_comm.checks import Payload
from deep_comm.context import Context
from deep_comm.ops.internode_outputs import TierOutputs
from deep_comm.ops.internode_plan import TwoTierPlan, notify_launcher
from deep_comm.ops.layout import Layout
from deep_comm.tier_parts import FreshTiers, TierSlabLayout


class TierRouting:
    """The routing of a dispatch as the kernels write it, in a slab that the handle keeps.

    Attributes: ``numbers``: as KnownTierHandle.routing; ``combine_start``, ``forward_places``,
    ``num_received``: addresses.
    """

    __slots__ = (
        "_address", "_counts", "_layout", "_mask", "_memory", "_storage", "combine_start",
        "forward_places", "num_received", "numbers",
    )  # fmt: skip

    def __init__(
        self,
        ctx: Context,
        launch: Launch,
        layout: TierSlabLayout,
        num_experts: int,
        given: Layout | None,
        slab: tuple[int, tuple[Any, ...]] | None = None,
    ) -> None:
        """``given``: by the caller. ``slab``: its address and the arguments of Memory; None: made
        here."""
        self._storage: Tensor | None = None  # torch's, of the slab
        if slab is None:
            self._storage = launch.empty((layout.num_bytes,), torch.uint8)
            slab = self._storage.data_ptr(), (ctx.heap.place, self._storage, None)
        self._layout = layout
        self._address, self._memory = slab
        address = self._address
        if given is None:
            self._mask, mask = None, address + layout.is_token_in_rank
            self._counts = address + layout.counts_per_expert
        else:
            self._mask, mask = given.is_token_in_rank, ctx.address(given.is_token_in_rank)
            self._counts = given.num_tokens_per_expert.data_ptr()
        places = address + layout.send_places if "send_places" in layout.parts else 0
        self.numbers = (
            num_experts, mask, address + layout.send_node_head, address + layout.recv_node_prefix,
            address + layout.recv_node_sum, address + layout.recv_rank_start,
            address + layout.recv_rank_sum, address, places,
        )  # fmt: skip
        self.combine_start = address + layout.combine_start
        self.forward_places = address + layout.forward_places
        self.num_received = address + layout.recv_rank_sum + 4 * (layout.num_ranks - 1)

    def launch(
        self,
        ctx: Context,
        launch: Launch,
        plan: TwoTierPlan,
        payload: Payload,
        idx: Tensor | None,
        weights: Tensor | None,
        expert_alignment: int,
    ) -> None:
        """Counts ``idx``, unless that has been done, and tells the peers."""
        layout, address = self._layout, self._address
        (
            num_experts, mask, send_head, node_prefix, node_sum, rank_start, rank_sum, own_prefix,
            places,
        ) = self.numbers  # fmt: skip
        num_topk = 0 if idx is None else idx.shape[1]
        if self._mask is None:
            assert idx is not None
            ctx.count_layout(
                ctx.address(idx), idx.element_size(), payload.num_tokens, num_topk, num_experts,
                ctx.num_ranks, address + layout.counts_per_rank, address + layout.counts_per_node,
                self._counts, mask, launch.stream,
            )  # fmt: skip
        notify_launcher(ctx, plan, payload.form, num_topk, num_experts, expert_alignment)(
            self._counts,
            mask,
            payload.num_tokens,
            own_prefix,
            address + layout.rank_prefix,
            send_head,
            places,
            node_prefix,
            node_sum,
            rank_start,
            rank_sum,
            self.combine_start,
            self.forward_places,
            address + layout.per_expert,
            address + layout.per_rank,
            weights is not None,
            launch.stream,
        )
        ctx.end()

    def fresh(self, ctx: Context, out: TierOutputs) -> FreshTiers:
        """Parts of the handle of a dispatch to ``out``."""
        assert out.src_meta is not None and out.send_rank_head is not None
        tensors = {"recv_src_meta": out.src_meta, "send_nvl_head": out.send_rank_head}
        if out.src_idx is not None:
            tensors["recv_src_idx"] = out.src_idx
        if self._mask is not None:
            tensors["is_token_in_rank"] = self._mask
        return FreshTiers(
            ctx.owner, self._layout, self._address, self._memory, self.numbers,
            ctx.address(out.send_rank_head), out.num_rows, out.num_forward_rows, tensors,
            self._storage,
        )  # fmt: skip
