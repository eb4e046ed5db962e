"""How calls are timed: wall clock on the host target, CUDA events on GPUs.

The headline is the mean of back-to-back calls at the slowest rank, the median of a few such rounds.
Each round begins with all ranks together. A barrier of the processes lets them go some hundred
microseconds apart. On GPUs a collective lets the devices start within microseconds of each other,
and counters in shared memory do so for the processes: otherwise one would queue calls that the
others have yet to make. Then one call leads in. It finds an idle device, so that its time is mostly
its way through the host and the wait for the rank that starts last. It is not in the mean, but kept
(``first_us``). p50 and p99 are of single calls in one more round, also back to back, each as long
as its slowest rank took; where a graph holds several calls, of their mean.

Host time is what the calling thread spends in a call. On GPUs it has rounds of its own, of
num_host_calls: a round's first calls find the machine's caches cold, and a short round would be
about those. The launches of a round fit into the GPU's queue, so that no call waits for room there.
"""

from __future__ import annotations

import datetime
import functools
import gc
import math
import mmap
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from deep_comm.bench.names import Effort
from deep_comm.ranks.rendezvous import all_gather_object

T = TypeVar("T")
Work = Callable[[int], object]
"""One call, given its number, by which it picks an input."""

GROUP_TIMEOUT = datetime.timedelta(seconds=180)
FLUSH_BYTES = 256 << 20  # several times the largest L2
CALLS_PER_GRAPH = 20  # of low-latency calls
NUM_TURNS, PAUSE_S = 15, 0.07


class WrongResult(RuntimeError):
    """What is measured does not compute what the reference says; it was not timed."""


def gather(value: T) -> list[T]:
    """Every rank's, by rank, over the default group. Collective."""
    return all_gather_object(dist.group.WORLD, value)


def require_on_all_ranks(good: bool, what: str) -> None:
    """Raise WrongResult on all ranks unless it is good on all. Collective."""
    bad = [rank for rank, verdict in enumerate(gather(bool(good))) if not verdict]
    if bad:
        raise WrongResult(f"{what} differs from the reference on ranks {bad}")


@functools.cache
def nccl_group() -> dist.ProcessGroup:
    """An NCCL group of all ranks; collective when first called."""
    return dist.new_group(backend="nccl", timeout=GROUP_TIMEOUT)


@dataclass
class Sample:
    """Microseconds as one rank saw them."""

    means_us: list[float] = field(default_factory=list)  # by round
    calls_us: list[float] = field(default_factory=list)  # by single call
    hosts_us: list[float] = field(default_factory=list)  # by round: host time of a call
    firsts_us: list[float] = field(default_factory=list)  # by round: the call that leads in


@dataclass(frozen=True)
class Timing:
    """Microseconds over all ranks."""

    mean_us: float  # of the slowest rank, the median of the rounds
    best_us: float  # of the slowest rank, in the best round
    p50_us: float
    p99_us: float
    spread_us: float  # of the means, slowest minus fastest rank, the median of the rounds
    host_us: float | None  # of the slowest rank; None where the call itself does the work
    fastest_host_us: float | None = None  # of the fastest rank
    first_us: float | None = None  # the call that leads in, as mean_us; None: single calls alone
    largest_host_us: float | None = None  # of any round and rank; None: not from host_turns()


def percentile(values: Sequence[float], fraction: float) -> float:
    """The smallest value that at least this fraction of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def summarise(samples: Sequence[Sample], *, with_host: bool) -> Timing:
    """One Sample per rank, all with the same numbers of rounds and calls."""
    rounds = list(zip(*(sample.means_us for sample in samples), strict=True))
    means = list(map(max, rounds))
    calls = list(map(max, zip(*(sample.calls_us for sample in samples), strict=True)))
    firsts = list(map(max, zip(*(sample.firsts_us for sample in samples), strict=True)))
    hosts = [statistics.median(sample.hosts_us) for sample in samples]
    return Timing(
        mean_us=statistics.median(means),
        best_us=min(means),
        p50_us=percentile(calls, 0.5),
        p99_us=percentile(calls, 0.99),
        spread_us=statistics.median(max(ranks) - min(ranks) for ranks in rounds),
        host_us=max(hosts) if with_host else None,
        fastest_host_us=min(hosts) if with_host else None,
        first_us=statistics.median(firsts) if firsts else None,
    )


# ---- clocks --------------------------------------------------------------------------------------


class Clock:
    """Marks on the time line of the work, and a start that all ranks share."""

    def start_together(self, *, flush: bool = False) -> None:
        dist.barrier()

    def mark(self) -> Any:
        return time.perf_counter()

    def finish(self) -> None:
        pass

    def between_us(self, begin: Any, end: Any) -> float:
        return float(end - begin) * 1e6


class GpuClock(Clock):
    def __init__(self, device: torch.device) -> None:
        self._group = nccl_group()
        self._word = torch.zeros(1, device=device)
        self._flush = torch.empty(0, dtype=torch.uint8, device=device)
        self._counters, self._rank = _shared_counters(), dist.get_rank()

    def start_together(self, *, flush: bool = False) -> None:
        torch.cuda.synchronize()
        dist.barrier()
        if flush:
            if self._flush.numel() == 0:
                self._flush = self._flush.new_empty(FLUSH_BYTES)
            self._flush.zero_()
            # A single call follows: give the host time to queue it before the devices start.
            torch.cuda._sleep(300_000)
        dist.all_reduce(self._word, group=self._group)
        if self._counters is not None:
            number, until = self._counters[self._rank] + 1, time.monotonic() + 1
            self._counters[self._rank] = number
            # Of a rank that has ended since the barrier, the next call tells.
            while min(self._counters) < number and time.monotonic() < until:
                pass

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def finish(self) -> None:
        torch.cuda.synchronize()

    def between_us(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) * 1e3


def _shared_counters() -> memoryview | None:
    """A counter per rank in memory that all share; None, on all, where they share none.
    Collective."""
    num_bytes = 8 * dist.get_world_size()
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    counters = None
    with tempfile.NamedTemporaryFile(prefix="deep_comm.", dir=folder) as own:
        own.truncate(num_bytes)
        try:
            with open(gather(own.name)[0], "r+b") as file:
                counters = memoryview(mmap.mmap(file.fileno(), num_bytes)).cast("q")
        except OSError:
            pass
        return counters if all(gather(counters is not None)) else None


@functools.cache
def clock_of(device: torch.device) -> Clock:
    return GpuClock(device) if device.type == "cuda" else Clock()


# ---- the measuring loop --------------------------------------------------------------------------


def take_samples(
    works: Sequence[Work], effort: Effort, clock: Clock, *, calls_per_work: int = 1
) -> list[Sample]:
    """Time each work on this rank. Their rounds take turns, because a machine does not stay as
    fast as it was. ``calls_per_work``: a graph of several calls; times are of one of them."""
    samples = [Sample() for _ in works]
    for work in works:
        for call in range(effort.num_warmup):
            work(call)
    clock.finish()
    gc.collect()
    gc.disable()  # a collection takes longer than a round
    try:
        for _ in range(effort.num_rounds):
            for work, sample in zip(works, samples, strict=True):
                if len(works) > 1:
                    work(0)  # after another work, the first call may find other state
                if effort.flush_l2:
                    times, host_us = _single_calls(work, effort.num_calls, clock, flush=True)
                    sample.calls_us += times
                    sample.means_us.append(statistics.fmean(times))
                    sample.hosts_us.append(host_us)
                else:
                    _back_to_back(work, effort.num_calls, clock, sample)
        for work, sample in zip(works, samples, strict=True):
            if not effort.flush_l2:  # apart from the mean: the marks between calls take time
                sample.calls_us, _ = _single_calls(work, effort.num_single_calls, clock)
            if effort.num_host_calls > 0:
                sample.hosts_us = [
                    host_round(work, effort.num_host_calls, clock) for _ in range(effort.num_rounds)
                ]
    finally:
        gc.enable()
    return [
        Sample(*([us / calls_per_work for us in times] for times in vars(sample).values()))
        for sample in samples
    ]


def _back_to_back(work: Work, num_calls: int, clock: Clock, sample: Sample) -> None:
    clock.start_together()
    begin = clock.mark()
    work(0)
    led_in = clock.mark()
    started = time.perf_counter()
    for call in range(1, num_calls + 1):
        work(call)
    sample.hosts_us.append((time.perf_counter() - started) * 1e6 / num_calls)
    end = clock.mark()
    clock.finish()
    sample.firsts_us.append(clock.between_us(begin, led_in))
    sample.means_us.append(clock.between_us(led_in, end) / num_calls)


def _single_calls(
    work: Work, num_calls: int, clock: Clock, *, flush: bool = False
) -> tuple[list[float], float]:
    """Of every call, and the mean host time; ``flush``: each after a start and a flush."""
    marks, host_s = [], 0.0
    for call in range(num_calls):
        if flush or call == 0:
            clock.start_together(flush=flush)
            end = clock.mark()
        begin, started = end, time.perf_counter()
        work(call)
        host_s += time.perf_counter() - started
        end = clock.mark()
        marks.append((begin, end))
        if flush:
            clock.finish()
    clock.finish()
    return [clock.between_us(*pair) for pair in marks], host_s * 1e6 / num_calls


def host_round(work: Work, num_calls: int, clock: Clock) -> float:
    """Time of the calling thread in a call: the mean."""
    clock.start_together()
    started = time.perf_counter()
    for call in range(num_calls):
        work(call)
    ended = time.perf_counter()
    clock.finish()
    return (ended - started) * 1e6 / num_calls


def time_in_turns(
    works: Sequence[Work], effort: Effort, device: torch.device, *, calls_per_work: int = 1
) -> tuple[list[Timing], list[list[float]]]:
    """By work: its Timing, and by round the mean of the slowest rank. Collective."""
    samples = take_samples(works, effort, clock_of(device), calls_per_work=calls_per_work)
    by_work = list(zip(*gather(samples), strict=True))
    timings = [summarise(ranks, with_host=device.type == "cuda") for ranks in by_work]
    rounds = [zip(*(sample.means_us for sample in ranks), strict=True) for ranks in by_work]
    return timings, [list(map(max, means)) for means in rounds]


def time_over_ranks(
    work: Work, effort: Effort, device: torch.device, *, calls_per_work: int = 1
) -> Timing:
    return time_in_turns([work], effort, device, calls_per_work=calls_per_work)[0][0]


class Graph:
    """A CUDA graph of ``num_calls`` calls, whose inputs take turns.

    Attributes:
        last, last_input: what the last call returned, and its input.
    """

    def __init__(self, call: Callable[[int], Any], num_calls: int, num_inputs: int) -> None:
        self.last_input = (num_calls - 1) % num_inputs
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call(0)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            for call_idx in range(num_calls):
                self.last = call(call_idx % num_inputs)

    def replay(self, _call: int) -> None:
        self._graph.replay()


# ---- host time and kernels -----------------------------------------------------------------------


def host_turns(works: Sequence[Work], num_calls: int, device: torch.device) -> list[dict[str, Any]]:
    """The host times of a Timing that targets judge, by work. Collective.

    A process has stretches, up to half a second long, in which everything takes twice as long.
    Rounds in a row lie inside such a stretch together. So the rounds of the works take turns, with
    a pause between two turns, over more than a second; the median counts, and the largest is kept.
    """
    rounds: list[list[float]] = [[] for _ in works]
    for turn in range(NUM_TURNS if works else 0):
        if turn > 0:
            time.sleep(PAUSE_S)
        for work, found in zip(works, rounds, strict=True):
            found.append(host_round(work, num_calls, clock_of(device)))
    times = []
    for ranks in map(gather, rounds):
        medians = [statistics.median(rank) for rank in ranks]
        times.append({"host_us": max(medians), "fastest_host_us": min(medians),
                      "largest_host_us": max(map(max, ranks))})  # fmt: skip
    return times


def launch_times(device: torch.device) -> list[dict[str, Any]]:
    """What the machine itself takes for a launch, to compare host times with. Collective.

    A thread's speed differs between machines, and between processes of one, by a factor of two and
    more. Empty on the host target, where calls do the work themselves.
    """
    if device.type != "cuda":
        return []
    from deep_comm import _cuda

    stream = torch.cuda.current_stream(device).cuda_stream
    x = torch.zeros(16, device=device)
    works: dict[str, Work] = {
        "an empty kernel": lambda _call: _cuda.launch_empty(stream),
        "torch.add into a given tensor": lambda _call: torch.add(x, x, out=x),
    }
    times = host_turns(list(works.values()), 200, device)
    return [
        {"name": name, "slowest_us": us["host_us"], "fastest_us": us["fastest_host_us"]}
        for name, us in zip(works, times, strict=True)
    ]


def kernel_times(work: Work, num_works: int, kernels: Sequence[str]) -> dict[str, float]:
    """Median microseconds of each low-latency kernel that a call launches, at the slowest rank,
    from torch's profiler. Empty if the profiler sees no kernels. Collective."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for call in range(num_works):
            work(call)
        torch.cuda.synchronize()
    launches = [event for event in profiler.events() if "LowLatency" in event.name]
    launches.sort(key=lambda event: event.time_range.start)
    durations = [event.time_range.elapsed_us() for event in launches]
    step, medians = len(kernels), []
    if durations and len(durations) % step == 0:
        medians = [statistics.median(durations[index::step]) for index in range(step)]
    ranks = gather(medians)
    return dict(zip(kernels, map(max, zip(*ranks, strict=True)), strict=True)) if all(ranks) else {}


def peak_rss_bytes() -> int:
    """Largest resident set of this process so far.

    From /proc, because ru_maxrss of a process starts with that of the one that spawned it.
    """
    found = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    return 0 if found is None else int(found[1]) * 1024
