"""A token there and back between two ranks, on each target: the shortest proof that it works."""

from __future__ import annotations

import time
from typing import Any

import torch

from deep_comm import Buffer, local, processes, simulate
from deep_comm.doctor.findings import Section, num_devices
from deep_comm.settings.command_line import Progress

NUM_NVL_BYTES = 1 << 20
TIMEOUT_S = 60.0


def ping(group: Any, device: str) -> float:
    """Send one token from each rank to the other and back; seconds of the second of two round
    trips.

    Raises RuntimeError if what comes back is not what was sent.
    """
    where = torch.device("cpu") if device == "cpu" else torch.device("cuda", group.rank())
    if where.type == "cuda":
        torch.cuda.set_device(where)
    rank, num_ranks = group.rank(), group.size()
    peer = (rank + 1) % num_ranks
    with Buffer(group, NUM_NVL_BYTES, device=where, timeout_s=TIMEOUT_S / 3) as buffer:
        elapsed = 0.0
        for call in range(2):
            x = torch.full((1, 64), 10.0 * call + rank, dtype=torch.bfloat16, device=where)
            topk_idx = torch.tensor([[peer]], device=where)
            weights = torch.ones(1, 1, device=where)
            started = time.perf_counter()
            recv_x, _, _, _, handle, _ = buffer.dispatch(
                x, topk_idx=topk_idx, topk_weights=weights, num_experts=num_ranks
            )
            back = buffer.combine(recv_x, handle)[0]
            good = bool((recv_x == 10.0 * call + peer).all()) and bool((back == x).all())
            elapsed = time.perf_counter() - started
            if not good:
                raise RuntimeError(
                    f"rank {rank} got {recv_x[0, 0].item()} and then {back[0, 0].item()}"
                )
    return elapsed


def _try(section: Section, name: str, work: Any, progress: Progress) -> None:
    progress.step(name)
    try:
        slowest = max(work())
        section.lines.append(f"{name}: OK, {slowest * 1e3:.2f} ms there and back")
    except Exception as error:  # noqa: BLE001 - the report must go on
        section.lines.append(f"{name}: FAILED")
        reason = (str(error).splitlines() or [""])[0]  # below it, a rank's traceback
        section.problems.append(f"{name}: {type(error).__name__}: {reason}")


def pings() -> Section:
    section, progress = Section("two ranks, one token there and back"), Progress()
    ways: list[tuple[str, Any]] = [
        ("host target, threads", lambda: local.run(_ping_host, 2, timeout_s=TIMEOUT_S)),
        ("host target, processes", lambda: processes.run(_ping_host, 2, timeout_s=TIMEOUT_S)),
        ("host target, simulation", lambda: simulate.run(_ping_host, 2, 1, timeout_s=TIMEOUT_S)),
    ]
    if num_devices() >= 2:
        timeout_s = 2 * TIMEOUT_S
        ways.append(("CUDA, processes", lambda: processes.run(_ping_cuda, 2, timeout_s=timeout_s)))
    for name, work in ways:
        _try(section, name, work, progress)
    if num_devices() < 2:
        section.lines.append(f"CUDA: not tried, {num_devices()} device(s)")
    return section


def _ping_host(group: Any) -> float:
    return ping(group, "cpu")


def _ping_cuda(group: Any) -> float:
    return ping(group, "cuda")
