"""The clocks of ranks brought together by what must have come before what.

A block that has passed the entry barrier has heard of every peer, each of which noted a step
before it said so. So for every call and every pair of ranks the clock of one can be ahead of the
other's by this much and no more; all calls together leave an interval a pair, and its middle is the
estimate. Half its width is the error, which is stated, not estimated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from deep_comm.errors import ArgumentError
from deep_comm.trace.recording import Event, Recording

# kernel: the step of a peer, the step of a rank that has heard of it, and whose blocks: block 0 of
# the peer speaks to all; all blocks of it have come before one speaks; each to its own number.
_MEETINGS = {
    "notify_dispatch": ("counted", "entered", "all"),
    "dispatch": ("begun", "received", "same"),
    "combine": ("begun", "entered", "first"),
    "low_latency_dispatch": ("begun", "entered", "first"),
    # A rank hears of other nodes' ranks through its neighbours.
    "internode_notify": ("begun", "entered", "first"),
    "internode_dispatch": ("begun", "entered", "first"),
    "internode_combine": ("begun", "entered", "first"),
}
_UNKNOWN = float("inf")

_Times = dict[int, int]  # by block


@dataclass(frozen=True)
class Alignment:
    """``offsets_ns[rank]`` is to be added to the rank's times, of rank 0's clock; wrong by
    ``errors_ns[rank]`` at most (infinite: nothing is known).
    """

    offsets_ns: dict[int, float]
    errors_ns: dict[int, float]

    def __str__(self) -> str:
        parts = []
        for rank, error in self.errors_ns.items():
            known = f"{self.offsets_ns[rank] / 1e3:+.3f} ± {error / 1e3:.3f} µs"
            parts.append(f"rank {rank} {known if error < _UNKNOWN else 'unknown'}")
        return "clocks: " + ", ".join(parts)


def _steps(events: Sequence[Event], step: str) -> dict[tuple[str, int], _Times]:
    found: dict[tuple[str, int], _Times] = {}
    for event in events:
        if event.step == step:
            found.setdefault((event.kernel, event.call), {})[event.block] = event.time_ns
    return found


def _slack(spoken: _Times, heard: _Times, whose: str) -> float:
    """The least time, clocks apart, from a peer's step to the one that follows it."""
    if whose == "same":
        both = spoken.keys() & heard.keys()
        return min((heard[block] - spoken[block] for block in both), default=_UNKNOWN)
    said = spoken.get(0) if whose == "first" else max(spoken.values(), default=None)
    if said is None or not heard:
        return _UNKNOWN
    return min(heard.values()) - said


def _bounds(recordings: Sequence[Recording]) -> dict[tuple[int, int], float]:
    """[a, b]: by how much rank a's clock can be behind rank b's at most, in ns."""
    bounds: dict[tuple[int, int], float] = {}
    for kernel, (spoken_step, heard_step, whose) in _MEETINGS.items():
        of_rank = {
            recording.rank: [event for event in recording.events if event.kernel == kernel]
            for recording in recordings
        }
        spoken = {rank: _steps(events, spoken_step) for rank, events in of_rank.items()}
        heard = {rank: _steps(events, heard_step) for rank, events in of_rank.items()}
        for peer in of_rank:
            for rank in of_rank:
                for call in spoken[peer].keys() & heard[rank].keys() if peer != rank else ():
                    slack = _slack(spoken[peer][call], heard[rank][call], whose)
                    bounds[peer, rank] = min(bounds.get((peer, rank), _UNKNOWN), slack)
    return bounds


def align(recordings: Sequence[Recording]) -> Alignment:
    """Of ranks of one Buffer. Ranks that read one clock keep it.

    Raises ArgumentError if they are of several Buffers.
    """
    if len({recording.buffer for recording in recordings}) > 1:
        raise ArgumentError("recordings", None, "must be of one Buffer")
    ranks = [recording.rank for recording in recordings]
    bounds = _bounds(recordings)
    clocks = {recording.rank: recording.clock for recording in recordings}
    bounds |= {(a, b): 0.0 for a, b in product(ranks, repeat=2) if clocks[a] == clocks[b]}
    for via, a, b in product(ranks, repeat=3):  # what is known over a third rank
        over = bounds.get((a, via), _UNKNOWN) + bounds.get((via, b), _UNKNOWN)
        bounds[a, b] = min(bounds.get((a, b), _UNKNOWN), over)
    offsets, errors = {}, {}
    for rank in ranks:
        # offset of rank - offset of the first: between -low and high
        high, low = bounds[rank, ranks[0]], bounds[ranks[0], rank]
        is_known = high + low < _UNKNOWN
        offsets[rank] = (high - low) / 2 if is_known else 0.0
        errors[rank] = abs(high + low) / 2 if is_known else _UNKNOWN
    return Alignment(offsets, errors)
