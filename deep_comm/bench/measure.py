"""Timing: wall clock on the host target, CUDA events on GPUs; statistics over the ranks."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Timing:
    """Microseconds. Each iteration counts as long as its slowest rank took."""

    p50_us: float
    p99_us: float
    min_us: float
    spread_us: float  # between the slowest and the fastest rank, in the median

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def time_iterations(
    work: Callable[[], object], num_warmup: int, num_iterations: int, device: torch.device
) -> list[float]:
    """Microseconds of each call of ``work`` on this rank. Every rank calls it alike."""
    timer = _time_on_gpu if device.type == "cuda" else _time_on_host
    for _ in range(num_warmup):
        work()
    return [timer(work) for _ in range(num_iterations)]


def _time_on_host(work: Callable[[], object]) -> float:
    dist.barrier()
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e6


def _time_on_gpu(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    dist.barrier()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The sleep lets the host queue what follows; the all-reduce lets all devices start together, to
    # a few microseconds, where a barrier on the host leaves hundreds.
    torch.cuda._sleep(500_000)
    dist.all_reduce(torch.zeros(1, device="cuda"), group=nccl_group())
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


@functools.cache
def nccl_group() -> dist.ProcessGroup:
    """An NCCL group of all ranks; collective when first called."""
    return dist.new_group(backend="nccl")


def over_ranks(local_us: Sequence[float]) -> Timing:
    """Statistics over the ranks' iterations; collective."""
    gathered: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, list(local_us))
    per_iteration = list(zip(*gathered, strict=True))
    slowest = sorted(max(times) for times in per_iteration)
    spreads = sorted(max(times) - min(times) for times in per_iteration)

    def quantile(values: Sequence[float], fraction: float) -> float:
        return values[min(len(values) - 1, int(fraction * len(values)))]

    return Timing(
        p50_us=quantile(slowest, 0.5),
        p99_us=quantile(slowest, 0.99),
        min_us=slowest[0],
        spread_us=quantile(spreads, 0.5),
    )


def peak_rss_bytes() -> int:
    """Largest resident set of this process so far.

    From /proc, because ru_maxrss of a process starts with that of the one that spawned it.
    """
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
