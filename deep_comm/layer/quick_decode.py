"""The two calls of a decode step in one native step each, from the layer's arguments to its
results, and with what "auto" asks behind them.

They do the whole call, or nothing: for whatever is in doubt they return None before anything has
happened, and the layer goes on step by step (transport.py), which names what is wrong. See
csrc/bind/quick_decode.hpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from deep_comm.errors import DeepCommError
from deep_comm.layer.batch import ExpertBatch
from deep_comm.ops import low_latency, quick

if TYPE_CHECKING:
    from deep_comm.buffer import Buffer
    from deep_comm.layer.host_words import HostWords
    from deep_comm.layer.mode import ModeRule
    from deep_comm.layer.shape import MoEShape
    from deep_comm.low_latency_state import LowLatencyShape


class Decoded(NamedTuple):
    """What combine needs of a decode batch."""

    shape: LowLatencyShape
    metadata: Tensor  # of the handle
    num_tokens: int
    topk_idx: Tensor
    exchange: int  # that its ranks have told of; 0: none


class DecodeCalls(NamedTuple):
    """Attributes:
    begin(x, topk_idx, topk_weights, is_asking): an ExpertBatch; with ``is_asking`` all ranks
        learn the most tokens of any: by words where all share a host, else by the device.
    end(rows, state): the sums.
    finish(rows, state): of a step of "auto" that began with decode: the sums, if it may end with
        it, which the rule has learned then; else, and with the rule as it was, they and the most
        tokens of any rank, or None where the words do not say.
    """

    begin: Callable[[Any, Any, Any, bool], ExpertBatch | None]
    end: Callable[[Any, Decoded], Tensor | None]
    finish: Callable[[Any, Decoded], Tensor | tuple[Tensor, int | None] | None]


NEVER = DecodeCalls(quick.never, quick.never, quick.never)


def decode_calls(
    buffer: Buffer,
    shape: MoEShape,
    common: dict[str, Any],
    words: HostWords | None,
    rule: ModeRule,
) -> DecodeCalls:
    """``common``: what is alike in all batches. Of a layer that can decode."""
    state = buffer._low_latency
    native = state.quick_calls
    if native is None or shape.fp8:  # FP8's scales go through torch once more
        return NEVER
    options = (
        shape.num_slots, shape.hidden, shape.num_topk, shape.num_experts,
        False, False, False, False, True, False,
    )  # fmt: skip
    try:
        form = state.shapes.get(options) or low_latency.shape_of(buffer._context, state, options)
    except DeepCommError:  # the first call will say why
        return NEVER
    num_rows = form.num_local * form.num_rows
    begin, end, finish = native.layer(
        shape=form,
        decode_tokens=shape.decode_tokens,
        rows=((num_rows, shape.hidden), (shape.hidden, 1), torch.bfloat16),
        batch_type=ExpertBatch,
        common=common,
        state_type=Decoded,
        words=None if words is None else words.place,
        rule=rule,
    )
    return DecodeCalls(begin, end, finish)
