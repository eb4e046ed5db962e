"""Normal calls in one native step give what they give step by step, or are left to Python."""

from __future__ import annotations

import copy
import functools
import sys
from typing import Any

import pytest
import torch
from one_step_calls import run_calls
from quick_calls import (
    CASTS,
    E,
    H,
    K,
    Marked,
    NormalSpy,
    T,
    inputs,
    on_normal,
)

import deep_comm
from deep_comm import Buffer, Handle, local
from deep_comm.errors import ArgumentError, BufferDestroyed


@pytest.mark.parametrize("num_direct_bytes", [0, 4 << 20])
@pytest.mark.parametrize("config", [None, deep_comm.Config(2, 4, 16)])
@pytest.mark.parametrize("form", ["bf16", "fp32", "fp8", "int-scales", "columns", *CASTS])
def test_calls_along_a_known_routing(form: str, config: Any, num_direct_bytes: int) -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank, (0, T)[rank])
        given: Any = x
        if form == "fp32":
            given = x.float()
        elif form != "bf16" and form not in CASTS:
            scales = torch.rand(len(x), 6)
            if form == "int-scales":
                scales = torch.arange(scales.numel(), dtype=torch.int32).view(scales.shape)
            elif form == "columns":
                scales = scales.t().contiguous().t()
            given = x.to(torch.float8_e4m3fn), scales
        handle = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=E)[4]
        if config is not None:
            handle = buffer.dispatch(x, topk_idx=idx, num_experts=E, config=config)[4]
        spy = NormalSpy(buffer)

        def pair() -> tuple[list[torch.Tensor], torch.Tensor]:
            got, *nothing, event = buffer.dispatch(
                given, handle=handle, config=config, **CASTS.get(form, {})
            )
            assert nothing == [None] * 4 and event.event is None
            parts = list(got) if isinstance(got, tuple) else [got]
            rows = parts[0].to(torch.float32 if form == "fp32" else torch.bfloat16)
            assert (rows.dtype == parts[0].dtype) == (form in ("bf16", "fp32"))
            sums, none, event = buffer.combine(rows, handle, config=config)
            assert none is None and event.event is None
            return parts, sums

        pair()
        spy.made.clear()
        one = pair()
        # In rings outputs are torch's, of as many steps as ever.
        assert spy.made == [num_direct_bytes > 0, True]
        pair()
        spy.is_off = True
        many = pair()
        for got, want in zip((*one[0], one[1]), (*many[0], many[1]), strict=True):
            assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
            assert torch.equal(got.float(), want.float())

    on_normal(body, num_direct_bytes=num_direct_bytes)


@pytest.mark.parametrize("idx_dtype", [torch.int32, torch.int64])
def test_a_layout_is_made_in_one_step(idx_dtype: torch.dtype) -> None:
    def body(buffer: Any, rank: int) -> None:
        spy = NormalSpy(buffer)
        for num_tokens, num_experts in ((T, E), (0, E), (T, 2 * E), (1, E)):
            idx = inputs(rank, num_tokens, idx_dtype)[1]
            one = buffer.get_dispatch_layout(idx, num_experts)
            assert one[4].event is None
            spy.is_off = True
            many = buffer.get_dispatch_layout(idx, num_experts)
            spy.is_off = False
            assert spy.made[-2:] == [True, False]
            assert one[1] is None and many[1] is None
            for got, want in zip((one[0], *one[2:4]), (many[0], *many[2:4]), strict=True):
                assert (got.shape, got.stride(), got.dtype) == (
                    want.shape,
                    want.stride(),
                    want.dtype,
                )
                assert torch.equal(got, want)
        idx = inputs(rank, T, idx_dtype)[1]
        idx[1, 0] = E
        with pytest.raises(deep_comm.ExpertIndexError):
            buffer.get_dispatch_layout(idx, E)
        before = sys.getrefcount(idx)
        for _ in range(20):
            buffer.get_dispatch_layout(idx, E + 1)
        assert sys.getrefcount(idx) == before

    on_normal(body)


def test_layouts_in_doubt_are_left_to_python() -> None:
    def body(buffer: Any, rank: int) -> None:
        idx = inputs(rank)[1]
        layout = functools.partial(buffer._context.quick_layout, buffer._context)
        most = buffer._context.num_max_experts
        launched = buffer._context.engine.num_launches
        for wrong in (
            None, idx.short(), idx.float(), idx[0], idx.t(), idx.repeat(1, 2)[:, ::2], idx[:, :0],
            idx.repeat(1, 64), idx.to("meta"), idx.as_subclass(Marked), idx.tolist(),
        ):  # fmt: skip
            assert layout(wrong, E, None) is None, wrong
        for wrong in (None, 0, -1, most + 1, 1 << 70, float(E), True, torch.tensor(E)):
            assert layout(idx, wrong, None) is None, wrong
        assert buffer._context.engine.num_launches == launched
        assert layout(idx, most, None) is not None
        assert buffer._context.engine.num_launches == launched + 1
        with pytest.raises(ArgumentError, match="topk_idx"):
            buffer.get_dispatch_layout(idx.float(), E)
        with pytest.raises(ArgumentError, match="num_experts"):
            buffer.get_dispatch_layout(idx, most + 1)
        buffer.destroy()
        with pytest.raises(BufferDestroyed):
            buffer.get_dispatch_layout(idx, E)

    on_normal(body, 1)


def test_normal_calls_in_doubt_are_left_to_python() -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)
        handle = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=E)[4]
        rows = buffer.dispatch(x, handle=handle)[0]
        sums = buffer.combine(rows, handle)[0]
        known, calls = handle._known, buffer._context.quick
        named = known.home_stream, None, buffer._default("dispatch", None), None

        def dispatch(given: Any) -> Any:
            return calls.dispatch(given, known.numbers, *named, False, 0)

        def combine(given: Any) -> Any:
            return calls.combine(given, None, known.numbers, *named, False)

        assert dispatch(x) is not None and combine(rows) is not None
        launched = buffer._context.engine.num_launches
        free = buffer._context.region.num_free_bytes
        shifted = torch.zeros(T * H + 1, dtype=torch.bfloat16)[1:].view(T, H)
        for wrong in (
            None, x.half(), x[:-1], x[:, :-8], x.t(), shifted, x.to("meta"), (x, weights),
            [x], x.as_subclass(Marked), torch.zeros(T, 2 * H, dtype=torch.bfloat16)[:, :H],
        ):  # fmt: skip
            assert dispatch(wrong) is None, wrong
        for wrong in (None, rows[:-1], rows.float(), rows.t(), (rows,)):
            assert combine(wrong) is None, wrong
        for wrong in (None, known.numbers[:-1], [*known.numbers]):
            assert calls.dispatch(x, wrong, *named, False, 0) is None
            assert calls.combine(rows, None, wrong, *named, False) is None
        assert calls.dispatch(x, known.numbers, *named, None, 0) is None
        assert calls.dispatch(x, known.numbers, *named, False, 1) is None
        assert calls.combine(rows, None, known.numbers, *named, True) is None
        other = deep_comm.Config(2, 4, 16)
        home = known.home_stream
        assert calls.dispatch(x, known.numbers, home, other, None, None, False, 0) is None
        assert buffer._context.engine.num_launches == launched
        assert buffer._context.region.num_free_bytes == free
        # Other forms, and calls that are not plain, go on as they did.
        assert buffer.dispatch(x.float(), handle=handle)[0].dtype == torch.float32
        both = buffer.combine(rows, handle, topk_weights=torch.ones(len(rows), K))
        assert torch.equal(both[0], sums) and both[1] is not None
        biased = buffer.combine(rows, handle, bias=x)[0]
        assert not torch.equal(biased, sums)
        assert torch.equal(buffer.combine(rows, tuple(handle))[0], sums)
        with pytest.raises(deep_comm.HandleMismatch):
            buffer.dispatch(x[:-1], handle=handle)
        with pytest.raises(ArgumentError, match="topk_idx"):
            buffer.dispatch(x, handle=handle, topk_idx=idx)

    on_normal(body, 1, num_direct_bytes=4 << 20)


def test_blocks_of_one_step_go_back_and_buffers_are_told_apart() -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)
        handle = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=E)[4]
        rows = buffer.dispatch(x, handle=handle)[0]
        sums = buffer.combine(rows, handle)[0]
        spy = NormalSpy(buffer)
        free = buffer._context.region.num_free_bytes
        before = sys.getrefcount(x), sys.getrefcount(rows)
        for _ in range(50):
            again = buffer.dispatch(x, handle=handle)[0]
            assert torch.equal(buffer.combine(rows, handle)[0], sums)
            assert buffer._context.region.num_free_bytes < free
            del again
        assert (sys.getrefcount(x), sys.getrefcount(rows)) == before
        assert buffer._context.region.num_free_bytes == free
        assert all(spy.made)
        held = []  # until the region is full: then through the rings, into torch's memory
        while spy.made[-1]:
            held.append(buffer.dispatch(x, handle=handle)[0])
        assert all(torch.equal(again, rows) for again in held)
        buffer.destroy()
        with pytest.raises(BufferDestroyed):
            buffer.combine(rows, handle)

    on_normal(body, 1, num_direct_bytes=1 << 20)


def test_normal_calls_in_one_step_behind_each_other_give_what_many_do() -> None:
    """What tests/gpu/test_one_step_calls_gpu.py runs over streams."""
    local.run(lambda group: run_calls(group, "cpu", 5), 3, timeout_s=60)


@pytest.mark.parametrize("expand", [False, True])
def test_a_new_handles_first_calls_ask_no_python(
    expand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But another Buffer's do, and those of a copy, which checks it."""
    asked: list[Any] = []
    known_to = Handle.known_to

    def counted(self: Handle, owner: object) -> Any:
        asked.append(owner)
        return known_to(self, owner)

    monkeypatch.setattr(Handle, "known_to", counted)

    def main(group: Any) -> None:
        options: Any = dict(num_direct_bytes=1 << 20, timeout_s=20)
        with (
            Buffer(group, 8 << 20, **options) as buffer,
            Buffer(group, 8 << 20, **options) as other,
        ):
            x, idx, weights = inputs(group.rank())
            given: Any = dict(topk_idx=idx, topk_weights=weights, num_experts=E, expand=expand)
            calls: Any = dict(apply_weights=True) if expand else {}
            for each in (buffer, other):  # forms
                rows, _, row_weights, _, handle, _ = each.dispatch(x, **given)
                want = each.combine(rows, handle, row_weights, **calls)[0]
                again = each.dispatch(x, handle=handle)[0]
                del handle
            rows, _, row_weights, _, handle, _ = buffer.dispatch(x, **given)
            group.barrier()
            asked.clear()
            group.barrier()
            assert torch.equal(buffer.combine(rows, handle, row_weights, **calls)[0], want)
            assert torch.equal(buffer.dispatch(x, handle=handle)[0], again)
            group.barrier()
            assert asked == []
            group.barrier()
            assert torch.equal(other.combine(rows, handle, row_weights, **calls)[0], want)
            assert torch.equal(
                buffer.combine(rows, copy.deepcopy(handle), row_weights, **calls)[0], want
            )
            group.barrier()
            assert len(asked) >= 4

    local.run(main, 2, timeout_s=60)
