"""Chrome's trace format: a process a rank, a thread a block, a slice a call and one a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deep_comm import _core
from deep_comm.trace.alignment import Alignment
from deep_comm.trace.recording import Event, Recording


def _blocks(recording: Recording) -> dict[tuple[str, int, int], list[Event]]:
    found: dict[tuple[str, int, int], list[Event]] = {}
    for event in recording.events:
        found.setdefault((event.kernel, event.call, event.block), []).append(event)
    return found


def _slices(events: Sequence[Event], pid: int, to_us: Any) -> list[dict[str, Any]]:
    """Of one block in one call: the whole, and in it from each step to the next."""
    first, last = events[0], events[-1]
    place = {"ph": "X", "pid": pid, "tid": first.block}

    def piece(name: str, begin: Event, end: Event, **args: Any) -> dict[str, Any]:
        start_us = to_us(begin.time_ns)
        return {**place, "name": name, "ts": start_us, "dur": to_us(end.time_ns) - start_us,
                "args": {"call": first.call, **args}}  # fmt: skip

    slices = [piece(f"{first.kernel} {first.call}", first, last)]
    for begin, end in zip(events, events[1:], strict=False):
        args: dict[str, Any] = {"value": end.value}
        if end.step == "gave_up":
            args = dict(zip(("stage", "word", "peer"), _core.trace_wait(end.value), strict=True))
        slices.append(piece(f"until {end.step}", begin, end, **args))
    return slices


def chrome_trace(
    recordings: Sequence[Recording], alignments: Mapping[str, Alignment]
) -> dict[str, Any]:
    """The JSON object, for chrome://tracing or ui.perfetto.dev. ``alignments``: by Buffer.

    Time 0 is the first note of all.
    """
    shifts = [alignments[each.buffer].offsets_ns[each.rank] for each in recordings]
    begin_ns = min(
        (event.time_ns + shift for each, shift in zip(recordings, shifts, strict=True)
         for event in each.events[:1]),
        default=0.0,
    )  # fmt: skip
    buffers = list(dict.fromkeys(each.buffer for each in recordings))
    out: list[dict[str, Any]] = []
    for recording, shift in zip(recordings, shifts, strict=True):
        pid = buffers.index(recording.buffer) * 1000 + recording.rank
        name = f"rank {recording.rank}"
        name += f", Buffer {recording.buffer}" if len(buffers) > 1 else ""
        out.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})

        def to_us(time_ns: int, shift: float = shift) -> float:
            return (time_ns + shift - begin_ns) / 1e3

        blocks = _blocks(recording)
        for block in sorted({block for _, _, block in blocks}):
            args = {"name": f"block {block:03d}"}
            out.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": block, "args": args})
        for events in blocks.values():
            out += _slices(events, pid, to_us)
    errors = {buffer: alignments[buffer].errors_ns for buffer in buffers}
    finite = {buffer: {rank: error for rank, error in of.items() if error < float("inf")}
              for buffer, of in errors.items()}  # fmt: skip
    return {"traceEvents": out, "displayTimeUnit": "ns", "otherData": {"clock_errors_ns": finite}}
