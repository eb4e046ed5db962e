"""The calls of a decode step: low-latency calls from the layer's arguments to its batch and back,
and with what "auto" asks after them. See csrc/bind/calls_layer_decode.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from deep_comm import _core
from deep_comm.layer.batch import ExpertBatch

if TYPE_CHECKING:
    from deep_comm._core import Decoded
    from deep_comm.buffer import Buffer
    from deep_comm.layer.host_words import HostWords
    from deep_comm.layer.mode import ModeRule
    from deep_comm.layer.shape import MoEShape


class DecodeCalls(NamedTuple):
    """All return None, and have done nothing, for what the layer has rules of its own about: it
    names what is wrong, or goes on with the Buffer's calls (transport.py).

    Attributes:
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


def never(*arguments: object) -> None:
    """In the place of a native call that there is not."""


NEVER = DecodeCalls(never, never, never)


def decode_calls(
    buffer: Buffer,
    shape: MoEShape,
    common: dict[str, Any],
    words: HostWords | None,
    rule: ModeRule,
) -> DecodeCalls:
    """``common``: what is alike in all batches. Of a layer that can decode."""
    if shape.fp8:  # FP8's scales go through torch once more
        return NEVER
    begin, end, finish = _core.layer_decode(
        low_latency=buffer._low_latency,
        num_slots=shape.num_slots,
        hidden=shape.hidden,
        num_topk=shape.num_topk,
        num_experts=shape.num_experts,
        decode_tokens=shape.decode_tokens,
        batch_of=ExpertBatch.of,
        common=common,
        words=None if words is None else words.place,
        learn=rule.learn,
    )
    return DecodeCalls(begin, end, finish)
