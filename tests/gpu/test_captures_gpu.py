"""Beside a capture and behind a replay: memory within a graph, events that go, waits."""

import functools

import gpu_cases
import pytest
import torch

import deep_comm
from deep_comm.errors import ExpertIndexError

HIDDEN, TOKENS = 2048, 64
LATE = 50_000_000  # cycles

run = functools.partial(gpu_cases.run, variables={}, timeout_s=100)


class Calls:
    """Every rank sends all its tokens to every rank."""

    def __init__(self, group, buffer: deep_comm.Buffer) -> None:
        rank, num_ranks, device = group.rank(), group.size(), buffer.device
        self.buffer, self.num_ranks = buffer, num_ranks
        self.idx = torch.arange(num_ranks, device=device).expand(TOKENS, num_ranks).contiguous()
        self.weights = torch.ones(TOKENS, num_ranks, device=device)
        self.xs = [
            torch.full((TOKENS, HIDDEN), 10.0 * call + rank, dtype=torch.bfloat16, device=device)
            for call in range(2)
        ]
        self.handle = self.new_routing(self.idx)[4]

    def new_routing(self, idx: torch.Tensor) -> tuple:
        return self.buffer.dispatch(
            self.xs[0], topk_idx=idx, topk_weights=self.weights, num_experts=self.num_ranks
        )

    def cached(self, call: int, **options) -> torch.Tensor:
        return self.buffer.dispatch(self.xs[call], handle=self.handle, **options)[0]

    def are_rows(self, rows: torch.Tensor, call: int) -> bool:
        wanted = torch.arange(self.num_ranks, device=rows.device) + 10.0 * call
        return bool((rows.view(self.num_ranks, -1).float() == wanted[:, None]).all())


def make(group, **options) -> deep_comm.Buffer:
    device = torch.device("cuda", group.rank())
    return deep_comm.Buffer(group, 128 << 20, device=device, timeout_s=30, **options)


def _memory_within_a_graph(group, is_other_stream: bool) -> bool:
    with make(group) as buffer:
        calls = Calls(group, buffer)
        seen = torch.empty_like(calls.cached(0))
        other = torch.cuda.Stream(buffer.device)
        torch.cuda.synchronize()
        group.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rows, options = calls.cached(0), {}
            reader = torch.cuda.current_stream()
            if is_other_stream:
                other.wait_stream(reader)
                reader = other
            else:
                options["previous_event"] = deep_comm.Buffer.capture()
            with torch.cuda.stream(reader):
                torch.cuda._sleep(LATE)
                seen.copy_(rows)
                place = rows.data_ptr()
                del rows
            again = calls.cached(1, **options)
            torch.cuda.current_stream().wait_stream(reader)
        assert again.data_ptr() == place
        for _ in range(3):
            graph.replay()
            torch.cuda.synchronize()
            if not (calls.are_rows(seen, 0) and calls.are_rows(again, 1)):
                return False
        buffer.check()
    return True


@pytest.mark.parametrize("is_other_stream", [False, True])
def test_memory_within_a_graph_is_written_behind_its_readers(
    num_ranks: int, is_other_stream: bool
) -> None:
    assert all(run(_memory_within_a_graph, num_ranks, is_other_stream))


def _events_that_go(group) -> bool:
    experts, shape = 2 * group.size(), (16, HIDDEN)
    num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(16, HIDDEN, group.size(), experts)
    with make(group, num_rdma_bytes=num_bytes, low_latency_mode=True) as buffer:
        x = torch.ones(shape, dtype=torch.bfloat16, device=buffer.device)
        idx = torch.arange(16, device=x.device)[:, None] % experts
        events = [
            buffer.low_latency_dispatch(x, idx, 16, experts, async_finish=True)[3] for _ in range(3)
        ]  # nobody waits for them
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            events.clear()
            y = x + 1
        graph.replay()
        torch.cuda.synchronize()
        buffer.check()
        return bool((y == 2).all())


def test_events_of_eager_calls_may_go_during_a_capture(num_ranks: int) -> None:
    assert all(run(_events_that_go, num_ranks))


def _replays_are_awaited(group) -> bool:
    with make(group) as buffer:
        calls = Calls(group, buffer)
        torch.cuda.synchronize()
        group.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.cuda._sleep(10 * LATE)
            rows = calls.cached(1)
        graph.replay()
        end = torch.cuda.Event()
        end.record()
        buffer._context.synchronize()  # as reset and destroy begin
        return end.query() and calls.are_rows(rows, 1)


def test_what_ends_a_buffer_waits_for_replays(num_ranks: int) -> None:
    assert all(run(_replays_are_awaited, num_ranks))


def _another_device_is_current(group) -> bool:
    with make(group) as buffer:
        calls = Calls(group, buffer)
        torch.cuda.set_device((group.rank() + 1) % group.size())
        try:
            for _ in range(3):
                with pytest.raises(ExpertIndexError):
                    calls.new_routing(torch.full_like(calls.idx, 1000))
                    torch.cuda.synchronize(buffer.device)
                    buffer.check()
                rows = calls.new_routing(calls.idx)[0]
                if not calls.are_rows(rows, 0) or not calls.are_rows(calls.cached(1), 1):
                    return False
        finally:
            torch.cuda.set_device(group.rank())
    return True


def test_calls_and_errors_while_another_device_is_current(num_ranks: int) -> None:
    assert all(run(_another_device_is_current, num_ranks))
