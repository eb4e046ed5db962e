"""The measured calls: dispatch, combine and the pair, in one kernel each or with hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deep_comm import Buffer
from deep_comm.bench.low_latency.expected import Expected
from deep_comm.bench.low_latency.options import (
    COMBINE,
    DISPATCH,
    PACKED_LATE,
    PAIR,
)
from deep_comm.bench.workload import Volume, volume

KERNELS = {
    (DISPATCH, "fused"): ("dispatch",),
    (DISPATCH, "hooked"): ("dispatch send", "dispatch receive"),
    (COMBINE, "fused"): ("combine",),
    (COMBINE, "hooked"): ("combine send", "combine receive"),
    (PAIR, "fused"): ("dispatch", "combine"),
    (PAIR, "hooked"): ("dispatch send", "dispatch receive", "combine send", "combine receive"),
}
"""What one call launches, in order."""


@dataclass(frozen=True)
class Operation:
    name: str
    phases: str
    call: Callable[[int], Any]  # of a slot
    verify: Callable[[Any, int], bool]  # is this the result of that slot?
    volume: Volume  # payload: rows and their scales
    kernels: tuple[str, ...]


def _volumes(expected: Expected, num_slots: int) -> tuple[Volume, Volume]:
    """Of dispatch and of combine, the mean over the slots: one row for a token and a rank."""
    shape = expected.workload
    there = back = Volume(0, 0)
    for slot in range(num_slots):
        rows = expected.rows_between(slot)
        there += volume(rows, shape.row_bytes)
        back += volume(rows, shape.combine_row_bytes)
    return tuple(  # type: ignore[return-value]
        Volume(total.logical_bytes // num_slots, total.wire_bytes // num_slots)
        for total in (there, back)
    )


class BufferCalls:
    """The calls of one Buffer for one workload in one layout. Collective to make: it dispatches."""

    def __init__(self, buffer: Buffer, expected: Expected, layout: str, num_slots: int) -> None:
        self._buffer = buffer
        self._expected = expected
        self._weights_ahead = layout != PACKED_LATE
        self._volumes = _volumes(expected, num_slots)
        self._handles = [self._dispatch_of(slot, "fused")()[2] for slot in range(num_slots)]

    @property
    def num_blocks(self) -> int:
        """Of a kernel of these calls."""
        shape = self._expected.workload
        return self._buffer.low_latency_num_blocks(
            self._expected.max_tokens, shape.hidden, shape.num_topk, shape.num_experts
        )

    # What a call is given is looked up beforehand: its host time is to be the call's alone.

    def _dispatch_of(self, slot: int, phases: str) -> Callable[[], Any]:
        expected, shape = self._expected, self._expected.workload
        routing = expected.routing(slot)
        return functools.partial(
            self._buffer.low_latency_dispatch,
            expected.x(slot),
            routing.topk_idx,
            expected.max_tokens,
            shape.num_experts,
            use_fp8=shape.dtype == "fp8",
            use_nvfp4=shape.dtype == "nvfp4",
            return_recv_hook=phases == "hooked",
            topk_weights=routing.topk_weights if self._weights_ahead else None,
            compact=expected.is_compact,
        )

    def _combine_of(self, slot: int, phases: str) -> Callable[..., Any]:
        expected = self._expected
        routing = expected.routing(slot)
        return functools.partial(
            self._buffer.low_latency_combine,
            expected.expert_output(slot),
            routing.topk_idx,
            routing.topk_weights,
            use_logfmt=expected.workload.combine_format == "logfmt",
            return_recv_hook=phases == "hooked",
        )

    def operation(self, name: str, phases: str) -> Operation:
        expected, (there, back) = self._expected, self._volumes
        kernels = KERNELS[name, phases]
        slots = range(len(self._handles))
        dispatches = [self._dispatch_of(slot, phases) for slot in slots]
        combines = [self._combine_of(slot, phases) for slot in slots]

        def dispatch(slot: int) -> Any:
            result = dispatches[slot]()
            if result[4] is not None:
                result[4]()
            return result

        def combine_with(slot: int, handle: Any) -> Any:
            result = combines[slot](handle=handle)
            if result[2] is not None:
                result[2]()
            return result

        def combine(slot: int) -> Any:
            return combine_with(slot, self._handles[slot])

        def pair(slot: int) -> Any:
            return combine_with(slot, dispatch(slot)[2])

        if name == DISPATCH:
            return Operation(name, phases, dispatch, expected.dispatch_is_right, there, kernels)
        if name == COMBINE:
            return Operation(name, phases, combine, expected.combined_is_right, back, kernels)
        return Operation(name, phases, pair, expected.combined_is_right, there + back, kernels)
