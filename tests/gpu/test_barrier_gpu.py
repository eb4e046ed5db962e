"""The barrier on a device's stream, in CUDA graphs as well, and what profiles call the kernels."""

from __future__ import annotations

import gpu_pool
import pytest
import torch

import deep_comm

HIDDEN, TOKENS = 1024, 64
LATE = 50_000_000  # cycles
COLUMNS = 100  # of a name in torch's table


def run(fn, num_ranks: int, *args: object) -> list:
    return gpu_pool.shared().run(fn, num_ranks, *args, devices=range(num_ranks), timeout_s=100)


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


def _names(group) -> list[str]:
    with make(group) as buffer:
        num_ranks, device = group.size(), buffer.device
        x = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16, device=device)
        idx = torch.arange(num_ranks, device=device).expand(TOKENS, num_ranks).contiguous()

        def calls() -> None:
            recv_x, *_, handle, _ = buffer.dispatch(x, topk_idx=idx, num_experts=num_ranks)
            buffer.dispatch(x, handle=handle)
            buffer.combine(recv_x, handle)
            buffer.barrier()

        calls()
        torch.cuda.synchronize()
        group.barrier()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            calls()
            torch.cuda.synchronize()
        averages = profiler.key_averages()
        return averages.table(max_name_column_width=COLUMNS).split("\n")


def test_a_profile_names_each_operation_once(num_ranks: int) -> None:
    for lines in run(_names, num_ranks):
        for name in ("::notify", "::dispatch", "::combine", "::barrier"):
            found = [line for line in lines if name in line[:COLUMNS]]
            assert len(found) == 1, (name, lines)
