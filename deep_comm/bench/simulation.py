"""How many simulated runs of dispatch and combine this machine does per second."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from deep_comm import Buffer, simulate
from deep_comm.bench.expected import Expected
from deep_comm.bench.payload import same_bits
from deep_comm.bench.workload import Workload

NUM_NVL_BYTES = 1 << 20


@dataclass(frozen=True)
class SimulationReport:
    workload: str
    num_runs: int
    runs_per_s: float
    steps_per_run: int  # fiber switches

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run(workload: Workload, *, num_runs: int) -> SimulationReport:
    """Run ``num_runs`` seeds, checked; the first is a warm-up and not counted."""
    host = torch.device("cpu")
    expected = [Expected(workload, rank, host, 1) for rank in range(workload.num_ranks)]
    wanted: list[tuple[Any, Any]] = [(rank.recv_x(0), rank.combined(0)) for rank in expected]

    def rank_main(group: simulate.SimulatedGroup) -> tuple[torch.Tensor, torch.Tensor]:
        mine = expected[group.rank()]
        with Buffer(group, NUM_NVL_BYTES, device="cpu") as buffer:
            recv_x, _, _, _, handle, _ = buffer.dispatch(
                mine.x(0),
                topk_idx=mine.topk_idx,
                topk_weights=mine.topk_weights,
                num_experts=workload.num_experts,
            )
            return recv_x, buffer.combine(mine.expert_output(0), handle)[0]

    num_steps = 0
    elapsed = 0.0
    for seed in range(num_runs + 1):
        started = time.perf_counter()
        results = simulate.run(rank_main, workload.num_ranks, seed)
        took = time.perf_counter() - started
        for rank, (got, want) in enumerate(zip(results, wanted, strict=True)):
            for name, left, right in zip(("dispatch", "combine"), got, want, strict=True):
                if not same_bits(left, right):
                    raise RuntimeError(
                        f"seed {seed}: {name} differs from the reference on rank {rank}"
                    )
        if seed > 0:
            elapsed += took
            num_steps += results.num_steps
    return SimulationReport(
        workload.describe(), num_runs, num_runs / elapsed, num_steps // num_runs
    )
