"""A dispatch with new routing between nodes in one native step, up to where the host waits; and the
rest.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deep_comm import checks
from deep_comm.context import Context
from deep_comm.internode_handle import InternodeHandle
from deep_comm.ops.call import CallOptions, StreamOptions
from deep_comm.ops.internode import DispatchResult
from deep_comm.ops.internode_dispatch import UnmovedTierRows
from deep_comm.ops.internode_expand import expand_received, number_received
from deep_comm.ops.internode_outputs import TierOutputs
from deep_comm.ops.internode_plan import plan_two_tiers
from deep_comm.ops.notify import counts_of
from deep_comm.tier_parts import FreshTiers
from deep_comm.topology import num_local_experts


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
            members=ctx.members,
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
    """``given``: as ops.quick_new.send_new has it; of an expanded dispatch the rows as they come,
    for ``expand_sent``. None: nothing has happened."""
    if not ctx.is_sound() or (given[7] == 0 and not ctx.early_launches.is_due):
        return None
    # The step keeps what it counts in the region, and counts before any peer has come. Step by step
    # that is torch's memory. A graph's last combine stages for its next replay, too.
    if ctx.may_be_read or (ctx.reads_late and ctx.backend.is_capturing()):
        return None
    expand, zero_padding, cast = given[12:]
    if expand is True and type(zero_padding) is bool and given[9] is False:
        expand = zero_padding = False
    made = ctx.quick.new_dispatch(
        *given[:12], streams.asynchronous, expand, zero_padding, cast, num_tokens_per_rdma_rank
    )
    return None if made is None else SentTierRows(ctx, streams, made, given[5])


def expand_sent(
    ctx: Context,
    options: CallOptions,
    sent: DispatchResult,
    *,
    num_worst_tokens: int,
    expert_alignment: int,
    zero_padding: bool,
) -> DispatchResult:
    """The rows of an expanded dispatch, grouped, of those that have come: two local kernels, behind
    it. ``sent``: what SentTierRows has received, which nobody has seen."""
    rows, recv_idx, recv_weights, per_expert, handle, _ = sent
    payload = checks.payload(rows, ctx.device)
    plan = plan_two_tiers(
        ctx, options, payload.row_bytes, payload.scale_row_bytes, recv_idx.shape[1]
    )
    received = TierOutputs(payload.num_tokens)
    received.x, received.scales = payload.x, payload.scales
    received.topk_idx, received.topk_weights = recv_idx, recv_weights
    num_received, num_experts = handle.num_received, handle.num_experts or 0
    with options.streams.launch(ctx) as launch:
        expansion = number_received(
            ctx, launch, plan, received, num_received,
            num_local_experts(ctx.rank, num_experts, ctx.num_ranks), expert_alignment,
            num_worst_tokens or sum(per_expert),
        )  # fmt: skip
        out = expand_received(
            ctx, launch, plan, payload, received, num_received, expansion, zero_padding
        )
        event = launch.finish(())
    ctx.end()
    handle.expand(expansion)
    return out.payload, out.topk_idx, out.topk_weights, per_expert, handle, event
