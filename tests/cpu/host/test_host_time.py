"""What one call costs the host, counted: times depend on the machine, counts do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import fake_cuda
import pytest
import torch
from fake_cuda import COMPUTE, Counter
from run_by import run_by

import deep_comm
from deep_comm import local

T, H, K, E = 40, 256, 2, 8


def _on_fake_cuda(body: Callable[..., Any], num_direct_bytes: int = 8 << 20) -> Any:
    """``body(buffer, log, x, handle, topk_idx)`` after two rounds that fill every cache."""

    def main(group: local.ThreadGroup) -> Any:
        with deep_comm.Buffer(
            group, 16 << 20, num_direct_bytes=num_direct_bytes, timeout_s=20
        ) as buffer:
            generator = torch.Generator().manual_seed(3)
            x = torch.randn(T, H, generator=generator).bfloat16()
            idx = torch.rand(T, E, generator=generator).topk(K).indices
            config = deep_comm.Config(2, 4, 16)
            received = buffer.dispatch(
                x, topk_idx=idx, topk_weights=idx.float(), num_experts=E, config=config
            )
            handle = received[4]
            for _ in range(2):
                buffer.get_dispatch_layout(idx, E)
                again = buffer.dispatch(x, handle=handle, config=config)[0]
                assert torch.equal(again, received[0])
                sums = buffer.combine(again, handle, config=config)[0]
            assert torch.equal(sums, x)
            del again, sums, received
            log.clear()
            return body(buffer, log, x, handle, idx)

    with fake_cuda.installed() as log:
        return local.run(main, 1, timeout_s=60)[0]


@pytest.fixture
def empties(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Every torch.empty and empty_strided, by shape; and what native code calls for them."""
    made: list[object] = []
    empty, strided = torch.empty, torch.empty_strided

    def counting(*shape: Any, **options: Any) -> torch.Tensor:
        made.append(shape)
        return empty(*shape, **options)

    def counting_strided(shape: Any, strides: Any, **options: Any) -> torch.Tensor:
        made.append(tuple(shape))
        return strided(shape, strides, **options)

    monkeypatch.setattr(torch, "empty", counting)
    monkeypatch.setattr(torch, "empty_strided", counting_strided)
    guards = torch._C._dynamo.guards  # type: ignore[attr-defined]
    native = guards._empty_strided_cpu

    def counting_native(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        made.append(shape)
        return native(shape, strides, dtype)

    monkeypatch.setattr(guards, "_empty_strided_cpu", counting_native)
    yield made


CONFIG = deep_comm.Config(2, 4, 16)


@run_by(_on_fake_cuda)
def test_a_cached_dispatch_takes_one_block_and_no_tensor_of_torch(
    buffer: Any, log: Any, x: Any, handle: Any, idx: Any, /, empties: list[object]
) -> None:
    before = buffer._context.region.num_free_bytes
    empties.clear()
    with Counter() as counter:
        out = buffer.dispatch(x, handle=handle, config=CONFIG)[0]
    assert empties == []
    assert log == [("dispatch", COMPUTE), ("record", COMPUTE)]
    assert len(counter.functions) <= 24, counter.functions
    assert buffer._context.region.num_free_bytes < before
    log.clear()
    del out
    assert log == [("mark", COMPUTE)]
    assert buffer._context.region.num_free_bytes == before


@run_by(_on_fake_cuda)
def test_a_dispatch_launches_all_before_it_waits(
    buffer: Any, log: Any, x: Any, handle: Any, idx: Any, /, empties: list[object]
) -> None:
    empties.clear()
    with Counter() as counter:
        buffer.dispatch(x, topk_idx=idx, topk_weights=idx.float(), num_experts=E, config=CONFIG)
    assert empties == []  # what the handle keeps lies in the region, too
    assert log[:3] == [("notify", COMPUTE), ("dispatch", COMPUTE), ("wait_counts",)], log
    assert len(counter.functions) <= 24, counter.functions


@run_by(_on_fake_cuda, num_direct_bytes=0)
def test_a_cached_dispatch_without_region_takes_one_tensor(
    buffer: Any, log: Any, x: Any, handle: Any, idx: Any, /, empties: list[object]
) -> None:
    empties.clear()
    buffer.dispatch(x, handle=handle, config=CONFIG)
    assert len(empties) == 1
    assert log.names() == ["dispatch", "record"]


@run_by(_on_fake_cuda)
def test_a_combine_takes_one_tensor(
    buffer: Any, log: Any, x: Any, handle: Any, idx: Any, /, empties: list[object]
) -> None:
    rows = buffer.dispatch(x, handle=handle, config=CONFIG)[0]
    log.clear()
    empties.clear()
    with Counter() as counter:
        buffer.combine(rows, handle, config=CONFIG)
    assert len(empties) == 1
    assert log == [("combine", COMPUTE), ("record", COMPUTE)]
    assert len(counter.functions) <= 23, counter.functions


@run_by(_on_fake_cuda)
def test_a_layout_takes_three_tensors(
    buffer: Any, log: Any, x: Any, handle: Any, idx: Any, /, empties: list[object]
) -> None:
    empties.clear()
    with Counter() as counter:
        buffer.get_dispatch_layout(idx, E)
    assert len(empties) == 3
    assert log == [("layout", COMPUTE), ("record", COMPUTE)]
    assert len(counter.functions) <= 23, counter.functions


def test_copies_of_a_handle_serve_as_it_does() -> None:
    import copy
    import dataclasses

    def body(buffer: Any, log: Any, x: Any, handle: Any, idx: Any) -> None:
        rows = buffer.dispatch(x, handle=handle, config=CONFIG)[0]
        for same in (dataclasses.replace(handle), copy.deepcopy(handle), tuple(handle)):
            assert torch.equal(buffer.combine(rows, same, config=CONFIG)[0], x)

    _on_fake_cuda(body)


@run_by(_on_fake_cuda)
def test_a_block_that_another_stream_may_read_is_waited_for(
    buffer: Any, log: Any, x: Any, handle: Any, idx: Any, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All of the region was last used on some other stream.
    region = buffer._context.region
    blocks = []
    while (taken := region.allocate(1024)) is not None:
        blocks.append(taken[0])
    log.current = 33
    del blocks, taken
    # And on the stream that took them, whose kernels may have been given them without a word.
    assert set(log) == {("mark", 33), ("mark", COMPUTE)}
    log.clear()
    log.current = COMPUTE
    buffer.dispatch(x, handle=handle, config=CONFIG)
    assert log[:2] == [("wait", COMPUTE), ("dispatch", COMPUTE)]


@pytest.mark.parametrize("compact", [False, True])
def test_low_latency_calls_touch_no_other_stream(empties: list[object], compact: bool) -> None:
    def main(group: local.ThreadGroup) -> None:
        num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(T, H, 1, E)
        with deep_comm.Buffer(group, 0, num_bytes, low_latency_mode=True, timeout_s=20) as buffer:
            x = torch.randn(T, H).bfloat16()
            idx = torch.rand(T, E).topk(K).indices
            weights = torch.rand(T, K)

            def pair() -> tuple[torch.Tensor, Counter, Counter]:
                with Counter() as there:
                    handle = buffer.low_latency_dispatch(
                        x, idx, T, E, topk_weights=weights, compact=compact
                    )[2]
                rows = torch.ones(handle.rows_shape, dtype=torch.bfloat16)
                with Counter() as back:
                    combined = buffer.low_latency_combine(rows, idx, None, handle)[0]
                return combined, there, back

            pair()
            empties.clear()
            log.clear()
            combined, there, back = pair()
            assert empties == _shapes(compact)
            assert log == [("low_latency_dispatch", COMPUTE), ("low_latency_combine", COMPUTE)]
            assert there.functions == ["low_latency_dispatch"]
            assert back.functions == ["low_latency_combine"]
            want = weights.sum(1) if not compact else torch.ones(T)
            assert torch.allclose(combined[:, 0].float(), want, rtol=1e-2)

    def _shapes(compact: bool) -> list[tuple[int, ...]]:
        groups = () if compact else (E,)
        rows, scales = (*groups, T, H), (*groups, T, H // 128)
        metadata = [shape for shape in empties if len(shape) == 1]
        return [rows, scales, *metadata, (T, H)]

    with fake_cuda.installed() as log:
        local.run(main, 1, timeout_s=60)


@pytest.mark.parametrize("looked_at", [False, True])
@run_by(_on_fake_cuda)
def test_streams_matter_to_a_handles_memory_once_there_is_a_tensor_of_it(
    buffer: Any, log: Any, x: Any, handle: Any, idx: Any, /, looked_at: bool
) -> None:
    made = buffer.dispatch(x, topk_idx=idx, num_experts=E, config=CONFIG)[4]
    buffer.combine(x, made, config=CONFIG)
    if looked_at:
        assert torch.equal(made.recv_src_idx, torch.arange(T, dtype=torch.int32))
    log.clear()
    del made
    assert log == [("mark", COMPUTE)] * looked_at


@run_by(_on_fake_cuda)
def test_a_dispatch_without_counts_for_the_host_makes_no_tensor_of_torch(
    buffer: Any, log: Any, x: Any, handle: Any, idx: Any, /, empties: list[object]
) -> None:
    def call() -> Any:
        return buffer.dispatch(
            x, topk_idx=idx, topk_weights=idx.float(), num_experts=E, config=CONFIG,
            num_worst_tokens=2 * T,
        )  # fmt: skip

    call()
    empties.clear()
    with Counter() as counter:
        received = call()
    assert empties == []
    assert len(counter.functions) <= 53, counter.functions
    assert received[4].num_recv_tokens_tensor.item() == T
    assert received[4].recv_src_idx.tolist() == [*range(T), *[-1] * T]


@pytest.mark.parametrize("num_direct_bytes", [0, 8 << 20])
def test_a_handle_used_from_another_stream_outlives_the_call(
    monkeypatch: pytest.MonkeyPatch, num_direct_bytes: int
) -> None:
    """If its memory is torch's: it is the first stream's, which does not wait for the second one's
    combine. In the receive region whoever writes there next is a kernel behind that combine.
    """

    def body(buffer: Any, log: Any, x: Any, handle: Any, idx: Any) -> None:
        recorded: list[Any] = []
        monkeypatch.setattr(
            torch.Tensor,
            "record_stream",
            lambda tensor, stream: recorded.append(stream.cuda_stream),
        )
        rows = buffer.dispatch(x, handle=handle, config=CONFIG)[0]
        buffer.combine(rows, handle, config=CONFIG)
        assert recorded == []
        log.current = 33
        buffer.combine(rows, handle, config=CONFIG)
        assert set(recorded) == (set() if num_direct_bytes else {33})
        recorded.clear()
        buffer.combine(rows, handle, config=CONFIG)
        assert recorded == []  # torch knows

    _on_fake_cuda(body, num_direct_bytes)


def test_a_captured_event_is_one_of_the_pool() -> None:
    def body(buffer: Any, log: Any, x: Any, handle: Any, idx: Any) -> None:
        with Counter() as counter:
            event = deep_comm.Buffer.capture()
        assert log == [("mark", COMPUTE)]
        assert len(counter.functions) <= 10, counter.functions
        log.clear()
        event.current_stream_wait()
        assert log == [("wait", COMPUTE)]

    _on_fake_cuda(body)
    assert deep_comm.Buffer.capture().event is not None  # of no backend
