"""The calls that the steps of one layer are made of: from its arguments to a batch, and from the
experts' rows to sums. What they do is in csrc/bind/calls_layer.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deep_comm import _core
from deep_comm._core import Decoded, HostCounters, Prefilled
from deep_comm.layer.batch import ExpertBatch
from deep_comm.ranks.topology import first_expert, num_local_experts

if TYPE_CHECKING:
    from deep_comm.buffer import Buffer
    from deep_comm.context.shape import MoEShape
    from deep_comm.layer.mode import ModeRule

Receive = Callable[[], ExpertBatch]


class LayerCalls:
    """Of one layer on one rank. No rule of "auto", no autograd: see steps.py.

    Functions take their arguments by position. All raise ArgumentError for what breaks a rule of
    the layer, and what the Buffer's calls raise.

    Attributes:
        num_local, first_expert: experts of this rank.
        capacity: rows of every group of a decode batch.
        alignment: of the groups of a prefill batch.
        decode(x, topk_idx, topk_weights, asks): an ExpertBatch. With ``asks`` all ranks learn the
            most tokens of any: by counters where all share a host, else by the device. A rank with
            too many tokens then sends one more than decode takes, which go nowhere.
        begin_decode: the same, and the hook that receives.
        prefill(x, topk_idx, topk_weights, is_bounded): an ExpertBatch.
        begin_prefill: the same, sent; returns a function that receives, which is also where the
            host waits for counts.
        combine(rows, state): the sums of a batch of either mode.
        begin_combine: the same, and a function that receives them.
        finish(rows, state): of a decode step that asked: the sums, and whether all ranks had as
            many tokens as decode takes, which the rule has learned then; None: it has not, because
            the counters do not tell.
        use_counters(counters): by which the ranks of this host tell one another how many tokens
            they have; None: they have none.
    """

    def __init__(
        self,
        buffer: Buffer,
        shape: MoEShape,
        rule: ModeRule,
        alignment: int,
        max_recv_rows: int,
        can_decode: bool,
    ) -> None:
        rank, num_ranks = buffer.rank, buffer.group_size
        self.num_local = num_local_experts(rank, shape.num_experts, num_ranks)
        self.first_expert = first_expert(rank, shape.num_experts, num_ranks)
        self.capacity = num_ranks * shape.num_slots
        self.alignment = alignment
        alike = dict(scales=None, counts=None, first_expert=self.first_expert)
        firsts = torch.arange(self.num_local + 1, dtype=torch.int32, device=buffer.device)
        asking = (shape.decode_tokens + 1, shape.num_topk)

        buffer._context.native_calls.agree_on_tokens(shape.max_tokens)
        calls = _core.LayerCalls(
            buffer=buffer._context.native_calls,
            low_latency=buffer._low_latency if can_decode else None,
            shape=shape,
            alignment=alignment,
            max_recv_rows=max_recv_rows,
            batch_type=ExpertBatch,
            decode_values=alike
            | dict(
                offsets=firsts * self.capacity,
                capacity=self.capacity,
                mode="decode",
                alignment=1,
            ),
            prefill_values=alike | dict(capacity=None, mode="prefill", alignment=alignment),
            default_config=buffer._default,
            learn=rule.learn,
            nowhere=[
                torch.full(asking, -1, dtype=dtype, device=buffer.device)
                for dtype in (torch.int64, torch.int32)
            ],
            no_weights=torch.zeros(asking, dtype=torch.float32, device=buffer.device),
        )
        self.decode: Callable[[Any, Any, Any, bool], ExpertBatch] = calls.decode
        self.begin_decode: Callable[
            [Any, Any, Any, bool], tuple[ExpertBatch, Callable[[], None]]
        ] = calls.begin_decode
        self.prefill: Callable[[Any, Any, Any, bool], ExpertBatch] = calls.prefill
        self.begin_prefill: Callable[[Any, Any, Any, bool], Receive] = calls.begin_prefill
        self.combine: Callable[[Any, Decoded | Prefilled], Tensor] = calls.combine
        self.begin_combine: Callable[
            [Any, Decoded | Prefilled], tuple[Tensor, Callable[[], None]]
        ] = calls.begin_combine
        self.finish: Callable[[Any, Decoded], tuple[Tensor, bool | None]] = calls.finish
        self.use_counters: Callable[[HostCounters | None], None] = calls.use_counters
