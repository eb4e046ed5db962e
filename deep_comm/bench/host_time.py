"""Host time of calls, and what the machine itself takes for a launch, which they are held against.

A thread's speed differs between machines, and between the processes of one, by a factor of two and
more. So the bench measures two calls that have nothing to do with this package's Python code, in
the same processes and in the same way (deep_comm.bench.measure): an empty kernel, launched as this
package launches its own, and an addition of torch into a given tensor.

It also differs from one moment to the next: a process has stretches, up to half a second long, in
which everything takes twice as long. Rounds that follow one another lie inside such a stretch
together, and their median is its. So the host time that a target is about is taken in turns: a
round of each form, a pause, the next round of each; over more than a second. The median is judged,
and the largest round is kept beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch

from deep_comm.bench.measure import Timing, Work, clock_of, gather, host_round

NUM_CALLS, NUM_ROUNDS = 200, 5
NUM_TURNS, PAUSE_S = 15, 0.07
EMPTY_KERNEL, ADDITION = "an empty kernel", "torch.add into a given tensor"


@dataclass(frozen=True)
class Reference:
    """Microseconds of the calling thread per call: medians of rounds, of two ranks."""

    name: str
    slowest_us: float
    fastest_us: float

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def references(device: torch.device) -> list[Reference]:
    """Collective. On the host target, where calls do the work themselves, there are none."""
    if device.type != "cuda":
        return []
    from deep_comm import _cuda

    stream = torch.cuda.current_stream(device).cuda_stream
    x = torch.zeros(16, device=device)
    works: dict[str, Work] = {
        EMPTY_KERNEL: lambda _call: _cuda.launch_empty(stream),
        ADDITION: lambda _call: torch.add(x, x, out=x),
    }
    found = []
    for name, work in works.items():
        rounds = [host_round(work, NUM_CALLS, clock_of(device))[0] for _ in range(NUM_ROUNDS)]
        ranks = gather(statistics.median(rounds))
        found.append(Reference(name, max(ranks), min(ranks)))
    return found


@dataclass(frozen=True)
class HostTime:
    """Microseconds of the calling thread per call."""

    slowest_us: float  # median of the turns, slowest rank
    fastest_us: float  # the same, fastest rank
    largest_us: float  # of any turn of any rank

    def put_into(self, timing: Timing) -> Timing:
        return replace(
            timing,
            host_us=self.slowest_us,
            fastest_host_us=self.fastest_us,
            largest_host_us=self.largest_us,
        )


def in_turns(works: Sequence[Work], num_calls: int, device: torch.device) -> list[HostTime]:
    """By work, from rounds of ``num_calls`` calls. Collective."""
    clock = clock_of(device)
    rounds: list[list[float]] = [[] for _ in works]
    for turn in range(NUM_TURNS if works else 0):
        if turn > 0:
            time.sleep(PAUSE_S)
        for work, found in zip(works, rounds, strict=True):
            found.append(host_round(work, num_calls, clock)[0])
    times = []
    for found in rounds:
        of_ranks = gather(found)
        medians = [statistics.median(of_rank) for of_rank in of_ranks]
        times.append(HostTime(max(medians), min(medians), max(map(max, of_ranks))))
    return times


def describe_largest(what: str, timings: Sequence[Timing]) -> str:
    """A sentence about the forms whose median a target judges; empty without turns."""
    largest = [time.largest_host_us for time in timings if time.largest_host_us is not None]
    medians = [time.host_us for time in timings if time.largest_host_us is not None]
    if not largest:
        return ""
    ordered = ", ".join(f"{us:.1f}" for us in sorted(us for us in medians if us is not None))
    return (
        f"{what}: medians of {NUM_TURNS} turns, slowest rank, by form: {ordered} µs; the largest "
        f"turn of any form and rank {max(largest):.1f}"
    )


def describe(found: list[Reference]) -> str:
    """A sentence; empty without references."""
    if not found:
        return ""
    parts = [f"{each.name} {each.slowest_us:.1f} ({each.fastest_us:.1f})" for each in found]
    return (
        "host time of a launch here, µs, slowest rank (fastest): " + ", ".join(parts) + "; a call "
        "without a host wait is one launch, with num_worst_tokens two"
    )
