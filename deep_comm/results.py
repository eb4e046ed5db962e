"""What the calls of a Buffer return: tuples whose items have names.

They unpack, index and compare as the tuples they are. `| Any`: what an item is follows from the
arguments, and callers know it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from deep_comm.events import EventOverlap
from deep_comm.handle import Handle, InternodeHandle, LowLatencyHandle
from deep_comm.log import brief

Hook = Callable[[], None]

named = tuple.__new__
"""``named(DispatchResult, items)``: a fifth of a microsecond less than DispatchResult(*items)."""


def _short(self: Any) -> str:
    """Shapes instead of contents."""
    items = (f"{name}={brief(value)}" for name, value in zip(self._fields, self, strict=True))
    return f"{type(self).__name__}({', '.join(items)})"


class DispatchLayout(NamedTuple):
    """What ``Buffer.get_dispatch_layout`` returns.

    Attributes:
        num_tokens_per_rank: int32 [R]; a token counts once per rank.
        num_tokens_per_rdma_rank: int32 [nodes]; a token counts once per node. None inside one node.
        num_tokens_per_expert: int32 [E]; every selection counts.
        is_token_in_rank: bool [T, R].
        event: empty without async_finish.
    """

    num_tokens_per_rank: Tensor
    num_tokens_per_rdma_rank: Tensor | None
    num_tokens_per_expert: Tensor
    is_token_in_rank: Tensor
    event: EventOverlap

    def __repr__(self) -> str:
        return _short(self)


class DispatchResult(NamedTuple):
    """What ``Buffer.dispatch`` returns.

    Attributes:
        recv_x: [N, H], sorted by (source rank, source token); with scales (recv_x, [N, S]).
        recv_topk_idx: [N, K], local expert indices, -1 where the expert is on another rank; or
            None.
        recv_topk_weights: float32 [N, K], 0 where the index is -1; or None.
        num_recv_tokens_per_expert_list: L ints; [] with num_worst_tokens; None if cached.
        handle: for combine and cached dispatch; None if cached.
        event: empty without async_finish.
    """

    recv_x: Tensor | Any
    recv_topk_idx: Tensor | Any
    recv_topk_weights: Tensor | Any
    num_recv_tokens_per_expert_list: list[int] | Any
    handle: Handle | InternodeHandle | Any
    event: EventOverlap

    def __repr__(self) -> str:
        return _short(self)


class CombineResult(NamedTuple):
    """What ``Buffer.combine`` returns.

    Attributes:
        combined_x: [T, H] of the dtype of x.
        combined_topk_weights: float32 [T, K], or None.
        event: empty without async_finish.
    """

    combined_x: Tensor
    combined_topk_weights: Tensor | Any
    event: EventOverlap

    def __repr__(self) -> str:
        return _short(self)


class LowLatencyDispatchResult(NamedTuple):
    """What ``Buffer.low_latency_dispatch`` returns.

    Attributes:
        recv_x: [L, R * M, H], or (recv_x, scales); compact [R * M, H].
        recv_count: int32 [L], rows of each expert.
        handle: for combine.
        event: empty without async_finish.
        hook: runs the receive phase; None without return_recv_hook.
    """

    recv_x: Tensor | tuple[Tensor, Tensor]
    recv_count: Tensor
    handle: LowLatencyHandle
    event: EventOverlap
    hook: Hook | None

    def __repr__(self) -> str:
        return _short(self)


class LowLatencyCombineResult(NamedTuple):
    """What ``Buffer.low_latency_combine`` returns.

    Attributes:
        combined_x: bfloat16 [T, H].
        event: empty without async_finish.
        hook: runs the receive phase; None without return_recv_hook.
    """

    combined_x: Tensor
    event: EventOverlap
    hook: Hook | None

    def __repr__(self) -> str:
        return _short(self)
