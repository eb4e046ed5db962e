"""The table that `python -m deep_comm.bench` prints."""

from __future__ import annotations

from deep_comm.bench.normal import NormalReport
from deep_comm.bench.simulation import SimulationReport

COLUMNS = ("operation", "p50 us", "p99 us", "min us", "rank spread us", "logical MB", "wire MB",
           "logical GB/s", "wire GB/s")  # fmt: skip


def normal_table(report: NormalReport) -> str:
    rows = [list(COLUMNS)]
    for line in report.lines:
        timing, moved = line.timing, line.volume
        row = [line.name, f"{timing.p50_us:.1f}", f"{timing.p99_us:.1f}", f"{timing.min_us:.1f}"]
        row += [f"{timing.spread_us:.1f}"]
        if moved.logical_bytes:
            row += [f"{moved.logical_bytes / 1e6:.2f}", f"{moved.wire_bytes / 1e6:.2f}"]
            row += [f"{line.rate(moved.logical_bytes):.2f}", f"{line.rate(moved.wire_bytes):.2f}"]
        else:
            row += ["-"] * 4
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells))
    rss = ", ".join(f"{num_bytes / 2**20:.0f}" for num_bytes in report.peak_rss_bytes)
    counts = ", ".join(str(count) for count in report.counts)
    lines.append(f"rows received by rank: {counts}")
    lines.append(f"peak resident memory by rank: {rss} MiB")
    return "\n".join(lines)


def simulation_line(report: SimulationReport) -> str:
    return (
        f"simulation, {report.workload}: {report.runs_per_s:.1f} runs/s "
        f"({report.num_runs} seeds, {report.steps_per_run} steps each)"
    )
