"""``python -m deep_comm.bench``: dispatch and combine, timed after they have been checked.

Under torchrun every process is a rank; else the ranks are started here. Times are the slowest
rank's; bytes are defined in `deep_comm.bench.workload`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import deep_comm
from deep_comm import Config, processes
from deep_comm.bench import normal, report, simulation
from deep_comm.bench.workload import Workload

RUN_TIMEOUT_S = 1800.0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m deep_comm.bench", description=__doc__)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda with 2 or more devices"
    )
    parser.add_argument("--ranks", type=int, help="processes to start (not under torchrun)")
    parser.add_argument("--tokens", type=int, help="per rank (default: 256; on GPUs 4096)")
    parser.add_argument("--hidden", type=int, help="default: 2048; on GPUs 7168")
    parser.add_argument("--experts", type=int, help="default: 32; on GPUs 256")
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--warmup", type=int, help="default: 2; on GPUs 10")
    parser.add_argument("--iterations", type=int, help="default: 5; on GPUs 50")
    parser.add_argument(
        "--nvl-mib", type=int, help="num_nvl_bytes in MiB (default: 64; on GPUs 512)"
    )
    parser.add_argument(
        "--num-sms", type=int, help="with --send and --slots: the Config of both directions"
    )
    parser.add_argument(
        "--send", type=int, default=6, help="rows between two publications of a tail"
    )
    parser.add_argument("--slots", type=int, default=256, help="ring slots")
    parser.add_argument(
        "--simulation-runs", type=int, default=10, help="0: leave the simulation out"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parsed = parser.parse_args(arguments)
    if parsed.device is None:
        parsed.device = "cuda" if torch.cuda.device_count() >= 2 else "cpu"
    on_gpu = parsed.device == "cuda"
    defaults = {
        "ranks": torch.cuda.device_count() if on_gpu else 4,
        "tokens": 4096 if on_gpu else 256,
        "hidden": 7168 if on_gpu else 2048,
        "experts": 256 if on_gpu else 32,
        "warmup": 10 if on_gpu else 2,
        "iterations": 50 if on_gpu else 5,
        "nvl_mib": 512 if on_gpu else 64,
    }
    for name, default in defaults.items():
        if getattr(parsed, name) is None:
            setattr(parsed, name, default)
    return parsed


def run_rank(_group: Any, parsed: argparse.Namespace) -> normal.NormalReport:
    """One rank, however it was started. The default group carries rendezvous and statistics."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if parsed.device == "cuda":
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    config = None
    if parsed.num_sms is not None:
        config = Config(parsed.num_sms, parsed.send, parsed.slots)
    return normal.run(
        workload_of(parsed, dist.get_world_size()),
        device,
        num_warmup=parsed.warmup,
        num_iterations=parsed.iterations,
        num_nvl_bytes=parsed.nvl_mib << 20,
        config=config,
    )


def workload_of(parsed: argparse.Namespace, num_ranks: int) -> Workload:
    return Workload(num_ranks, parsed.tokens, parsed.hidden, parsed.experts, parsed.topk)


def machine(device: str) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "deep_comm": deep_comm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "device": device,
    }
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
        facts["num_gpus"] = torch.cuda.device_count()
    return facts


def publish(parsed: argparse.Namespace, figures: normal.NormalReport, num_ranks: int) -> None:
    workload = workload_of(parsed, num_ranks)
    print(f"normal mode on {parsed.device}: {workload.describe()} (checked bit for bit)")
    print(report.normal_table(figures), flush=True)
    simulated = None
    if parsed.simulation_runs > 0:
        small = Workload(num_ranks=8, num_tokens=64, hidden=64, num_experts=32, num_topk=4)
        simulated = simulation.run(small, num_runs=parsed.simulation_runs)
        print(report.simulation_line(simulated), flush=True)
    if parsed.json is not None:
        document = {
            "machine": machine(parsed.device),
            "workload": workload.describe(),
            "normal": [line.to_json() for line in figures.lines],
            "peak_rss_bytes": figures.peak_rss_bytes,
            "simulation": None if simulated is None else simulated.to_json(),
        }
        parsed.json.write_text(json.dumps(document, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = parse(arguments)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        figures = processes.run(run_rank, parsed.ranks, parsed, timeout_s=RUN_TIMEOUT_S)[0]
        publish(parsed, figures, parsed.ranks)
        return 0
    dist.init_process_group("gloo")
    try:
        figures = run_rank(dist.group.WORLD, parsed)
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()
    if rank == 0:
        publish(parsed, figures, num_ranks)
    return 0


if __name__ == "__main__":
    # Ranks are started by pickling a function by name; this module's real name serves in them too.
    from deep_comm.bench.__main__ import main as named_main

    sys.exit(named_main())
