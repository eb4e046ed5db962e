"""From a Chrome trace to a picture: which kernels ran when, on which stream of the GPU."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

COLOURS = {True: "#d1495b", False: "#30638e"}  # communication, computation
_WIDTH, _ROW, _LEFT, _TOP = 1200, 28, 90, 50


@dataclass(frozen=True)
class Span:
    """A kernel on a GPU; microseconds since the first one."""

    name: str
    stream: int
    begin_us: float
    end_us: float

    @property
    def is_communication(self) -> bool:
        return "deep_comm" in self.name


def device_spans(trace: Path) -> list[Span]:
    """Kernels, copies and fills of the GPU in a trace of torch.profiler; none without a GPU."""
    events = json.loads(trace.read_text())["traceEvents"]
    found = [
        event
        for event in events
        if event.get("ph") == "X"
        and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        and "stream" in event.get("args", {})
    ]
    start = min((float(event["ts"]) for event in found), default=0.0)
    spans = [
        Span(
            str(event["name"]),
            int(event["args"]["stream"]),
            float(event["ts"]) - start,
            float(event["ts"]) - start + float(event["dur"]),
        )
        for event in found
    ]
    return sorted(spans, key=lambda span: span.begin_us)


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


def draw(spans: Sequence[Span], title: str) -> str:
    """An SVG with a row for each stream; red communicates, blue computes."""
    streams = sorted({span.stream for span in spans})
    last = max(span.end_us for span in spans)
    scale = (_WIDTH - _LEFT - 10) / last
    height = _TOP + _ROW * len(streams) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="18" font-size="14">{html.escape(title)}: {last / 1e3:.2f} ms, '
        f"{overlapped_share(spans):.0%} of communication beside computation</text>",
    ]
    for number, (text, is_communication) in enumerate(
        (("communication", True), ("computation", False))
    ):
        x = 10 + 130 * number
        parts.append(
            f'<rect x="{x}" y="28" width="12" height="12" fill="{COLOURS[is_communication]}"/>'
        )
        parts.append(f'<text x="{x + 18}" y="38">{text}</text>')
    for row, stream in enumerate(streams):
        parts.append(f'<text x="10" y="{_TOP + _ROW * row + 18}">stream {stream}</text>')
    for span in spans:
        y = _TOP + _ROW * streams.index(span.stream) + 3
        width = max(0.5, (span.end_us - span.begin_us) * scale)
        parts.append(
            f'<rect x="{_LEFT + span.begin_us * scale:.2f}" y="{y}" width="{width:.2f}" '
            f'height="{_ROW - 6}" fill="{COLOURS[span.is_communication]}">'
            f"<title>{html.escape(span.name[:120])}: {span.begin_us:.1f} to {span.end_us:.1f} us"
            "</title></rect>"
        )
    ticks = 10
    for tick in range(ticks + 1):
        time_us = last * tick / ticks
        x = _LEFT + time_us * scale
        parts.append(
            f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle">{time_us / 1e3:.2f} ms</text>'
        )
    return "\n".join([*parts, "</svg>", ""])
