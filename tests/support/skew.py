"""A rank that comes late to one kind of operation, on any target."""

from __future__ import annotations

import time
from typing import Any

import torch
from cases import Case
from roundtrip import Received, call_once

import deep_comm

STAGES = ("get_dispatch_layout", "dispatch", "cached_dispatch", "combine")
DELAY_S = 0.05


class LateBuffer:
    """A Buffer whose operations of one stage begin ``DELAY_S`` late on this rank.

    On a GPU the stream is late, not the host: peers' kernels run and wait.
    """

    def __init__(self, buffer: deep_comm.Buffer, stage: str) -> None:
        self._buffer = buffer
        self._stage = stage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)

    def _late(self, stage: str) -> None:
        if stage != self._stage:
            return
        if self._buffer.device.type == "cuda":
            torch.cuda._sleep(int(DELAY_S * 1.8e9))  # cycles
        else:
            time.sleep(DELAY_S)

    def get_dispatch_layout(self, *args: Any, **options: Any) -> Any:
        self._late("get_dispatch_layout")
        return self._buffer.get_dispatch_layout(*args, **options)

    def dispatch(self, *args: Any, **options: Any) -> Any:
        self._late("dispatch" if options.get("handle") is None else "cached_dispatch")
        return self._buffer.dispatch(*args, **options)

    def combine(self, *args: Any, **options: Any) -> Any:
        self._late("combine")
        return self._buffer.combine(*args, **options)


def cases(num_ranks: int) -> list[Case]:
    """Rings and direct mode; equal load, all to one rank, and one rank that
    neither sends nor receives.
    """
    shapes = dict(
        hidden=128, experts=num_ranks * 2, topk=2, num_sms=4, slots=3, send_chunk=2, calls=2
    )
    busy = tuple(20 + 3 * rank for rank in range(num_ranks))
    idle = (*busy[:-1], 0)
    made = []
    for direct_bytes in (0, 4 << 20):
        common = dict(shapes, direct_bytes=direct_bytes, nvl_bytes=16 << 20)
        made += [
            Case(busy, **common, seed=1),
            Case(busy, **common, routing="one_expert", seed=2),
            # All to the last expert, and the first rank has nothing to send.
            Case(idle[::-1], **common, routing="one_expert", fused_layout=True, seed=3),
            Case(idle, **common, routing="skewed", fused_layout=True, seed=4),
        ]
    return made


def run_late(
    group: Any, device: torch.device | str, num_ranks: int, stages: tuple[str, ...] = STAGES
) -> list[tuple[Case, list[Received]]]:
    """Every case with every rank late at every stage in turn, in as few
    Buffers as there are sizes.
    """
    results = []
    for case in cases(num_ranks):
        with deep_comm.Buffer(
            group, case.nvl_bytes, device=device, timeout_s=60, num_direct_bytes=case.direct_bytes
        ) as buffer:
            for stage in stages:
                for late_rank in range(num_ranks):
                    late = LateBuffer(buffer, stage if buffer.rank == late_rank else "none")
                    results.append(
                        (case, [call_once(late, case, call) for call in range(case.calls)]),
                    )  # fmt: skip
    return results
