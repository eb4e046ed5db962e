"""The same for asynchronous calls: on the communication stream, behind an event or the caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_cuda
import pytest
import torch
from fake_cuda import COMM, COMPUTE
from quick_calls import E, NormalSpy, T, inputs, layout_of, on_normal

import deep_comm
from deep_comm import local

STREAMS: dict[str, Callable[[], dict[str, Any]]] = {
    "async": lambda: dict(async_finish=True),
    "behind": lambda: dict(async_finish=True, previous_event=deep_comm.Buffer.capture()),
    "on-comm": lambda: dict(
        async_finish=True,
        previous_event=deep_comm.Buffer.capture(),
        allocate_on_comm_stream=True,
    ),
}


def calls_of(buffer: Any, rank: int, with_layout: bool) -> dict[str, Callable[..., Any]]:
    """By name, what gets the options of streams; whatever they return, tensors come first."""
    x, idx, weights = inputs(rank)
    routing = dict(topk_idx=idx, topk_weights=weights, num_experts=E)
    if with_layout:
        routing.update(layout_of(buffer, idx))
    rows, _, recv_weights, _, handle, _ = buffer.dispatch(x, **routing)
    quantised = x.to(torch.float8_e4m3fn), torch.ones(T, 2)
    rows, recv_weights = rows.clone(), recv_weights.clone()
    expanded, _, row_weights, _, grouped, _ = buffer.dispatch(x, **routing, expand=True)
    expanded, row_weights = expanded.clone(), row_weights.clone()
    return {
        "grouped counted": lambda **o: buffer.dispatch(x, **routing, expand=True, **o),
        "grouped bounded": lambda **o: buffer.dispatch(
            x, **routing, num_worst_tokens=9 * T, expand=True, zero_padding=True, **o
        ),
        "grouped cached": lambda **o: buffer.dispatch(x, handle=grouped, **o),
        "grouped combine": lambda **o: buffer.combine(
            expanded, grouped, row_weights, apply_weights=True, **o
        ),
        "grouped combine, weights": lambda **o: buffer.combine(expanded, grouped, row_weights, **o),
        "layout": lambda **o: buffer.get_dispatch_layout(idx, E, **o),
        "cached": lambda **o: buffer.dispatch(x, handle=handle, **o),
        "cached-fp8": lambda **o: buffer.dispatch(quantised, handle=handle, **o),
        "counted": lambda **o: buffer.dispatch(x, **routing, **o),
        "bounded": lambda **o: buffer.dispatch(x, **routing, num_worst_tokens=3 * T, **o),
        "combine": lambda **o: buffer.combine(rows, handle, **o),
        "combine-weights": lambda **o: buffer.combine(rows, handle, recv_weights, **o),
    }


def tensors_of(result: tuple[Any, ...]) -> list[torch.Tensor]:
    flat: list[torch.Tensor] = []
    for part in result:
        if isinstance(part, torch.Tensor):
            flat.append(part)
        elif isinstance(part, tuple):
            flat += part
        elif isinstance(part, deep_comm.Handle):
            count = int(part.num_recv_tokens_tensor)
            flat += [part.recv_src_idx[:count], part.send_head, part.rank_prefix_matrix]
            if part.expansion is not None:
                expansion = part.expansion
                flat += [expansion.recv_rows[:count], expansion.expert_counts, expansion.send_row]
    return flat


def require_same(one: Any, many: Any, num_rows: int) -> None:
    for got, want in zip(tensors_of(one), tensors_of(many), strict=True):
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
        assert torch.equal(got[:num_rows].float(), want[:num_rows].float())


@pytest.mark.parametrize("with_layout", [False, True])
@pytest.mark.parametrize("streams", STREAMS)
def test_asynchronous_calls_give_what_they_give_step_by_step(
    streams: str, with_layout: bool
) -> None:
    def body(buffer: Any, rank: int) -> None:
        calls = calls_of(buffer, rank, with_layout)
        spy = NormalSpy(buffer)
        for name, call in calls.items():
            call(**STREAMS[streams]())  # a form of its own, or one that a synchronous call left
            spy.made.clear()
            one = call(**STREAMS[streams]())
            assert spy.made == [True], name
            spy.is_off = True
            many = call(**STREAMS[streams]())
            spy.is_off = False
            assert isinstance(one[-1].event, deep_comm.EventHandle)
            one[-1].current_stream_wait()
            num_rows = 10**9
            if name == "bounded":  # rows past the received ones are not written
                num_rows = int(one[4].num_recv_tokens_tensor)
            require_same(one, many, num_rows)

    on_normal(body, num_direct_bytes=4 << 20)


def _on_streams(body: Callable[[Any, Any], None]) -> None:
    def main(group: local.ThreadGroup) -> None:
        with deep_comm.Buffer(group, 8 << 20, num_direct_bytes=4 << 20, timeout_s=20) as buffer:
            body(buffer, log)

    with fake_cuda.installed() as log:
        local.run(main, 1, timeout_s=60)


@pytest.mark.parametrize("with_layout", [False, True])
@pytest.mark.parametrize("streams", STREAMS)
def test_what_streams_and_the_allocator_are_told_is_the_same(
    monkeypatch: pytest.MonkeyPatch, streams: str, with_layout: bool
) -> None:
    """Each call in one step and step by step, behind a call on the communication stream or on the
    caller's."""
    recorded: set[tuple[Any, ...]] = set()

    def body(buffer: Any, log: Any) -> None:
        monkeypatch.setattr(
            torch.Tensor,
            "record_stream",
            lambda tensor, stream: recorded.add((*tensor.shape, tensor.dtype, stream.cuda_stream)),
        )
        calls = calls_of(buffer, 0, with_layout)
        spy = NormalSpy(buffer)

        def told(name: str, before: str) -> tuple[Any, ...]:
            options = {} if before == "caller" else dict(async_finish=True)
            calls["cached"](**options)
            given = STREAMS[streams]()
            later = object()
            log.work(later)
            log.clear()
            recorded.clear()
            spy.made.clear()
            result = calls[name](**given)
            made = spy.made.pop()
            events = [entry for entry in log if entry[0] != "wait_counts"]
            kernel = log.kernels[-1]
            assert kernel[0] == COMM and buffer._context.backend._streams.order.last == COMM
            assert (later in kernel[1]) == (streams == "async")
            home = result[4].home_stream if name.endswith(("counted", "bounded")) else None
            if made and name == "grouped counted":
                # Once before the host waits, and once behind the rows that follow.
                assert events.count(("record", COMM)) == 2
                events.remove(("record", COMM))
            return made, events, set(recorded), home

        for name in calls:
            for _ in range(2):
                told(name, "caller")
            for before in ("caller", "comm"):
                one = told(name, before)
                spy.is_off = True
                many = told(name, before)
                spy.is_off = False
                assert one[0] and not many[0], name
                assert sorted(one[1]) == sorted(many[1]), (name, before)
                assert one[2:] == many[2:], (name, before)
                assert one[3] in (None, COMM if streams != "async" else COMPUTE)

    _on_streams(body)


def test_a_synchronous_call_behind_an_asynchronous_one_is_one_step_too() -> None:
    """Told the same as step by step: that its stream comes behind the other."""

    def body(buffer: Any, log: Any) -> None:
        calls = calls_of(buffer, 0, False)
        spy = NormalSpy(buffer)
        for name, call in calls.items():
            call()
            told = []
            for spy.is_off in (False, True):
                calls["cached"](async_finish=True)
                log.clear()
                spy.made.clear()
                call()
                assert spy.made == [not spy.is_off]
                kernels = log.kernels
                assert kernels[-1][0] == COMPUTE and len(kernels) - 2 in kernels[-1][1]
                # Blocks of expanded calls in one step leave no marks: no tensor is made over them.
                unlike = {"wait_counts", "mark"} if name.startswith("grouped") else {"wait_counts"}
                events = [entry for entry in log if entry[0] not in unlike]
                if name == "grouped counted" and not spy.is_off:
                    events.remove(("record", COMPUTE))  # of two: before the host waits, and behind
                told.append(sorted(events))
            assert told[0] == told[1] and ("wait", COMPUTE) in told[0], name
            spy.is_off = False

    _on_streams(body)


def test_asynchronous_calls_in_a_capture_go_step_by_step() -> None:
    def body(buffer: Any, log: Any) -> None:
        calls = calls_of(buffer, 0, False)
        calls["cached"](async_finish=True)
        spy = NormalSpy(buffer)
        calls["cached"](async_finish=True)
        log.capturing.add(COMPUTE)
        calls["cached"](async_finish=True)
        assert spy.made == [True, False]
        log.capturing.clear()

    _on_streams(body)
