"""``python -m deep_comm.bench``: dispatch and combine, timed after they have been checked.

Under torchrun every process is a rank; else the ranks are started here. What is measured is chosen
in `deep_comm.bench.options` (low-latency mode: `deep_comm.bench.low_latency`; ExpertParallel:
`deep_comm.bench.layer`), timed as `deep_comm.bench.measure` says and counted as
`deep_comm.bench.workload` says.
"""

from __future__ import annotations

import datetime
import faulthandler
import gc
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from deep_comm import processes
from deep_comm.bench import (
    host_time,
    layer,
    layer_options,
    machine,
    normal,
    options,
    plot,
    report,
    simulation,
    targets,
    two_tier,
    two_tier_report,
)
from deep_comm.bench.layer_options import Options as LayerOptions
from deep_comm.bench.low_latency import main as low_latency
from deep_comm.bench.low_latency import options as low_latency_options
from deep_comm.bench.low_latency.options import Options as LowLatencyOptions
from deep_comm.bench.options import Options
from deep_comm.bench.workload import Workload

GROUP_TIMEOUT = datetime.timedelta(seconds=180)


AnyOptions = Options | LowLatencyOptions | LayerOptions


def run_rank(_group: Any, chosen: AnyOptions) -> Any:
    """One rank, however it was started. The default group carries rendezvous and statistics."""
    # Everything is collected before each timing; what the imports have left, 0.1 s a time, stays.
    gc.freeze()
    # Everything that waits has a limit of its own; this one is for what nobody thought of.
    faulthandler.dump_traceback_later(chosen.deadline_s, exit=True)
    try:
        return _run_rank(chosen)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _run_rank(chosen: AnyOptions) -> Any:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if chosen.device == "cuda":
        # NVLink multicast stays off unless the user asks for it.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    if isinstance(chosen, LowLatencyOptions):
        return low_latency.run_rank(chosen, device, say)
    if isinstance(chosen, LayerOptions):
        return layer.run_rank(chosen, device, say)

    def on_lines(lines: list[normal.Measured]) -> None:
        say(report.table(lines))

    scenarios = chosen.scenarios_of(num_ranks, two_tier.discovered())
    return normal.Runner(chosen, device, say).run(scenarios, on_lines)


def publish(chosen: AnyOptions, figures: Any, num_ranks: int, elapsed_s: float) -> None:
    """Everything after the tables, which rank 0 has printed while they grew."""
    if isinstance(chosen, LowLatencyOptions):
        return low_latency.publish(chosen, figures, num_ranks, elapsed_s)
    if isinstance(chosen, LayerOptions):
        return layer.publish(chosen, figures, num_ranks, elapsed_s)
    print("\n" + report.ending(figures))
    timings = [line.timing for line in targets.host_lines(figures.lines)]
    if turns := host_time.describe_largest("host time of a call without a host wait", timings):
        print(turns)
    verdicts = targets.judge(figures.lines, num_ranks)
    if chosen.device == "cuda" and any(verdict.measured is not None for verdict in verdicts):
        print(f"\ntargets on {num_ranks} GPUs (set for H200)\n{targets.table(verdicts)}")
    ratios = two_tier_report.ratios(figures.lines)
    if figures.rail:
        print("\n" + two_tier_report.table(ratios, figures.rail))
    simulated = None
    if chosen.simulation_runs > 0:
        small = Workload(num_ranks=8, num_tokens=64, hidden=64, num_experts=32, num_topk=4)
        simulated = simulation.run(small, num_runs=chosen.simulation_runs)
        print(report.simulation_line(simulated))
    if chosen.json is not None:
        document = {
            **machine.heading(chosen.device, chosen.command, num_ranks),
            "effort": vars(chosen.effort),
            "limit": None if figures.limit is None else figures.limit.to_json(),
            "normal": [line.to_json() for line in figures.lines],
            "notes": figures.notes,
            "host_references": [each.to_json() for each in figures.host_references],
            "rows_received": figures.rows_received,
            "peak_rss_bytes": figures.peak_rss_bytes,
            "targets": [verdict.to_json() for verdict in verdicts],
            "two_tier": [ratio.to_json() for ratio in ratios],
            "rail": [each.to_json() for each in figures.rail],
            "simulation": None if simulated is None else simulated.to_json(),
        }
        chosen.json.write_text(json.dumps(document, indent=2) + "\n")
    if chosen.plot is not None:
        if plot.is_available():
            title = (
                f"{machine.describe(chosen.device).get('gpu', 'host target')}, {num_ranks} ranks"
            )
            plot.draw(figures.lines, figures.limit, title, chosen.plot)
        else:
            print(plot.MISSING)
    print(f"measured in {elapsed_s:.0f} s", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    parse: Callable[[list[str], str], AnyOptions] = options.parse
    if low_latency_options.is_asked_for(given):
        parse = low_latency_options.parse
    elif layer_options.is_asked_for(given):
        parse = layer.parse
    chosen = parse(given, shlex.join(["python", "-m", "deep_comm.bench", *given]))
    started = time.monotonic()
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        num_ranks = chosen.num_ranks or (
            torch.cuda.device_count() if chosen.device == "cuda" else 4
        )
        figures = processes.run(
            run_rank, num_ranks, chosen, timeout_s=chosen.deadline_s + processes.FAILURE_GRACE_S
        )[0]
        publish(chosen, figures, num_ranks, time.monotonic() - started)
        return 0
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        # All ranks are on this host; without this gloo asks the resolver for the host's own name.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    try:
        figures = run_rank(dist.group.WORLD, chosen)
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        if rank == 0:
            publish(chosen, figures, num_ranks, time.monotonic() - started)
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    # Ranks are started by pickling a function by name; this module's real name serves in them too.
    from deep_comm.bench.__main__ import main as named_main

    sys.exit(named_main())
