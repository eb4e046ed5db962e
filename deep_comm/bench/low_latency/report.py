"""The lines of the low-latency bench, and the table that it prints of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deep_comm.bench.host_time import Reference
from deep_comm.bench.link import LinkLimit
from deep_comm.bench.measure import Timing
from deep_comm.bench.report import align
from deep_comm.bench.workload import Volume, Workload

COLUMNS = ("operation", "layout", "dtype", "phases", "run as", "SMs", "tokens", "us", "p50", "p99",
           "spread", "host us", "wire kB", "floor us", "kernels us")  # fmt: skip
NUM_TEXT_COLUMNS = 5

LEGEND = (
    "us: mean of back-to-back calls behind one more, slowest rank, median of the rounds; "
    "p50, p99: of single calls (of graphs of one call, the distance between graphs included); "
    "spread: between slowest and fastest rank; host us: time of the calling "
    "thread, of at most 16 tokens the median of turns that lie apart; "
    "wire: rows and scales that cross the busiest link; floor: those bytes at the measured link "
    "limit; kernels: medians of the profiler, in a graph where one was made, waits for peers "
    "included; fp8, nvfp4: cast in it; logfmt: combine's rows travel in LogFMT-10"
)


@dataclass(frozen=True)
class Line:
    workload: Workload
    name: str
    layout: str  # "" for rivals
    phases: str  # "" for rivals
    execution: str
    num_blocks: int | None
    max_tokens: int
    timing: Timing
    volume: Volume
    floor_us: float | None
    kernels_us: dict[str, float]
    is_rival: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "layout": self.layout,
            "phases": self.phases,
            "execution": self.execution,
            "workload": self.workload.describe(),
            "num_tokens": self.workload.num_tokens,
            "max_tokens": self.max_tokens,
            "dtype": self.workload.dtype,
            "combine_format": self.workload.combine_format,
            "num_blocks": self.num_blocks,
            "is_rival": self.is_rival,
            **self.timing.to_json(),
            "wire_bytes": self.volume.wire_bytes,
            "logical_bytes": self.volume.logical_bytes,
            "floor_us": self.floor_us,
            "kernels_us": self.kernels_us,
        }


@dataclass(frozen=True)
class Report:
    limit: LinkLimit | None
    ranks_per_node: int | None = None  # None: one node
    rail: str | None = None  # what was asked for
    lines: list[Line] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    host_references: list[Reference] = field(default_factory=list)


def table(lines: Sequence[Line]) -> str:
    return align([COLUMNS, *map(_cells, lines)], NUM_TEXT_COLUMNS)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _cells(line: Line) -> list[str]:
    timing = line.timing
    dtype = line.workload.dtype
    if line.workload.combine_format != "bf16":
        dtype += f", {line.workload.combine_format}"
    cells = [line.name, line.layout or "-", dtype, line.phases or "-", line.execution]
    cells += ["-" if line.num_blocks is None else str(line.num_blocks)]
    cells += [str(line.workload.num_tokens)]
    values = (timing.mean_us, timing.p50_us, timing.p99_us, timing.spread_us, timing.host_us)
    cells += map(_number, values)
    cells += [f"{line.volume.wire_bytes / 1e3:.1f}", _number(line.floor_us)]
    return [*cells, " + ".join(f"{time:.1f}" for time in line.kernels_us.values()) or "-"]
