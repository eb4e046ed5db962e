"""What the machine itself takes for a launch: what host times of calls are to be held against.

A thread's speed differs between machines, and between the processes of one, by a factor of two and
more. So the bench measures two calls that have nothing to do with this package's Python code, in
the same processes and in the same way (deep_comm.bench.measure): an empty kernel, launched as this
package launches its own, and an addition of torch into a given tensor.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass

import torch

from deep_comm.bench.measure import Work, clock_of, gather, host_round

NUM_CALLS, NUM_ROUNDS = 200, 5
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


def describe(found: list[Reference]) -> str:
    """A sentence; empty without references."""
    if not found:
        return ""
    parts = [f"{each.name} {each.slowest_us:.1f} ({each.fastest_us:.1f})" for each in found]
    return (
        "host time of a launch here, µs, slowest rank (fastest): " + ", ".join(parts) + "; a call "
        "without a host wait is one launch, with num_worst_tokens two"
    )
