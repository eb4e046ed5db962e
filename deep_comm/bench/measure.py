"""Timing: wall clock on the host target, CUDA events on GPUs; statistics over calls and ranks.

The headline is the mean of back-to-back calls at the slowest rank, the median of a few such rounds.
Every round begins with all ranks together (a barrier of the processes, and on GPUs a collective
that lets the devices start within microseconds of each other, and words in common memory that do so
for the processes: they leave the barrier some hundred microseconds apart, in which one would queue
calls that the others have yet to make) and with one call that leads in: it finds an idle device, so
that its time is mostly its way through the host and the wait for the rank that starts last. It is
not in the mean, but kept (``first_us``). p50 and p99 are of single calls in one more round, also
back to back, each as long as its slowest rank took; where a graph holds several calls, of their
mean.

Host time is what the calling thread spends in a call. It has rounds of its own on GPUs, of
num_host_calls: a round's first calls find the machine's caches cold, and a short round would be
about those (``first_host_us`` says what the very first takes). The launches of a round fit into the
GPU's queue, so that no call waits for room there. What targets are about is measured once more, in
turns that lie apart: deep_comm.bench.host_time.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from deep_comm.layer.host_words import HostWords
from deep_comm.rendezvous import Rendezvous, all_gather_object

T = TypeVar("T")

Work = Callable[[int], object]
"""One call, told its number, by which it picks an input."""

FLUSH_BYTES = 256 << 20  # several times the largest L2


def gather(value: T) -> list[T]:
    """Every rank's, by rank, over the default group. Collective."""
    return all_gather_object(dist.group.WORLD, value)


@dataclass(frozen=True)
class Effort:
    num_warmup: int
    num_calls: int  # in a round
    num_rounds: int
    num_single_calls: int  # that p50 and p99 are taken from
    flush_l2: bool = (
        False  # every call alone, behind a flush and a barrier, instead of back to back
    )
    num_host_calls: int = 0  # in a round for the host's time; 0: that of the rounds above


@dataclass(frozen=True)
class Sample:
    """Microseconds as one rank saw them."""

    means_us: list[float]  # by round
    calls_us: list[float]  # by single call
    hosts_us: list[float]  # by round: time of the calling thread, per call
    first_hosts_us: list[float] = field(default_factory=list)  # of the first call of such a round
    firsts_us: list[float] = field(default_factory=list)  # by round: the call that leads in


@dataclass(frozen=True)
class Timing:
    """Microseconds over all ranks."""

    mean_us: float  # of the slowest rank, the median of the rounds
    best_us: float  # of the slowest rank, in the best round
    p50_us: float
    p99_us: float
    spread_us: (
        float  # of the means, between the slowest and the fastest rank, the median of the rounds
    )
    host_us: float | None  # of the slowest rank; None where the call itself does the work
    fastest_host_us: float | None = None  # of the fastest rank
    first_host_us: float | None = None  # of a round's first call, slowest rank; None: not taken
    first_us: float | None = None  # the call that leads in, as mean_us; None: single calls alone
    # Of any turn and rank, where host_us is a median of turns (deep_comm.bench.host_time).
    largest_host_us: float | None = None

    def to_json(self) -> dict[str, float | None]:
        return asdict(self)


def percentile(values: Sequence[float], fraction: float) -> float:
    """The smallest value that at least this fraction of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def summarise(samples: Sequence[Sample], *, with_host: bool) -> Timing:
    """One Sample per rank, all with the same numbers of rounds and calls."""
    rounds = list(zip(*(sample.means_us for sample in samples), strict=True))
    slowest = [max(means) for means in rounds]
    calls = [max(times) for times in zip(*(sample.calls_us for sample in samples), strict=True)]
    hosts = [statistics.median(sample.hosts_us) for sample in samples]
    first_hosts = [
        statistics.median(sample.first_hosts_us) for sample in samples if sample.first_hosts_us
    ]
    firsts = [max(times) for times in zip(*(sample.firsts_us for sample in samples), strict=True)]
    return Timing(
        mean_us=statistics.median(slowest),
        best_us=min(slowest),
        p50_us=percentile(calls, 0.5),
        p99_us=percentile(calls, 0.99),
        spread_us=statistics.median(max(means) - min(means) for means in rounds),
        host_us=max(hosts) if with_host else None,
        fastest_host_us=min(hosts) if with_host else None,
        first_host_us=max(first_hosts, default=None) if with_host else None,
        first_us=statistics.median(firsts) if firsts else None,
    )


def time_over_ranks(
    work: Work, effort: Effort, device: torch.device, *, calls_per_work: int = 1
) -> Timing:
    """Collective. ``work`` makes ``calls_per_work`` calls (a graph); times are of one of them."""
    sample = take_sample(work, effort, clock_of(device), calls_per_work=calls_per_work)
    return summarise(gather(sample), with_host=device.type == "cuda")


@dataclass(frozen=True)
class Turns:
    """Works that are compared with one another: a round of each, then the next round of each,
    because a machine does not stay as fast as it was.

    Attributes:
        timings: by work.
        rounds_us: by work and turn: the mean of a round's calls, of the slowest rank.
    """

    timings: list[Timing]
    rounds_us: list[list[float]]


def time_in_turn(
    works: Sequence[Work], effort: Effort, device: torch.device, *, calls_per_work: int = 1
) -> Turns:
    """Of ``effort.num_rounds`` turns. Collective."""
    clock = clock_of(device)
    num_rounds = effort.num_rounds
    once = replace(
        effort, num_rounds=1, num_single_calls=math.ceil(effort.num_single_calls / num_rounds)
    )
    samples = [Sample([], [], []) for _ in works]
    with _no_garbage_collection():  # once for all: to collect takes longer than a round
        for number in range(num_rounds):
            for work, sample in zip(works, samples, strict=True):
                taken = take_sample(
                    work, once if number == 0 else replace(once, num_warmup=1), clock,
                    calls_per_work=calls_per_work,
                )  # fmt: skip
                for name in ("means_us", "calls_us", "hosts_us", "first_hosts_us", "firsts_us"):
                    getattr(sample, name).extend(getattr(taken, name))
    of_ranks = [gather(sample) for sample in samples]
    with_host = device.type == "cuda"
    return Turns(
        [summarise(ranks, with_host=with_host) for ranks in of_ranks],
        [
            [max(means) for means in zip(*(rank.means_us for rank in ranks), strict=True)]
            for ranks in of_ranks
        ],
    )


class Clock(Protocol):
    """Marks on the time line of the work, and a start that all ranks share."""

    def start_together(self, *, flush: bool) -> None: ...
    def mark(self) -> object: ...
    def finish(self) -> None: ...
    def between_us(self, begin: object, end: object) -> float: ...


@functools.cache
def clock_of(device: torch.device) -> Clock:
    return GpuClock(device) if device.type == "cuda" else HostClock()


class HostClock:
    def start_together(self, *, flush: bool) -> None:
        dist.barrier()

    def mark(self) -> float:
        return time.perf_counter()

    def finish(self) -> None:
        pass

    def between_us(self, begin: object, end: object) -> float:
        assert isinstance(begin, float) and isinstance(end, float)
        return (end - begin) * 1e6


class GpuClock:
    def __init__(self, device: torch.device) -> None:
        self._group = nccl_group()
        self._word = torch.zeros(1, device=device)
        self._flush = torch.empty(0, dtype=torch.uint8, device=device)
        self._words = HostWords.create(Rendezvous(dist.group.WORLD))

    def start_together(self, *, flush: bool) -> None:
        torch.cuda.synchronize()
        dist.barrier()
        if flush:
            if self._flush.numel() == 0:
                self._flush = self._flush.new_empty(FLUSH_BYTES)
            self._flush.zero_()
            # What follows is a single call: the host gets time to queue it before the devices
            # start.
            torch.cuda._sleep(300_000)
        dist.all_reduce(self._word, group=self._group)
        if self._words is not None:
            exchange, until = self._words.tell(0), time.monotonic() + 1
            # All have passed the barrier; of a rank that has ended since, the next call tells.
            while self._words.most(exchange) is None and time.monotonic() < until:
                pass

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def finish(self) -> None:
        torch.cuda.synchronize()

    def between_us(self, begin: object, end: object) -> float:
        assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
        return begin.elapsed_time(end) * 1e3


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    if not gc.isenabled():  # inside another one
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def take_sample(work: Work, effort: Effort, clock: Clock, *, calls_per_work: int = 1) -> Sample:
    for call in range(effort.num_warmup):
        work(call)
    clock.finish()
    firsts: list[float] = []
    means: list[float] = []
    hosts: list[float] = []
    calls: list[float] = []
    with _no_garbage_collection():
        for _ in range(effort.num_rounds):
            if effort.flush_l2:
                times, host_us = _round_of_single_calls(work, effort.num_calls, clock)
                calls += times
                mean_us = statistics.fmean(times)
            else:
                first_us, mean_us, host_us = _round_back_to_back(work, effort.num_calls, clock)
                firsts.append(first_us / calls_per_work)
            means.append(mean_us / calls_per_work)
            hosts.append(host_us / calls_per_work)
        if not effort.flush_l2:
            calls = _calls_back_to_back(work, effort.num_single_calls, clock)
        first_hosts: list[float] = []
        if effort.num_host_calls > 0:
            rounds = [
                host_round(work, effort.num_host_calls, clock) for _ in range(effort.num_rounds)
            ]
            hosts = [mean_us / calls_per_work for mean_us, _ in rounds]
            first_hosts = [first_us / calls_per_work for _, first_us in rounds]
    calls = [time_us / calls_per_work for time_us in calls]
    return Sample(means, calls, hosts, first_hosts, firsts)


def host_round(work: Work, num_calls: int, clock: Clock) -> tuple[float, float]:
    """Time of the calling thread: the mean of all calls, and the first one."""
    clock.start_together(flush=False)
    started = time.perf_counter()
    work(0)
    first = time.perf_counter()
    for call in range(1, num_calls):
        work(call)
    ended = time.perf_counter()
    clock.finish()
    return (ended - started) * 1e6 / num_calls, (first - started) * 1e6


def _round_back_to_back(work: Work, num_calls: int, clock: Clock) -> tuple[float, float, float]:
    """The call that leads in, and the mean of the others: as the device sees them, and of the
    calling thread.
    """
    clock.start_together(flush=False)
    begin = clock.mark()
    work(0)
    led_in = clock.mark()
    started = time.perf_counter()
    for call in range(1, num_calls + 1):
        work(call)
    host_s = time.perf_counter() - started
    end = clock.mark()
    clock.finish()
    mean_us = clock.between_us(led_in, end) / num_calls
    return clock.between_us(begin, led_in), mean_us, host_s * 1e6 / num_calls


def _calls_back_to_back(work: Work, num_calls: int, clock: Clock) -> list[float]:
    """Apart from the mean, since the marks between the calls take time too."""
    clock.start_together(flush=False)
    marks = [clock.mark()]
    for call in range(num_calls):
        work(call)
        marks.append(clock.mark())
    clock.finish()
    return [clock.between_us(begin, end) for begin, end in zip(marks, marks[1:], strict=False)]


def _round_of_single_calls(work: Work, num_calls: int, clock: Clock) -> tuple[list[float], float]:
    times, host_s = [], 0.0
    for call in range(num_calls):
        clock.start_together(flush=True)
        begin = clock.mark()
        started = time.perf_counter()
        work(call)
        host_s += time.perf_counter() - started
        end = clock.mark()
        clock.finish()
        times.append(clock.between_us(begin, end))
    return times, host_s * 1e6 / num_calls


_GROUP_TIMEOUT = datetime.timedelta(seconds=180)


@functools.cache
def nccl_group() -> dist.ProcessGroup:
    """An NCCL group of all ranks; collective when first called."""
    return dist.new_group(backend="nccl", timeout=_GROUP_TIMEOUT)


def peak_rss_bytes() -> int:
    """Largest resident set of this process so far.

    From /proc, because ru_maxrss of a process starts with that of the one that spawned it.
    """
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
