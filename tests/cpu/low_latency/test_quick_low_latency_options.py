"""Low-latency calls with options in one native step: what they give, in which order streams run
them, and which of them are left to Python."""

from __future__ import annotations

import itertools
from typing import Any

import fake_cuda
import pytest
import torch
from quick_calls import E, H, K, M, R, Spy, T, inputs, on_ranks, require_same

import deep_comm
from deep_comm import _core, local
from deep_comm.errors import ArgumentError, BufferTooSmall
from deep_comm.ops import quick

COMBINES = {
    "plain": {},
    "logfmt": dict(use_logfmt=True),
    "zero_copy": dict(zero_copy=True),
    "one_rounding": dict(one_rounding=True),
    "zero_copy-one_rounding": dict(zero_copy=True, one_rounding=True),
}


def sizes_for(options: dict[str, Any]) -> int:
    """Bytes: one_rounding needs more than the size hint where K > R."""
    hint = deep_comm.Buffer.get_low_latency_rdma_size_hint(M, H, R, E)
    return hint * K if options.get("one_rounding") else hint


@pytest.mark.parametrize("way", ["sync", "async", "hook"])
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("form", list(COMBINES))
def test_options_of_combine_give_what_many_steps_do(form: str, compact: bool, way: str) -> None:
    options = COMBINES[form]
    if compact and options.get("one_rounding"):
        pytest.skip("compact rows are reduced already")
    how = {"sync": {}, "async": dict(async_finish=True), "hook": dict(return_recv_hook=True)}[way]

    def main(group: local.ThreadGroup) -> None:
        rank = group.rank()
        x, idx, weights = inputs(rank, T - rank)
        generator = torch.Generator().manual_seed(rank)
        with deep_comm.Buffer(
            group, 0, sizes_for(options), low_latency_mode=True, timeout_s=20
        ) as buffer:
            spy = Spy(buffer)

            def finish(event: Any, hook: Any) -> None:
                assert (hook is not None) == (way == "hook")
                assert (event.event is not None) == (way == "async")
                if hook is not None:
                    hook()
                if event.event is not None:
                    event.current_stream_wait()

            def pair() -> tuple[Any, ...]:
                generator.manual_seed(rank)
                stats = torch.zeros(E // R, dtype=torch.int32)
                waits = torch.zeros(2, R, dtype=torch.int64)
                payload, count, handle, event, hook = buffer.low_latency_dispatch(
                    x, idx, M, E, stats, waits[0], compact=compact, **how
                )
                finish(event, hook)
                rows = torch.randn(handle.rows_shape, generator=generator).bfloat16()
                if options.get("zero_copy"):
                    buffer.get_next_low_latency_combine_buffer(handle).copy_(rows)
                    # Of x only the shape counts.
                    rows = torch.zeros(1, dtype=torch.bfloat16).expand(handle.rows_shape)
                combined, event, hook = buffer.low_latency_combine(
                    rows, idx, weights, handle, combine_wait_recv_cost_stats=waits[1], **how,
                    **options,
                )  # fmt: skip
                finish(event, hook)
                return payload, count, handle, combined, stats

            pair()
            spy.made.clear()
            one = pair()
            assert spy.made == [True, True]
            spy.forbid()
            require_same(one, pair())

    local.run(main, R, timeout_s=120)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_nvfp4_with_a_global_scale(shape: tuple[int, ...]) -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)
        scale = torch.full(shape, 2.5)
        spy = Spy(buffer)

        def pair() -> tuple[Any, ...]:
            payload, count, handle, *_ = buffer.low_latency_dispatch(
                x, idx, M, E, use_nvfp4=True, x_global_scale=scale
            )
            rows = torch.ones(handle.rows_shape, dtype=torch.bfloat16)
            combined = buffer.low_latency_combine(rows, idx, weights, handle)[0]
            return payload, count, handle, combined, count

        pair()
        spy.made.clear()
        one = pair()
        assert spy.made == [True, True]
        without = buffer.low_latency_dispatch(x, idx, M, E, use_nvfp4=True)
        spy.forbid()
        many = pair()
        require_same(one, many)
        for group, number in enumerate(one[1].tolist()):
            assert torch.equal(one[0][0][group, :number], many[0][0][group, :number])
            if number > 0:  # the scale was not left out
                assert not torch.equal(one[0][1].float(), without[0][1].float())

    on_ranks(body)


def test_options_that_exclude_each_other_are_named() -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)
        for _ in range(2):  # of a form that is known, too
            handle = buffer.low_latency_dispatch(x, idx, M, E)[2]
        rows = torch.ones(handle.rows_shape, dtype=torch.bfloat16)
        launched = buffer._context.engine.num_launches
        with pytest.raises(ArgumentError, match="x_global_scale"):
            buffer.low_latency_dispatch(x, idx, M, E, x_global_scale=torch.ones(1))
        with pytest.raises(ArgumentError, match="async_finish"):
            buffer.low_latency_dispatch(x, idx, M, E, async_finish=True, return_recv_hook=True)

        def combine(**options: Any) -> Any:
            return buffer.low_latency_combine(rows, idx, weights, handle, **options)

        with pytest.raises(ArgumentError, match="async_finish"):
            combine(async_finish=True, return_recv_hook=True)
        with pytest.raises(ArgumentError, match="zero_copy"):
            combine(zero_copy=True)  # there is no buffer yet
        buffer.get_next_low_latency_combine_buffer(handle)
        with pytest.raises(ArgumentError, match="use_logfmt"):
            combine(zero_copy=True, use_logfmt=True)
        with pytest.raises(ArgumentError, match="use_logfmt"):
            combine(one_rounding=True, use_logfmt=True)
        compact = buffer.low_latency_dispatch(x, idx, M, E, compact=True)[2]
        with pytest.raises(ArgumentError, match="one_rounding"):
            buffer.low_latency_combine(rows[0], idx, weights, compact, one_rounding=True)
        assert buffer._context.engine.num_launches == launched + 1

    on_ranks(body, 1)


def test_one_rounding_without_room_is_refused() -> None:
    def main(group: local.ThreadGroup) -> None:
        x, idx, weights = inputs(0)
        sizes = dict(num_ranks=1, num_max_tokens=M, hidden=H, num_topk=K, num_experts=E)
        sizes.update(num_blocks=3, is_internode=False, can_shrink=False)
        exact = max(
            _core.Engine.low_latency_region_bytes(**sizes, format=name)
            for name in ("fp8", "bfloat16")
        )
        with deep_comm.Buffer(group, 0, exact, low_latency_mode=True, timeout_s=20) as buffer:
            for _ in range(2):
                handle = buffer.low_latency_dispatch(x, idx, M, E)[2]
            rows = torch.ones(handle.rows_shape, dtype=torch.bfloat16)
            with pytest.raises(BufferTooSmall, match="num_rdma_bytes"):
                buffer.low_latency_combine(rows, idx, weights, handle, one_rounding=True)

    local.run(main, 1, timeout_s=60)


Recorded = list[tuple[str, Any]]


@pytest.mark.parametrize("current", [fake_cuda.COMPUTE, fake_cuda.COMM])
def test_asynchronous_calls_order_streams_as_step_by_step(
    monkeypatch: pytest.MonkeyPatch, current: int
) -> None:
    """The same events and streams. torch's allocator is told of the same tensors, but for outputs,
    which events keep (test_outputs_event.py)."""
    logs: list[tuple[list[Any], Recorded]] = []

    def main(group: local.ThreadGroup) -> None:
        x, idx, weights = inputs(0)
        num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(M, H, 1, E)
        with deep_comm.Buffer(group, 0, num_bytes, low_latency_mode=True, timeout_s=20) as buffer:
            spy = Spy(buffer)
            stats = torch.zeros(E, dtype=torch.int32)
            names: dict[int, str] = {}

            def pair() -> None:
                payload, _, handle, event, _ = buffer.low_latency_dispatch(
                    x, idx, M, E, stats, topk_weights=weights, async_finish=True
                )
                event.current_stream_wait()
                rows = torch.ones(handle.rows_shape, dtype=torch.bfloat16)
                combined, event, _ = buffer.low_latency_combine(
                    rows, idx, None, handle, async_finish=True
                )
                event.current_stream_wait()
                given = (x, idx, weights, stats, rows, *payload, handle.metadata, combined)
                for name, tensor in zip(
                    ("x", "idx", "weights", "stats", "rows", "recv_x", "scales", "metadata", "sum"),
                    given, strict=True,
                ):  # fmt: skip
                    names[tensor.data_ptr()] = name

            log.current = current
            pair()
            for is_quick in (True, False):
                if not is_quick:
                    spy.forbid()
                spy.made.clear()
                recorded.clear()
                names.clear()
                log.clear()
                pair()
                assert spy.made == ([True, True] if is_quick else [])
                told = sorted((names[address], stream) for address, stream in recorded)
                logs.append((list(log), told))

    recorded: list[tuple[int, Any]] = []
    with fake_cuda.installed() as log:
        monkeypatch.setattr(
            torch.Tensor, "record_stream",
            lambda tensor, stream: recorded.append((tensor.data_ptr(), stream.cuda_stream)),
        )  # fmt: skip
        local.run(main, 1, timeout_s=60)
    one, many = logs
    assert one[0] == many[0]
    given = ["x", "idx", "idx", "weights", "stats", "rows", "metadata"]
    outputs = ["recv_x", "scales", "metadata", "sum"]
    assert one[1] == sorted((name, fake_cuda.COMM) for name in given)
    assert many[1] == sorted((name, fake_cuda.COMM) for name in given + outputs)
    orders = [entry for entry in one[0] if entry[0] == "order"]
    assert len(orders) == (2 if current == fake_cuda.COMPUTE else 0)


def test_while_capturing_asynchronous_calls_go_step_by_step() -> None:
    def main(group: local.ThreadGroup) -> None:
        x, idx, weights = inputs(0)
        num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(M, H, 1, E)
        with deep_comm.Buffer(group, 0, num_bytes, low_latency_mode=True, timeout_s=20) as buffer:
            spy = Spy(buffer)
            buffer.low_latency_dispatch(x, idx, M, E)
            for is_capturing in (False, True):
                spy.made.clear()
                log.capturing.clear()
                if is_capturing:
                    log.capturing.add(log.current)
                buffer.low_latency_dispatch(x, idx, M, E, async_finish=True)
                assert spy.made == [not is_capturing]
            log.capturing.clear()

    with fake_cuda.installed() as log:
        local.run(main, 1, timeout_s=60)


def test_forms_of_every_option_are_counted() -> None:
    """One plan serves every kind of combine of its shape; nothing grows with calls."""

    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)
        handle = buffer.low_latency_dispatch(x, idx, M, E)[2]
        buffer.get_next_low_latency_combine_buffer(handle)
        rows = torch.ones(handle.rows_shape, dtype=torch.bfloat16)
        for use_logfmt, async_finish in itertools.product((False, True), repeat=2):
            buffer.low_latency_combine(
                rows, idx, weights, handle, use_logfmt=use_logfmt, async_finish=async_finish
            )
        assert len(buffer._low_latency.shapes) == 1
        assert buffer._low_latency.quick_combine is not quick.never

    on_ranks(body, 1)
