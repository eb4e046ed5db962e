"""When blocks pass the steps of a kernel: first, median and last over blocks and ranks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from deep_comm import _core
from deep_comm.trace.alignment import Alignment
from deep_comm.trace.recording import Event, Recording


@dataclass(frozen=True)
class StepTimes:
    """Of one step of a kernel, in µs since the first block of any rank had noted one in the same
    call: the first block to pass it, the median and the last; each the median over calls.
    """

    kernel: str
    step: str
    first_us: float
    median_us: float
    last_us: float
    num_notes: int  # of a call


def _whole_calls(recordings: Sequence[Recording]) -> dict[tuple[str, int], list[list[Event]]]:
    """Calls that every rank still has, and each rank's events of them."""
    of_rank = []
    for recording in recordings:
        calls: dict[tuple[str, int], list[Event]] = {}
        for event in recording.events:
            calls.setdefault((event.kernel, event.call), []).append(event)
        of_rank.append(calls)
    common = [call for call in of_rank[0] if all(call in calls for calls in of_rank)]
    return {call: [calls[call] for calls in of_rank] for call in common}


def step_times(
    recordings: Sequence[Recording], alignment: Alignment, last_calls: int | None = None
) -> list[StepTimes]:
    """Of one Buffer, kernels in the order in which they first ran. ``last_calls``: of each kernel;
    None: all."""
    shifts = [alignment.offsets_ns[recording.rank] for recording in recordings]
    times: dict[tuple[str, str], list[list[float]]] = {}  # by call
    calls = _whole_calls(recordings)
    numbers: dict[str, list[int]] = {}
    for kernel, call in calls:
        numbers.setdefault(kernel, []).append(call)
    for (kernel, call), of_ranks in calls.items():
        if last_calls is not None and call not in sorted(numbers[kernel])[-last_calls:]:
            continue
        begin = min(
            events[0].time_ns + shift for events, shift in zip(of_ranks, shifts, strict=True)
        )
        found: dict[str, list[float]] = {}
        for events, shift in zip(of_ranks, shifts, strict=True):
            for event in events:
                found.setdefault(event.step, []).append((event.time_ns + shift - begin) / 1e3)
        for step, each in found.items():
            times.setdefault((kernel, step), []).append(each)
    order = {step: number for number, step in enumerate(_core.trace_steps)}
    kernels = list(numbers)
    return [
        StepTimes(
            kernel,
            step,
            statistics.median(min(each) for each in of_calls),
            statistics.median(statistics.median(each) for each in of_calls),
            statistics.median(max(each) for each in of_calls),
            round(statistics.median(len(each) for each in of_calls)),
        )
        for (kernel, step), of_calls in sorted(
            times.items(), key=lambda item: (kernels.index(item[0][0]), order[item[0][1]])
        )
    ]


def summarise(
    recordings: Sequence[Recording], alignment: Alignment, last_calls: int | None = None
) -> str:
    """A table of step_times, and the clocks. ``recordings``: of one Buffer."""
    ranks, given = len(recordings), recordings[0].num_ranks
    lines = [f"Buffer {recordings[0].buffer}: {ranks} of {given} ranks; {alignment}"]
    times = step_times(recordings, alignment, last_calls)
    if not times:
        return "\n".join([*lines, "no call that all of them have noted"])
    head = f"{'kernel':<22}{'step':<16}{'blocks':>7}{'first':>11}{'median':>11}{'last':>11}  µs"
    lines.append(head)
    before = ""
    for row in times:
        name = row.kernel if row.kernel != before else ""
        before = row.kernel
        lines.append(
            f"{name:<22}{row.step:<16}{row.num_notes:>7}"
            f"{row.first_us:>11.2f}{row.median_us:>11.2f}{row.last_us:>11.2f}"
        )
    return "\n".join(lines)
