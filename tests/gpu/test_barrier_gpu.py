"""The barrier on a device's stream, in CUDA graphs as well, and what profiles call the kernels."""

from __future__ import annotations

import functools

import gpu_cases
import pytest
import torch

import deep_comm

HIDDEN, TOKENS = 1024, 64
LATE = 50_000_000  # cycles
COLUMNS = 100  # of a name in torch's table

run = functools.partial(gpu_cases.run, variables={}, timeout_s=100)


def make(group) -> deep_comm.Buffer:
    device = torch.device("cuda", group.rank())
    return deep_comm.Buffer(group, 128 << 20, device=device, timeout_s=30)


def _waits_for_the_late(group, is_captured: bool) -> float:
    """Milliseconds that a rank's stream spends in a barrier that rank 0 comes late to."""
    with make(group) as buffer:
        buffer.barrier()
        graph = torch.cuda.CUDAGraph()
        if is_captured:
            with torch.cuda.graph(graph):
                buffer.barrier()
        torch.cuda.synchronize()
        group.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(3):
            begin.record()
            if group.rank() == 0:
                torch.cuda._sleep(LATE)
            if is_captured:
                graph.replay()
            else:
                buffer.barrier()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
            group.barrier()
        return min(times)


@pytest.mark.parametrize("is_captured", [False, True])
def test_every_stream_waits_for_the_last(is_captured: bool, num_ranks: int) -> None:
    times = run(_waits_for_the_late, num_ranks, is_captured)
    # The host of another rank may come to its barrier after rank 0's, not much before.
    assert min(times) > 0.3 * times[0], times


def _many(group, num_barriers: int) -> float:
    with make(group) as buffer:
        for _ in range(10):
            buffer.barrier()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(num_barriers):
            buffer.barrier()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1000 / num_barriers


def test_many_barriers_take_microseconds_each(num_ranks: int) -> None:
    times = run(_many, num_ranks, 2000)
    assert max(times) < 200, times  # with a host's wait in each it would be thousands


def _normal(group):
    """A Buffer, a function that makes each call at least once, and its kernels' names."""
    buffer = make(group)
    num_ranks, device = group.size(), buffer.device
    x = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16, device=device)
    idx = torch.arange(num_ranks, device=device).expand(TOKENS, num_ranks).contiguous()

    def calls() -> None:
        recv_x, *_, handle, _ = buffer.dispatch(x, topk_idx=idx, num_experts=num_ranks)
        buffer.dispatch(x, handle=handle)
        buffer.combine(recv_x, handle)
        buffer.barrier()

    return buffer, calls, ("::notify", "::dispatch", "::combine", "::barrier")


def _hooks(group):
    """Low-latency calls with hooks: each phase is a launch of its own."""
    num_ranks, num_tokens = group.size(), 8
    num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(
        num_tokens, HIDDEN, num_ranks, num_ranks
    )
    device = torch.device("cuda", group.rank())
    buffer = deep_comm.Buffer(
        group, 0, num_bytes, low_latency_mode=True, device=device, timeout_s=30
    )
    x = torch.ones(num_tokens, HIDDEN, dtype=torch.bfloat16, device=device)
    idx = torch.arange(num_ranks, device=device).expand(num_tokens, num_ranks).contiguous()
    weights = torch.ones(num_tokens, num_ranks, device=device)

    def calls() -> None:
        rows, _, handle, _, hook = buffer.low_latency_dispatch(
            x, idx, num_tokens, num_ranks, use_fp8=False, return_recv_hook=True
        )
        hook()
        *_, hook = buffer.low_latency_combine(rows, idx, weights, handle, return_recv_hook=True)
        hook()

    return buffer, calls, ("::dispatch", "::combine")


def _profile(group, prepare) -> tuple[list[str], tuple[str, ...]]:
    buffer, calls, names = prepare(group)
    with buffer:
        calls()
        torch.cuda.synchronize()
        group.barrier()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            calls()
            torch.cuda.synchronize()
        averages = profiler.key_averages()
        return averages.table(max_name_column_width=COLUMNS).split("\n"), names


@pytest.mark.parametrize("prepare", [_normal, _hooks])
def test_a_profile_names_each_operation_once(prepare, num_ranks: int) -> None:
    for lines, names in run(_profile, num_ranks, prepare):
        for name in names:
            found = [line for line in lines if name in line[:COLUMNS]]
            assert len(found) == 1, (name, lines)
