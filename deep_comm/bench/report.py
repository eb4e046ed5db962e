"""The tables that `python -m deep_comm.bench` prints."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from deep_comm.bench import host_time
from deep_comm.bench.normal import Measured, Report
from deep_comm.bench.simulation import SimulationReport

COLUMNS = ("operation", "mode", "SMs", "run as", "us", "p50", "p99", "spread", "host us", "wire MB",
           "wire GB/s", "logical GB/s", "% limit")  # fmt: skip
NUM_TEXT_COLUMNS = 4

LEGEND = (
    "us: mean of back-to-back calls behind one more, slowest rank, median of the rounds; "
    "p50, p99: of single calls; spread: between slowest and fastest rank; "
    "host us: time of the calling thread per call, slowest rank (of the fewest tokens the "
    "median of turns that lie apart), w: it waits for counts; "
    "wire: what crosses the busiest link; logical: rows delivered, own ones too; "
    "% limit: of the measured bulk-store all-to-all"
)


def align(rows: Sequence[Sequence[str]], num_text_columns: int) -> str:
    """Columns of equal width: text to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index < num_text_columns else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def table(lines: Sequence[Measured]) -> str:
    return align([COLUMNS, *map(_cells, lines)], NUM_TEXT_COLUMNS)


def _cells(line: Measured) -> list[str]:
    timing = line.timing
    sms = line.sms
    if line.config is not None and line.mode == "ring":
        sms += f" ({line.config[0]}/{line.config[1]})"
    cells = [line.name, line.mode or "-", sms or "-", line.execution]
    cells += [f"{timing.mean_us:.1f}", f"{timing.p50_us:.1f}", f"{timing.p99_us:.1f}"]
    cells += [f"{timing.spread_us:.1f}"]
    cells += ["-" if timing.host_us is None else f"{timing.host_us:.1f}{'w' * line.host_waits}"]
    if line.volume is None:
        return [*cells, "-", "-", "-", "-"]
    cells += [f"{line.volume.wire_bytes / 1e6:.2f}"]
    cells += [f"{line.rate(line.volume.wire_bytes):.2f}"]
    cells += [f"{line.rate(line.volume.logical_bytes):.2f}"]
    share = line.limit_fraction
    return [*cells, "-" if share is None else f"{100 * share:.1f}"]


def ending(report: Report) -> str:
    """What is not a line of a table."""
    rss = ", ".join(f"{num_bytes / 2**20:.0f}" for num_bytes in report.peak_rss_bytes)
    launches = host_time.describe(report.host_references)
    legend = textwrap.fill(LEGEND, 120) + ("" if not launches else f"\n{launches}")
    return f"{legend}\npeak resident memory by rank: {rss} MiB"


def simulation_line(report: SimulationReport) -> str:
    return (
        f"simulation, {report.workload}: {report.runs_per_s:.1f} runs/s "
        f"({report.num_runs} seeds, {report.steps_per_run} steps each)"
    )
