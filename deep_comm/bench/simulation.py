"""How many simulated runs of dispatch and combine this machine does per second."""

from __future__ import annotations

import time
from typing import Any

import torch

from deep_comm import Buffer, simulate
from deep_comm.bench.expected import Expected
from deep_comm.bench.operations import NormalCalls
from deep_comm.bench.workload import Workload
from deep_comm.settings.command_line import Progress


def run(num_runs: int) -> dict[str, Any]:
    """Run so many seeds, checked, after one that warms up."""
    workload, host = Workload(8, 64, 64, 32, 4), torch.device("cpu")
    expected = [Expected(workload, rank, host, 1) for rank in range(workload.num_ranks)]

    def rank_main(group: simulate.SimulatedGroup) -> bool:
        num_ranks = workload.num_ranks  # one node, whatever the environment says of the others
        with Buffer(group, 1 << 20, device="cpu", ranks_per_node=num_ranks) as buffer:
            return all(NormalCalls(buffer, expected[group.rank()], None).first_calls_are_right())

    num_steps, elapsed_s = 0, 0.0
    for seed in Progress().over(range(num_runs + 1), "simulated runs"):
        started = time.perf_counter()
        results = simulate.run(rank_main, workload.num_ranks, seed)
        if not all(results):
            wrong = [rank for rank, is_right in enumerate(results) if not is_right]
            raise RuntimeError(f"seed {seed}: other results than the reference on ranks {wrong}")
        if seed > 0:
            elapsed_s += time.perf_counter() - started
            num_steps += results.num_steps
    return {
        "workload": workload.describe(),
        "num_runs": num_runs,
        "runs_per_s": num_runs / elapsed_s,
        "steps_per_run": num_steps // num_runs,  # fiber switches
    }
