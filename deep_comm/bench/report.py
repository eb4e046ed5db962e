"""What a run has found, the tables that it prints, and the JSON that it writes."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import deep_comm
from deep_comm.bench import nodes, plot, simulation, targets
from deep_comm.bench.line import Line
from deep_comm.bench.link import LinkLimit
from deep_comm.bench.measure import CALLS_PER_GRAPH, NUM_TURNS
from deep_comm.bench.options import Options
from deep_comm.bench.tables import align


@dataclass
class Report:
    limit: LinkLimit | None = None
    lines: list[Line] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rows_received: dict[str, list[int]] = field(default_factory=dict)  # by workload: by rank
    peak_rss_bytes: list[int] = field(default_factory=list)  # by rank
    rail: list[dict[str, Any]] = field(default_factory=list)  # nodes.rail_count()
    launch_times: list[dict[str, Any]] = field(default_factory=list)
    ranks_per_node: int | None = None  # None: one node


# ---- tables --------------------------------------------------------------------------------------

# Column: key in JSON, factor, digits.
_NUMBERS: dict[str, tuple[str, float, int]] = {
    "tokens": ("num_tokens", 1, 0), "time us": ("mean_us", 1, 1), "p50": ("p50_us", 1, 1),
    "p99": ("p99_us", 1, 1), "spread": ("spread_us", 1, 1), "host us": ("host_us", 1, 1),
    "wire MB": ("wire_bytes", 1e-6, 2), "wire kB": ("wire_bytes", 1e-3, 1),
    "size B": ("logical_bytes", 1, 0),
    "algbw": ("logical_gb_per_s", 1, 2), "busbw": ("wire_gb_per_s", 1, 2),
    "% limit": ("fraction_of_limit", 100, 1), "floor us": ("floor_us", 1, 1),
    "rail MB": ("rail_bytes", 1e-6, 2), "rail GB/s": ("rail_gb_per_s", 1, 2),
    "% rail": ("rail_share", 100, 1), "#wrong": ("num_wrong", 1, 0),
}  # fmt: skip
NORMAL = ["operation", "mode", "SMs", "run as", "size B", "time us", "p50", "p99", "spread",
          "host us", "wire MB", "algbw", "busbw", "% limit", "#wrong"]  # fmt: skip
RAIL = ["rail MB", "rail GB/s", "% rail"]
LOW_LATENCY = ["operation", "layout", "dtype", "phases", "run as", "SMs", "tokens", "size B",
               "time us", "p50", "p99", "spread", "host us", "wire kB", "algbw", "busbw",
               "floor us", "#wrong", "kernels us"]  # fmt: skip
LEGEND = (
    "Columns as in nccl-tests. size: rows delivered, own ones too; algbw: size over time; busbw: "
    "wire over time; both in GB/s; #wrong: elements that differ from the reference: a run ends at "
    "the first. time us: mean of back-to-back calls after one more, slowest rank, median of the "
    "rounds; p50, p99: of single calls, in low-latency mode of graphs of one call, the distance "
    "between graphs included; spread: between slowest and fastest rank; host us: time of the "
    "calling thread per call, slowest rank (of few tokens the median of turns that lie apart), w: "
    "it waits for counts; wire: what crosses the busiest link; % limit: of the measured "
    "bulk-store all-to-all; floor: wire bytes at that limit; rail: what the busiest rail carried; "
    "% rail: share of the time for which that keeps a rail of --gb-per-s busy; kernels: medians "
    "of the profiler, waits for peers included"
)


def _cells(line: Line, columns: Sequence[str]) -> list[str]:
    found, shape = line.to_json(), line.workload
    formats = (shape.dtype, shape.combine_format.replace("bf16", ""))
    sms = line.sms or str(line.num_sms or "")
    if line.mode == "ring" and line.config is not None:
        sms += f" ({line.config[0]}/{line.config[1]})"
    texts = {
        "operation": line.name, "mode": line.mode, "layout": line.layout, "phases": line.phases,
        "dtype": ", ".join(filter(None, formats)), "run as": line.execution, "SMs": sms,
        "kernels us": " + ".join(f"{us:.1f}" for us in line.kernels_us.values()),
    }  # fmt: skip
    for column, (key, factor, digits) in _NUMBERS.items():
        if found.get(key) is not None:
            texts[column] = f"{found[key] * factor:.{digits}f}"
            texts[column] += "w" * (column == "host us" and line.host_waits)
    return [texts.get(column) or "-" for column in columns]


def table(lines: Sequence[Line]) -> str:
    columns = NORMAL if lines[0].max_tokens is None else LOW_LATENCY
    if any(line.rail_bytes is not None for line in lines):
        columns = columns + RAIL
    rows = [columns, *(_cells(line, columns) for line in lines)]
    return align(rows, 4 if lines[0].max_tokens is None else 5)


def _host_times(options: Options, report: Report) -> str:
    """Sentences about launches, and about the forms whose median a target judges."""
    launches = ", ".join(
        f"{it['name']} {it['slowest_us']:.1f} ({it['fastest_us']:.1f})"
        for it in report.launch_times
    )
    text = ""
    if launches:
        text = (
            f"host time of a launch here, µs, slowest rank (fastest): {launches}; a call without a "
            "host wait is one launch, with num_worst_tokens two\n"
        )
    timings = [it.timing for it in targets.host_lines(report.lines, options.family)]
    turned = [
        (it.host_us or 0.0, it.largest_host_us) for it in timings if it.largest_host_us is not None
    ]
    if turned:
        medians = ", ".join(f"{median:.1f}" for median, _ in sorted(turned))
        text += (
            f"host time of a call without a host wait: medians of {NUM_TURNS} turns, slowest rank, "
            f"by form: {medians} µs; the largest turn of any form and rank "
            f"{max(largest for _, largest in turned):.1f}\n"
        )
    return text


# ---- the end of a run ----------------------------------------------------------------------------


def machine(device: str) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "deep_comm": deep_comm.__version__, "torch": torch.__version__,
        "python": platform.python_version(), "cores": os.cpu_count(), "device": device,
    }  # fmt: skip
    if device == "cuda":
        facts |= {
            "gpu": torch.cuda.get_device_name(), "num_gpus": torch.cuda.device_count(),
            "cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "nccl_nvls_enable": os.environ.get("NCCL_NVLS_ENABLE", "0"),
        }  # fmt: skip
    return facts


def commit(package: Path) -> str | None:
    """Of the checkout that has this folder, with "-dirty" where files differ from it, or of the
    repository that pip took the package from; None: neither."""
    git = ["git", "-C", str(package)]
    is_there = [*git, "ls-files", "--error-unmatch", "__init__.py"]  # not another project's
    describe = [*git, "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        subprocess.run(is_there, capture_output=True, check=True)
        return subprocess.run(describe, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pass
    try:
        found = metadata.distribution("deep_comm").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    taken: str = json.loads(found or "{}").get("vcs_info", {}).get("commit_id", "")
    return taken[:7] or None


def heading(options: Options, num_ranks: int) -> dict[str, Any]:
    """What every JSON document of a bench begins with: where, how, when, with how many ranks."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {"machine": machine(options.device), "command": options.command,
            "date": now.isoformat(timespec="seconds"),
            "commit": commit(Path(deep_comm.__file__).parent), "num_ranks": num_ranks}  # fmt: skip


def write(options: Options, document: dict[str, Any], *, with_plot: bool = True) -> None:
    """Into the files that were asked for."""
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    if options.plot is not None and with_plot:
        plot.draw(plot.picture_of(document), options.plot)


def publish(options: Options, report: Report, num_ranks: int) -> str:
    """Everything after the tables, which rank 0 has printed while they grew; and its gist."""
    rss = ", ".join(f"{num_bytes / 2**20:.0f}" for num_bytes in report.peak_rss_bytes)
    print(f"\n{textwrap.fill(LEGEND, 120)}\n{_host_times(options, report)}peak resident memory by "
          f"rank: {rss} MiB")  # fmt: skip
    verdicts = targets.judge(report.lines, num_ranks, options.family)
    if options.on_gpu and any(verdict["measured"] is not None for verdict in verdicts):
        print(f"\ntargets on {num_ranks} GPUs (set for H200)\n{targets.table(verdicts)}")
    ratios = nodes.ratios(report.lines)
    if report.rail:
        print("\n" + nodes.describe(ratios, report.rail))
    simulated = None
    if options.simulation_runs:
        simulated = simulation.run(options.simulation_runs)
        print(
            f"simulation, {simulated['workload']}: {simulated['runs_per_s']:.1f} runs/s "
            f"({simulated['num_runs']} seeds, {simulated['steps_per_run']} steps each)"
        )
    is_low_latency = options.family == "low-latency"
    document = {
        **heading(options, num_ranks),
        "effort": asdict(options.effort) | {"calls_per_graph": CALLS_PER_GRAPH},
        "ranks_per_node": report.ranks_per_node,
        "limit": None if report.limit is None else report.limit.to_json(),
        "low_latency" if is_low_latency else "normal": [it.to_json() for it in report.lines],
        "notes": report.notes,
        "host_references": report.launch_times,
        "rows_received": report.rows_received,
        "peak_rss_bytes": report.peak_rss_bytes,
        "targets": verdicts,
        "two_tier": ratios,
        "rail": options.rail if is_low_latency else report.rail,
        "simulation": simulated,
    }
    write(options, document)
    rates = [found["wire_gb_per_s"] for it in report.lines
             if not it.is_rival and "wire_gb_per_s" in (found := it.to_json())]  # fmt: skip
    mean = sum(rates) / max(1, len(rates))
    return f"{len(report.lines)} lines, 0 wrong, average busbw {mean:.2f} GB/s"
