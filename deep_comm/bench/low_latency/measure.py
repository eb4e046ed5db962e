"""Times of decode-sized work: graphs of many calls, single calls, and the kernels by themselves."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deep_comm.bench.measure import Effort, Timing, Work, gather, time_over_ranks

Call = Callable[[int], Any]
"""Of a slot."""


class Graph:
    """A CUDA graph of ``num_calls`` calls; the slots take turns.
    ``last``: what the last returned.
    """

    def __init__(self, call: Call, num_calls: int, num_slots: int) -> None:
        self.last_slot = (num_calls - 1) % num_slots
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call(0)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            for index in range(num_calls):
                self.last = call(index % num_slots)

    def replay(self, _call: int) -> None:
        self.graph.replay()


def time_eager(call: Call, num_slots: int, effort: Effort, device: torch.device) -> Timing:
    return time_over_ranks(lambda index: call(index % num_slots), effort, device)


def time_graphs(
    many: Graph, single: Graph, num_calls: int, effort: Effort, device: torch.device
) -> Timing:
    """The mean of a graph of many calls; p50 and p99 of replays of a graph of one, which include
    the distance between two graphs."""
    mean_effort = dataclasses.replace(effort, num_single_calls=1, num_host_calls=0)
    mean = time_over_ranks(many.replay, mean_effort, device, calls_per_work=num_calls)
    single_effort = dataclasses.replace(effort, num_rounds=1, num_host_calls=0)
    spread = time_over_ranks(single.replay, single_effort, device)
    return dataclasses.replace(mean, p50_us=spread.p50_us, p99_us=spread.p99_us)


def kernel_times(work: Work, num_works: int, kernels: Sequence[str]) -> dict[str, float]:
    """Median microseconds of each of the low-latency kernels that a call launches in turn, at the
    slowest rank, from torch's profiler. Empty if the profiler sees no kernels here. Collective."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for index in range(num_works):
            work(index)
        torch.cuda.synchronize()
    launches = [event for event in profiler.events() if "LowLatency" in event.name]
    launches.sort(key=lambda event: event.time_range.start)
    durations = [event.time_range.elapsed_us() for event in launches]
    by_kernel = {}
    if durations and len(durations) % len(kernels) == 0:
        for index, kernel in enumerate(kernels):
            by_kernel[kernel] = statistics.median(durations[index :: len(kernels)])
    ranks = gather(by_kernel)
    if not all(ranks):
        return {}
    return {kernel: max(times[kernel] for times in ranks) for kernel in kernels}
