"""Metadata of low-latency dispatches is used again when nobody has it, and not before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_cuda
import pytest
import torch
from quick_calls import E, H, M, R, Spy, inputs, on_ranks, require_same

import deep_comm
from deep_comm import local
from deep_comm.ops import quick

NUM_SPARES = 16
ROUNDS = 3 * NUM_SPARES


def addresses_of(dispatch: Callable[[], Any], keep: Callable[[Any], Any]) -> list[int]:
    """Of the metadata of many dispatches, of each of which what ``keep`` says is kept."""
    kept, found = [], []
    for _ in range(ROUNDS):
        result = dispatch()
        found.append(result[2].metadata.data_ptr())
        kept.append(keep(result))
    return found


def test_blocks_come_round_after_all_others() -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, _ = inputs(rank)

        def dispatch() -> Any:
            return buffer.low_latency_dispatch(x, idx, M, E)

        dispatch()
        found = addresses_of(dispatch, lambda result: None)
        assert len(set(found)) == NUM_SPARES
        assert found[NUM_SPARES:] == found[:-NUM_SPARES]

    on_ranks(body, 1)


KEPT: dict[str, Callable[[Any], Any]] = {
    "handle": lambda result: result[2],
    "metadata": lambda result: result[2].metadata,
    "recv_count": lambda result: result[1],
    "view of recv_count": lambda result: result[1][:1],
    "detached": lambda result: result[1].detach(),
    "part of the handle": lambda result: result[2].src_info,
    "storage": lambda result: result[1].untyped_storage(),
    "typed view": lambda result: result[2].layout_range,
    "dlpack": lambda result: torch.utils.dlpack.to_dlpack(result[1]),
    "numpy": lambda result: result[1].numpy(),
}


@pytest.mark.parametrize("what", list(KEPT))
def test_what_somebody_has_is_not_used_again(what: str) -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, _ = inputs(rank)

        def dispatch() -> Any:
            return buffer.low_latency_dispatch(x, idx, M, E)

        dispatch()
        spy = Spy(buffer)
        found = addresses_of(dispatch, KEPT[what])
        assert all(spy.made)
        assert len(set(found)) == ROUNDS, "a block that is in use was written again"

    on_ranks(body, 1)


def test_what_autograd_has_is_not_used_again() -> None:
    """Nothing of Python's refers to what a backward pass has saved."""

    def body(buffer: Any, rank: int) -> None:
        x, idx, _ = inputs(rank)
        weight = torch.ones(E, 4, requires_grad=True)

        def dispatch() -> Any:
            return buffer.low_latency_dispatch(x, idx, M, E)

        dispatch()
        sums, wanted = [], []
        for _ in range(ROUNDS):
            count = dispatch()[1]
            wanted.append(count.clone())
            index = count.clamp_(max=E - 1)  # saved as it is
            sums.append(torch.nn.functional.embedding(index, weight).sum())
            del count, index
        torch.stack(sums).sum().backward()

    on_ranks(body, 1)


def test_handles_that_wait_for_their_combines_keep_their_metadata() -> None:
    def body(buffer: Any, rank: int) -> None:
        handles, wanted = [], []
        for call in range(ROUNDS):
            x, idx, weights = inputs(rank + 10 * call)
            result = buffer.low_latency_dispatch(x, idx, M, E, use_fp8=False)
            handles.append((result[2], idx, weights))
            wanted.append([result[1].clone(), result[2].places.clone()])
            if call % 3:
                handles[-1] = wanted[-1] = None  # these are free
        for entry, want in zip(handles, wanted, strict=True):
            if entry is None:
                continue
            handle, idx, weights = entry
            assert torch.equal(handle.places, want[1])
            rows = torch.ones(handle.rows_shape, dtype=torch.bfloat16)
            combined = buffer.low_latency_combine(rows, idx, weights, handle)[0]
            sums = weights.where(idx >= 0, 0).sum(1)
            assert torch.allclose(combined[:, 0].float(), sums, rtol=1e-2)

    on_ranks(body)


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "resize_": lambda count: count.resize_(1),
    "set_": lambda count: count.set_(torch.zeros(E, dtype=torch.int32)),
    "unsqueeze_": lambda count: count.unsqueeze_(0),
    "data": lambda count: setattr(count, "data", torch.zeros(E, dtype=torch.int32)),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_a_tensor_that_has_changed_in_place_is_done_with(change: str) -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, _ = inputs(rank)
        want = buffer.low_latency_dispatch(x, idx, M, E)[1].clone()
        for call in range(ROUNDS):
            count = buffer.low_latency_dispatch(x, idx, M, E)[1]
            assert count.shape == want.shape and torch.equal(count, want)
            if call % 2:
                CHANGES[change](count)

    on_ranks(body, 1)


def test_rows_and_counts_are_the_same_round_after_round() -> None:
    def body(buffer: Any, rank: int) -> None:
        spy = Spy(buffer)
        natives = spy.state.quick_dispatch, spy.state.quick_combine
        for call in range(ROUNDS):
            x, idx, weights = inputs(rank + 100 * call)
            generator = torch.Generator().manual_seed(rank)
            pairs = []
            for quickly in (True, False):
                if quickly:
                    spy.state.quick_dispatch, spy.state.quick_combine = natives
                else:
                    spy.forbid()
                payload, count, handle, *_ = buffer.low_latency_dispatch(x, idx, M, E)
                rows = torch.randn(
                    handle.rows_shape, generator=generator.manual_seed(rank)
                ).bfloat16()
                combined = buffer.low_latency_combine(rows, idx, weights, handle)[0]
                pairs.append((payload, count, handle, combined, count))
            require_same(*pairs)

    on_ranks(body, R)


def test_large_blocks_and_old_versions_of_torch_do_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def body(buffer: Any, rank: int) -> None:
        ctx = buffer._context
        assert quick.spares_of(ctx, 1 << 16, 4) is not None
        assert quick.spares_of(ctx, 1 << 18, 4) is None
        monkeypatch.delattr(torch._C, "_storage_Use_Count")
        assert quick.spares_of(ctx, 64, 4) is None
        x, idx, _ = inputs(rank)
        for _ in range(3):
            buffer.low_latency_dispatch(x, idx, M, E)

    on_ranks(body, 1)


def test_memory_of_graphs_and_private_pools_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Cuda(torch.Tensor):
        device = torch.device("cuda")  # type: ignore[assignment]

    tensor = torch.zeros(8).as_subclass(Cuda)
    begin = tensor.data_ptr() - 64

    def snapshot(pool: Any) -> list[dict[str, Any]]:
        other = dict(address=begin - 4096, total_size=4096, segment_pool_id=(0, 0))
        return [other, dict(address=begin, total_size=4096, **pool)]

    for pool, is_default in (
        (dict(segment_pool_id=(0, 0)), True),
        (dict(segment_pool_id=(0, 1)), False),
        ({}, True),  # a version that has none
    ):
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda pool=pool: snapshot(pool))
        assert quick._is_of_default_pool(tensor) is is_default
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    assert not quick._is_of_default_pool(tensor)

    def main(group: local.ThreadGroup) -> None:
        num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(M, H, 1, E)
        with deep_comm.Buffer(group, 0, num_bytes, low_latency_mode=True, timeout_s=20) as buffer:
            ctx = buffer._context
            log.capturing.add(log.current)
            assert quick.spares_of(ctx, 64, 4) is None
            log.capturing.clear()
            spares = quick.spares_of(ctx, 64, 4)
            assert spares is not None and spares[0] == log.current

    with fake_cuda.installed() as log:
        local.run(main, 1, timeout_s=60)


def test_calls_of_another_stream_have_memory_of_their_own() -> None:
    found: dict[int, set[int]] = {1: set(), 2: set()}

    def main(group: local.ThreadGroup) -> None:
        x, idx, _ = inputs(0)
        num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(M, H, 1, E)
        with deep_comm.Buffer(group, 0, num_bytes, low_latency_mode=True, timeout_s=20) as buffer:
            log.current = 1
            buffer.low_latency_dispatch(x, idx, M, E)
            for stream in (1, 2) * NUM_SPARES:
                log.current = stream
                handle = buffer.low_latency_dispatch(x, idx, M, E, async_finish=True)[2]
                found[stream].add(handle.metadata.data_ptr())
            assert not found[1] & found[2]

    with fake_cuda.installed() as log:
        local.run(main, 1, timeout_s=60)
    assert len(found[1]) == NUM_SPARES
