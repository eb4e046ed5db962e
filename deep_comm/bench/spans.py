"""What this rank's GPU did in one call, and when: torch's profiler, without its own calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_NUM_CALLS = 3  # the profiler slows down the first ones


@dataclass(frozen=True)
class Span:
    """A kernel, or a copy by a copy engine."""

    name: str
    stream: int
    is_copy: bool
    begin_us: float  # after the first one of the call
    us: float


def spans_of(events: Iterable[Any]) -> list[Span]:
    """Of the profiler's events, those on a GPU, in the order of their beginnings."""
    found = [event for event in events if event.device_type.name == "CUDA"]
    found.sort(key=lambda event: event.time_range.start)
    return [
        Span(
            event.name, event.device_resource_id, event.name.startswith("Memcpy"),
            event.time_range.start - found[0].time_range.start, event.time_range.elapsed_us(),
        )
        for event in found
    ]  # fmt: skip


def record(call: Callable[[], Any]) -> list[Span]:
    """Of the last of a few calls. Collective; empty without GPUs, or if the profiler sees none."""
    if not torch.cuda.is_available():
        return []
    spans: list[Span] = []
    for _ in range(_NUM_CALLS):
        torch.cuda.synchronize()
        dist.barrier()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize()
        spans = spans_of(profiler.events())
    return spans
