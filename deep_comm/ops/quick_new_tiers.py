"""A dispatch with new routing between nodes in one native step, up to where the host waits; and the
rest.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deep_comm.context import Context
from deep_comm.internode_handle import InternodeHandle
from deep_comm.ops.call import StreamOptions
from deep_comm.ops.internode import DispatchResult
from deep_comm.ops.internode_dispatch import UnmovedTierRows
from deep_comm.ops.notify import counts_of
from deep_comm.tier_parts import FreshTiers


class SentTierRows:
    """Of the one step. Its handle is made while the device counts."""

    __slots__ = ("_ctx", "_event", "_handle", "_receive", "_slab")

    def __init__(
        self,
        ctx: Context,
        streams: StreamOptions,
        made: tuple[Any, ...],
        is_token_in_rank: Tensor | None,
    ) -> None:
        """``made``: what the step returned."""
        (
            layout, address, block, routing, rank_head, sources, num_rows, num_forward_rows,
            home_stream, num_topk, self._receive,
        ) = made  # fmt: skip
        memory = ctx.heap.place, ctx.heap.memory(), block
        self._slab = address, memory
        tensors = {} if is_token_in_rank is None else {"is_token_in_rank": is_token_in_rank}
        self._handle = InternodeHandle.fresh(
            FreshTiers(
                ctx.owner, layout, address, memory, routing, rank_head, num_rows, num_forward_rows,
                tensors, None, sources, ctx.topology.ranks_per_node,
            ),
            rank=ctx.rank,
            num_experts=routing[0],
            num_topk=num_topk,
            num_recv_tokens=None,
            max_num_tokens=None,
            members=ctx.members,
            num_returning_rows=None,
            expansion=None,
            home_stream=home_stream,
        )  # fmt: skip
        self._ctx = ctx
        self._event = streams.quick_end(ctx)

    def receive(self) -> DispatchResult | UnmovedTierRows:
        """Once. The host waits for the counts, unless there is a bound."""
        ctx, handle = self._ctx, self._handle
        rows, recv_idx, recv_weights, waited = self._receive()
        per_expert: list[int] = []
        if rows is None or waited is not None:
            counts = counts_of(ctx, waited)
            ctx.expected.learn(counts.num_recv_tokens, counts.max_num_tokens)
            ctx.early_launches.learn(counts.is_direct)
            if rows is None:
                return UnmovedTierRows(self._slab, counts)
            handle.complete(
                counts.num_recv_tokens, counts.max_num_tokens, counts.num_forward_tokens,
                counts.num_returning_rows,
            )  # fmt: skip
            per_expert = counts.num_recv_tokens_per_expert
        ctx.end()
        return rows, recv_idx, recv_weights, per_expert, handle, self._event


def send_new_tiers(
    ctx: Context, streams: StreamOptions, num_tokens_per_rdma_rank: Any, *given: Any
) -> SentTierRows | None:
    """``given``: as ops.quick_new.send_new has it. None: nothing has happened."""
    if not ctx.is_sound() or (given[7] == 0 and not ctx.early_launches.is_due):
        return None
    made = ctx.quick.new_dispatch(
        *given[:12], streams.asynchronous, *given[12:], num_tokens_per_rdma_rank
    )
    return None if made is None else SentTierRows(ctx, streams, made, given[5])
