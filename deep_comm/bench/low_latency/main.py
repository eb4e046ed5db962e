"""What `python -m deep_comm.bench --mode low-latency` does on a rank, and with its figures."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable

import torch
import torch.distributed as dist

from deep_comm.bench import host_time, machine
from deep_comm.bench import targets as verdicts_of
from deep_comm.bench.low_latency import report, targets
from deep_comm.bench.low_latency.options import Options
from deep_comm.bench.low_latency.report import Line, Report
from deep_comm.bench.low_latency.runner import Runner


def run_rank(chosen: Options, device: torch.device, say: Callable[[str], None]) -> Report:
    def on_lines(lines: list[Line]) -> None:
        say(report.table(lines))

    runner = Runner(chosen, device, say)
    return runner.run(chosen.scenarios_of(dist.get_world_size()), on_lines)


def publish(chosen: Options, figures: Report, num_ranks: int, elapsed_s: float) -> None:
    """Everything after the tables, which rank 0 has printed while they grew."""
    print("\n" + textwrap.fill(report.LEGEND, 120))
    if figures.host_references:
        print(host_time.describe(figures.host_references))
    timings = [line.timing for line in targets.host_lines(figures.lines)]
    if turns := host_time.describe_largest("host time of a call", timings):
        print(turns)
    verdicts = targets.judge(figures.lines, num_ranks)
    if chosen.device == "cuda" and any(verdict.measured is not None for verdict in verdicts):
        print(f"\ntargets on {num_ranks} GPUs (set for H200)\n{verdicts_of.table(verdicts)}")
    if chosen.json is not None:
        document = {
            **machine.heading(chosen.device, chosen.command, num_ranks),
            "ranks_per_node": figures.ranks_per_node,
            "rail": figures.rail,
            "effort": {**vars(chosen.effort), "calls_per_graph": chosen.calls_per_graph},
            "limit": None if figures.limit is None else figures.limit.to_json(),
            "low_latency": [line.to_json() for line in figures.lines],
            "notes": figures.notes,
            "host_references": [each.to_json() for each in figures.host_references],
            "targets": [verdict.to_json() for verdict in verdicts],
        }
        chosen.json.write_text(json.dumps(document, indent=2) + "\n")
    print(f"measured in {elapsed_s:.0f} s", flush=True)
