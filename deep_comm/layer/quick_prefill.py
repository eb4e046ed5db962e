"""The two calls of a prefill step in one native step each, from the layer's arguments to results.

They do the whole call, or nothing: for whatever is in doubt they return None before anything has
happened, and the layer goes on step by step (prefill.py), which names what is wrong. See
csrc/bind/quick_prefill.hpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from deep_comm import _core
from deep_comm.expansion import Expansion
from deep_comm.handle import Handle
from deep_comm.handle_parts import PlacedRows, SlabLayout
from deep_comm.layer.batch import ExpertBatch
from deep_comm.ops import quick
from deep_comm.ops.expand import numbered_expansion
from deep_comm.tuning import DefaultConfig

if TYPE_CHECKING:
    from deep_comm.buffer import Buffer
    from deep_comm.layer.mode import ModeRule
    from deep_comm.layer.shape import MoEShape


class Prefilled:
    """What combine needs of a prefill batch.

    Attributes:
        handle: of the way of prefill; that of a native step is made when it is asked for.
        weights: float32 [S], of each row.
    """

    __slots__ = ("_made", "handle", "weights")
    handle: Any
    weights: Tensor

    def __init__(self, handle: Any, weights: Tensor) -> None:
        self.handle = handle
        self.weights = weights
        self._made: object = None  # of a native step, which leaves ``handle`` away

    def __getattr__(self, name: str) -> Any:
        """Called for what is missing."""
        if name != "handle":
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        self.handle = _handle_of(*_core.QuickNormal.told_of_batch(self._made))
        return self.handle

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.handle, self.weights)


class _Maker(NamedTuple):
    """Of handles of one layer. Without its Buffer, which a batch does not keep alive."""

    place: Any  # of the heap, as this and the next are in Memory
    memory: object
    rank: int
    num_ranks: int
    expert_alignment: int


def _handle_of(
    maker: _Maker,
    owner: object,
    members: tuple[str, ...],
    layout: SlabLayout,
    address: int,
    block: Any,
    routing: tuple[int, int, int, int, int],
    home_stream: int | None,
    num_topk: int,
    numbered: tuple[Tensor, Tensor, Tensor],
    counts: tuple[Any, ...] | None,
    num_rows: int,
    recv_rows: int,
    num_recv_rows: int,
    has_default_sms: bool,
) -> Handle:
    """What is said of a batch by csrc/bind/quick_prefill.hpp."""
    memory = maker.place, maker.memory, block
    expansion: Expansion = numbered_expansion(
        maker.num_ranks, *numbered, routing[0], layout.num_tokens, num_topk, maker.expert_alignment
    )
    expansion.complete(num_rows, PlacedRows(recv_rows, num_recv_rows, num_topk, memory))
    handle = Handle.fresh_in_region(
        owner, layout, address, None, routing, num_recv_rows, memory,
        rank=maker.rank,
        num_experts=routing[0],
        num_topk=num_topk,
        members=members,
        has_default_sms=has_default_sms,
        home_stream=home_stream,
        expansion=expansion,
    )  # fmt: skip
    if counts is not None:
        handle.complete(counts[0], counts[1])
    return handle


class PrefillCalls(NamedTuple):
    """Attributes:
    begin(x, topk_idx, topk_weights, is_bounded, is_learning): an ExpertBatch, received; with
        ``is_learning`` and counts the rule has learned the most tokens of any rank.
    end(rows, state): the sums.
    """

    begin: Callable[[Any, Any, Any, Any, bool], ExpertBatch | None]
    end: Callable[[Any, Prefilled], Tensor | None]


NEVER = PrefillCalls(quick.never, quick.never)


def prefill_calls(
    buffer: Buffer,
    shape: MoEShape,
    rule: ModeRule,
    *,
    alignment: int,
    max_recv_rows: int,
    common: dict[str, Any],
    finish_unmoved: Callable[..., ExpertBatch],
) -> PrefillCalls:
    """Inside a node.

    Args:
        common: what is alike in all batches.
        finish_unmoved: (x, topk_idx, topk_weights, default, SlabLayout, its address, its block,
            counts, storage of the numbering): the rest of a dispatch with counts, where these have
            not come, which it raises, or the rows have not moved.
    """
    ctx = buffer._context
    native, code = ctx.quick.native, quick.code_of(shape.dtype)
    if native is None or ctx.quick.is_internode or code is None:
        return NEVER
    begin, end = native.layer(
        context=ctx,
        buffer=buffer,
        default_of=buffer._default,
        default_config_type=DefaultConfig,
        is_synchronous=ctx.backend.is_synchronous,
        finish_unmoved=finish_unmoved,
        maker=_Maker(ctx.heap.place, ctx.heap.memory(), ctx.rank, ctx.num_ranks, alignment),
        dtype=code,
        hidden=shape.hidden,
        max_tokens=shape.max_tokens,
        num_topk=shape.num_topk,
        num_experts=shape.num_experts,
        max_rows=max_recv_rows,
        alignment=alignment,
        batch_type=ExpertBatch,
        common=common,
        state_type=Prefilled,
        rule=rule,
    )
    # FP8 rows are quantised on their way, and come with scales.
    return PrefillCalls(quick.never if shape.fp8 else begin, end)
