"""From a call to a picture: which kernels ran when, on which stream of the GPU."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

RANGE = "deep_comm: "
"""Begins the names of ranges in which the host target communicates."""

_COMMUNICATION = ("deep_comm", "nccl", "Memcpy PtoP")  # in names of kernels, ranges and copies

COLOURS = {True: "#d1495b", False: "#30638e"}  # communication, computation

MISSING = "matplotlib is not installed: no PNG was written (pip install matplotlib)"
HOST_LANES = {"communication": 0, "computation": 1}
"""Lanes of the host target: what its one thread did, as there are no streams."""


@dataclass(frozen=True)
class Span:
    """A kernel on a GPU, or an operation of the host target; microseconds since the first one."""

    name: str
    stream: int
    begin_us: float
    end_us: float

    @property
    def is_communication(self) -> bool:
        return any(it in self.name for it in _COMMUNICATION)


def record(file: Path, call: Callable[[], Any], on_gpu: bool) -> list[Span]:
    """What torch's profiler saw of a call. Its Chrome trace goes to ``file``."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    # Not both: notes of every operator would slow the host down, and with it what it queues.
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        call()
        if on_gpu:
            torch.cuda.synchronize()
    seen.export_chrome_trace(str(file))
    return device_spans(file) if on_gpu else host_spans(file)


def last_of(spans: Sequence[Span], num_calls: int) -> list[Span]:
    """Those of the last of so many equal calls, counted from its begin. Raises ValueError unless
    every call has spans of the same names, and all of them begin before the next call's.
    """
    each = len(spans) // num_calls
    parts = [spans[at : at + each] for at in range(0, len(spans), max(each, 1))]
    kept = parts[-1] if parts else []
    names = [sorted(it.name for it in part) for part in parts]
    if len(parts) != num_calls or any(it != names[0] for it in names):
        raise ValueError(f"{len(spans)} spans are not those of {num_calls} equal calls in turn")
    return [
        replace(it, begin_us=it.begin_us - kept[0].begin_us, end_us=it.end_us - kept[0].begin_us)
        for it in kept
    ]


def _spans(found: Sequence[tuple[str, int, float, float]]) -> list[Span]:
    """Of names, lanes, begins and durations."""
    start = min((begin for _, _, begin, _ in found), default=0.0)
    spans = [
        Span(name, lane, begin - start, begin - start + duration)
        for name, lane, begin, duration in found
    ]
    return sorted(spans, key=lambda span: span.begin_us)


def _complete_events(trace: Path) -> list[dict[str, Any]]:
    events = json.loads(trace.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def device_spans(trace: Path) -> list[Span]:
    """Kernels, copies and fills of the GPU in a trace of torch.profiler; none without a GPU."""
    return _spans(
        [
            (
                str(event["name"]),
                int(event["args"]["stream"]),
                float(event["ts"]),
                float(event["dur"]),
            )
            for event in _complete_events(trace)
            if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
            and "stream" in event.get("args", {})
        ]
    )


def host_spans(trace: Path) -> list[Span]:
    """Ranges named ``deep_comm: ...`` (communication) and torch's
    outermost operators outside them.
    """
    events = [
        event
        for event in _complete_events(trace)
        if event.get("cat") in ("user_annotation", "cpu_op")
    ]
    events.sort(key=lambda event: (float(event["ts"]), -float(event["dur"])))
    found: list[tuple[str, int, float, float]] = []
    covered_until: dict[Any, float] = {}  # by thread: what lies within is part of an event before
    for event in events:
        name, begin, duration = str(event["name"]), float(event["ts"]), float(event["dur"])
        is_communication = name.startswith(RANGE)
        if begin < covered_until.get(event.get("tid"), 0.0) or (
            event["cat"] == "user_annotation" and not is_communication
        ):
            continue
        covered_until[event.get("tid")] = begin + duration
        lane = HOST_LANES["communication" if is_communication else "computation"]
        found.append((name, lane, begin, duration))
    return _spans(found)


def _union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.begin_us):
        if joined and span.begin_us <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], span.end_us))
        else:
            joined.append((span.begin_us, span.end_us))
    return joined


def overlapped_share(spans: Sequence[Span]) -> float:
    """Of the time in which communication runs, the part in which computation runs too."""
    communication = _union(span for span in spans if span.is_communication)
    computation = _union(span for span in spans if not span.is_communication)
    total = sum(end - begin for begin, end in communication)
    both = sum(
        max(0.0, min(end, other_end) - max(begin, other_begin))
        for begin, end in communication
        for other_begin, other_end in computation
    )
    return both / total if total > 0 else 0.0


def summary(spans: Sequence[Span]) -> str:
    communication = _union(span for span in spans if span.is_communication)
    computation = _union(span for span in spans if not span.is_communication)
    total_ms = [
        sum(end - begin for begin, end in parts) / 1e3 for parts in (communication, computation)
    ]
    return (
        f"{max(span.end_us for span in spans) / 1e3:.2f} ms; communication {total_ms[0]:.2f} ms, "
        f"of which {overlapped_share(spans):.0%} hidden behind computation ({total_ms[1]:.2f} ms)"
    )


def _lane_name(stream: int, spans: Sequence[Span], on_host: bool) -> str:
    if on_host:
        return next(name for name, lane in HOST_LANES.items() if lane == stream)
    kinds = {span.is_communication for span in spans if span.stream == stream}
    kind = "both" if len(kinds) > 1 else "comm" if kinds == {True} else "compute"
    return f"stream {stream} ({kind})"


def write(file: Path, ways: dict[str, Sequence[Span]], on_host: bool) -> bool:
    """One panel a way, a lane for each stream, all on one scale of time; as PNG, SVG or PDF, by the
    file's name. False: no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    lanes = {way: sorted({span.stream for span in spans}) for way, spans in ways.items()}
    figure, panels = pyplot.subplots(
        len(ways), 1, squeeze=False, sharex=True, layout="constrained",
        figsize=(13, sum(1.0 + 0.45 * len(streams) for streams in lanes.values()) + 0.6),
    )  # fmt: skip
    for panel, (way, spans) in zip(panels[:, 0], ways.items(), strict=True):
        for row, stream in enumerate(lanes[way]):
            for is_communication in (True, False):
                bars = [
                    (span.begin_us / 1e3, (span.end_us - span.begin_us) / 1e3)
                    for span in spans
                    if span.stream == stream and span.is_communication == is_communication
                ]
                panel.broken_barh(bars, (row - 0.4, 0.8), color=COLOURS[is_communication])
        names = [_lane_name(stream, spans, on_host) for stream in lanes[way]]
        panel.set_yticks(range(len(names)), names)
        panel.invert_yaxis()
        panel.set_title(f"{way}: {summary(spans)}", loc="left", fontsize=10)
    panels[-1, 0].set_xlabel("milliseconds")
    figure.legend(
        handles=[
            Patch(color=COLOURS[True], label="communication"),
            Patch(color=COLOURS[False], label="computation"),
        ],
        loc="outside upper right", ncols=2,
    )  # fmt: skip
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    return True
