"""Stream semantics: what a call waits for, what waits for it, and who keeps the memory."""

import functools

import gpu_cases
import pytest
import torch
from graph_bodies import captured

import deep_comm

HIDDEN = 2048

run = functools.partial(gpu_cases.run, variables={}, timeout_s=200)


def make(group) -> tuple[deep_comm.Buffer, torch.Tensor, torch.Tensor, torch.Tensor]:
    rank, num_ranks = group.rank(), group.size()
    device = torch.device("cuda", rank)
    buffer = deep_comm.Buffer(group, 128 << 20, device=device, timeout_s=60)
    topk_idx = torch.arange(num_ranks, device=device).expand(64, num_ranks).contiguous()
    weights = torch.ones(64, num_ranks, device=device)
    x = torch.full((64, HIDDEN), float(rank + 1), dtype=torch.bfloat16, device=device)
    return buffer, x, topk_idx, weights


def _waits_for_the_current_stream(group, how: str) -> bool:
    """x is written late; a dispatch that did not wait would send the old values."""
    buffer, x, topk_idx, weights = make(group)
    options = {}
    with buffer:
        for call in range(5):
            value = float(call * group.size() + group.rank() + 1)
            torch.cuda._sleep(20_000_000)
            x.fill_(value)
            if how == "event":
                event = deep_comm.Buffer.capture()
                options = dict(
                    previous_event=event, async_finish=True, allocate_on_comm_stream=True
                )
            elif how == "async":
                options = dict(async_finish=True)
            recv_x, _, _, _, handle, event = buffer.dispatch(
                x, topk_idx=topk_idx, topk_weights=weights, num_experts=group.size(), **options
            )
            if how != "sync":
                assert event.event is not None
                event.current_stream_wait()
            else:
                assert event.event is None
            expected = torch.arange(group.size(), device=x.device) + call * group.size() + 1.0
            rows = recv_x.view(group.size(), 64, HIDDEN).float()
            if not bool((rows == expected.view(-1, 1, 1)).all()):
                return False
            y = recv_x.clone()
            total = buffer.combine(y, handle)[0]
            if not bool((total.float() == value * group.size()).all()):
                return False
    return True


@pytest.mark.parametrize("how", ["sync", "async", "event"])
def test_dispatch_waits_for_what_was_queued_before(num_ranks: int, how: str) -> None:
    assert all(run(_waits_for_the_current_stream, num_ranks, how))


def _previous_event_alone_is_waited_for(group) -> bool:
    """With previous_event a call does not wait for later work of the current stream."""
    buffer, x, topk_idx, weights = make(group)
    with buffer:
        buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, num_experts=group.size())
        torch.cuda.synchronize()
        event = deep_comm.Buffer.capture()
        busy = torch.cuda.Event()
        torch.cuda._sleep(2_000_000_000)
        busy.record()
        _, _, _, _, _, done = buffer.dispatch(
            x, topk_idx=topk_idx, topk_weights=weights, num_experts=group.size(),
            previous_event=event, async_finish=True, allocate_on_comm_stream=True,
        )  # fmt: skip
        buffer.get_comm_stream().synchronize()
        still_busy = not busy.query()
        done.current_stream_wait()
        torch.cuda.synchronize()
        return still_busy


def test_previous_event_lets_communication_overlap(num_ranks: int) -> None:
    assert all(run(_previous_event_alone_is_waited_for, num_ranks))


def _memory_is_kept(group) -> bool:
    """Inputs dropped right after an asynchronous call are not reused before it has read them."""
    buffer, x, topk_idx, weights = make(group)
    good = True
    with buffer:
        for call in range(20):
            value = float(call + 1)
            temporary = torch.full_like(x, value)
            recv_x, _, _, _, handle, event = buffer.dispatch(
                temporary, topk_idx=topk_idx, topk_weights=weights, num_experts=group.size(),
                async_finish=True,
            )  # fmt: skip
            del temporary
            trash = [torch.full_like(x, -1.0) for _ in range(4)]
            event.current_stream_wait()
            good = good and bool((recv_x == value).all())
            del trash
    return good


def test_tensors_of_an_asynchronous_call_stay_alive(num_ranks: int) -> None:
    assert all(run(_memory_is_kept, num_ranks))


def _on_the_comm_stream(group) -> bool:
    buffer, x, topk_idx, weights = make(group)
    with buffer:
        torch.cuda.synchronize()
        with torch.cuda.stream(buffer.get_comm_stream()):
            recv_x, _, _, _, handle, _ = buffer.dispatch(
                x, topk_idx=topk_idx, topk_weights=weights, num_experts=group.size()
            )
            total = buffer.combine(recv_x, handle)[0]
        torch.cuda.synchronize()
        return bool((total == x * group.size()).all())


def test_the_comm_stream_may_be_the_current_stream(num_ranks: int) -> None:
    assert all(run(_on_the_comm_stream, num_ranks))


def _eager_and_captured(group) -> bool:
    """Eager calls on two streams around a captured pair and its replays: no event of
    one belongs to the other.
    """
    buffer, x, topk_idx, weights = make(group)
    config = deep_comm.Config(8, 8, 32)
    other = torch.cuda.Stream()
    good = True
    with buffer:
        handle = buffer.dispatch(
            x, topk_idx=topk_idx, topk_weights=weights, num_experts=group.size(), config=config
        )[4]

        def pair() -> torch.Tensor:
            rows = buffer.dispatch(x, handle=handle, config=config)[0]
            return buffer.combine(rows, handle, config=config)[0]

        pair()
        graph, replayed = captured(pair, group)
        group.barrier()
        want = x * group.size()
        for _ in range(3):
            good = good and torch.equal(pair(), want)
            replayed.zero_()
            graph.replay()
            good = good and torch.equal(replayed, want)
            torch.cuda.synchronize()
            with torch.cuda.stream(other):
                torch.cuda._sleep(2_000_000)
                late = pair()
            good = good and torch.equal(pair(), want)  # behind the other stream's
            other.synchronize()
            good = good and torch.equal(late, want)
        buffer.check()
    return good


def test_eager_calls_around_a_graph(num_ranks: int) -> None:
    assert all(run(_eager_and_captured, num_ranks))
