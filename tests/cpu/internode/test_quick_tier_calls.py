"""Cached dispatches and combines between nodes in one native step give what they give step by step,
or are left to Python.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from typing import Any

import pytest
import torch
from one_step_calls import run_tier_calls
from quick_calls import E, H, K, Marked, NormalSpy, T, inputs, on_normal

import deep_comm
from deep_comm import local
from deep_comm.errors import BufferDestroyed, HandleMismatch

NODES = dict(num_rdma_bytes=4 << 20, num_direct_bytes=4 << 20, ranks_per_node=2, device="cpu")


@pytest.fixture(autouse=True)
def _near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a network reads what a combine has staged, the dispatch behind it goes step by step."""
    monkeypatch.setenv("DEEP_COMM_RAIL_NEAR", "1")


def given_of(x: torch.Tensor, form: str) -> Any:
    if form == "bf16":
        return x
    if form == "fp32":
        return x.float()
    scales = torch.rand(len(x), 6)
    if form == "columns":
        scales = scales.t().contiguous().t()
    return x.to(torch.float8_e4m3fn), scales


@pytest.mark.parametrize("streams", [dict(), dict(async_finish=True)], ids=["sync", "async"])
@pytest.mark.parametrize("config", [None, deep_comm.Config(4, 4, 16, 4, 16)])
@pytest.mark.parametrize("form", ["bf16", "fp32", "fp8", "columns"])
@pytest.mark.parametrize("tokens", [(T, 0, 3, T), (0, 0, 0, 0)], ids=["some", "none"])
def test_calls_along_a_known_routing(
    tokens: tuple[int, ...], form: str, config: Any, streams: dict[str, Any]
) -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank, tokens[rank])
        given, spy = given_of(x, form), NormalSpy(buffer)

        def pair(handle: Any, with_weights: bool) -> list[torch.Tensor]:
            got, *nothing, event = buffer.dispatch(given, handle=handle, config=config, **streams)
            assert nothing == [None] * 4 and (event.event is not None) == bool(streams)
            parts = list(got) if isinstance(got, tuple) else [got]
            rows = parts[0].to(torch.float32 if form == "fp32" else torch.bfloat16)
            some = torch.ones(len(rows), K) if with_weights else None
            sums, weight_sums, event = buffer.combine(rows, handle, some, config=config, **streams)
            assert (event.event is not None) == bool(streams)
            assert (weight_sums is None) is not with_weights
            return [*parts, sums, *([weight_sums] if with_weights else [])]

        def new_handle() -> Any:
            return buffer.dispatch(
                x, topk_idx=idx, topk_weights=weights, num_experts=E, config=config
            )[4]

        for with_weights in (False, True):
            pair(new_handle(), with_weights)
            handle = new_handle()  # forms are the Buffer's, so that its first calls are of one step
            spy.made.clear()
            one = pair(handle, with_weights)
            assert spy.made == [True, True]
            spy.is_off = True
            many = pair(handle, with_weights)
            spy.is_off = False
            for got, want in zip(one, many, strict=True):
                assert (got.shape, got.stride(), got.dtype) == (
                    want.shape, want.stride(), want.dtype
                )  # fmt: skip
                assert torch.equal(got.float(), want.float())

    on_normal(body, 4, **NODES)


def test_calls_in_doubt_are_left_to_python() -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)
        handle = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=E)[4]
        rows = buffer.dispatch(x, handle=handle)[0]
        sums = buffer.combine(rows, handle)[0]
        known, calls = handle.known_to(buffer._context.owner), buffer._context.quick
        default = buffer._default("dispatch", None), buffer._default("combine", None)
        engine, region = buffer._context.engine, buffer._context.region
        launched, free = engine.num_launches, region.num_free_bytes

        def dispatch(given: Any, numbers: Any = known.numbers, config: Any = None) -> Any:
            return calls.dispatch(
                given, numbers, known.home_stream, config, default[0], None, False, 0
            )

        def combine(given: Any, numbers: Any = known.numbers, weights: Any = None) -> Any:
            return calls.combine(
                given, weights, numbers, known.home_stream, None, default[1], None, False
            )

        for wrong in (
            None, x.half(), x[:-1], x[:, :-8], x.t(), x.to("meta"), (x, weights), [x],
            x.as_subclass(Marked), torch.zeros(T, 2 * H, dtype=torch.bfloat16)[:, :H],
        ):  # fmt: skip
            assert dispatch(wrong) is None, wrong
        for wrong in (None, rows[:-1], rows.float(), rows.t(), (rows,)):
            assert combine(wrong) is None, wrong
        assert combine(rows, weights=torch.ones(len(rows), K)) is None  # a form of its own
        for numbers in (None, known.numbers[:-1], [*known.numbers], (*known.numbers, 0)):
            assert dispatch(x, numbers) is None and combine(rows, numbers) is None
        assert dispatch(x, config=deep_comm.Config(4, 4, 16)) is None
        assert (engine.num_launches, region.num_free_bytes) == (launched, free)
        # What is not the handle that this Buffer has made goes step by step.
        spy = NormalSpy(buffer)
        others = tuple(handle), copy.deepcopy(handle), dataclasses.replace(handle, num_topk=None)
        for other in others:
            spy.made.clear()
            assert torch.equal(buffer.combine(rows, other)[0], sums)
            assert not any(spy.made)
        spy.made.clear()
        assert not torch.equal(buffer.combine(rows, handle, bias=x)[0], sums)
        fp8 = buffer.dispatch(x, handle, use_fp8=True)[0]
        assert isinstance(fp8, tuple) and not any(spy.made)
        with pytest.raises(HandleMismatch):
            buffer.dispatch(x[:-1], handle=handle)
        assert torch.equal(buffer.combine(rows, handle)[0], sums) and spy.made[-1]

    on_normal(body, 2, **{**NODES, "ranks_per_node": 1})


@pytest.mark.parametrize("lacks", ["num_direct_bytes", "num_rdma_bytes"])
def test_calls_through_rings_are_of_many_steps_and_the_same(lacks: str) -> None:
    """Without a receive region; and, in one step, where the rail has no place for every row."""
    sizes = {**NODES, "ranks_per_node": 1, lacks: 0 if lacks == "num_direct_bytes" else 1 << 17}

    def body(buffer: Any, rank: int) -> None:
        x, idx, _ = inputs(rank, 64)
        config = deep_comm.Config(2, 1, 8, 1, 8)
        rows, *_, handle, _ = buffer.dispatch(x, topk_idx=idx, num_experts=E, config=config)
        sums = buffer.combine(rows, handle, config=config)[0]
        spy = NormalSpy(buffer)
        buffer.dispatch(x, handle, config=config)
        spy.made.clear()
        assert torch.equal(buffer.dispatch(x, handle, config=config)[0], rows)
        assert torch.equal(buffer.combine(rows, handle, config=config)[0], sums)
        assert spy.made == [lacks != "num_direct_bytes"] * 2

    on_normal(body, 2, **sizes)


def test_blocks_of_one_step_go_back() -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, _ = inputs(rank)
        handle = buffer.dispatch(x, topk_idx=idx, num_experts=E)[4]
        rows = buffer.dispatch(x, handle)[0]
        sums = buffer.combine(rows, handle)[0]
        spy, region = NormalSpy(buffer), buffer._context.region
        free = region.num_free_bytes
        before = sys.getrefcount(x), sys.getrefcount(rows), sys.getrefcount(handle)
        for _ in range(20):
            again = buffer.dispatch(x, handle)[0]
            assert torch.equal(buffer.combine(again, handle)[0], sums)
            del again
        assert (sys.getrefcount(x), sys.getrefcount(rows), sys.getrefcount(handle)) == before
        assert region.num_free_bytes == free and all(spy.made)
        buffer.destroy()
        with pytest.raises(BufferDestroyed):
            buffer.combine(rows, handle)

    on_normal(body, 2, **{**NODES, "ranks_per_node": 1})


@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("near", ["1", "0"])
def test_calls_in_one_step_behind_each_other_give_what_many_do(
    ranks_per_node: int, near: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What tests/gpu/test_one_step_calls_gpu.py runs over streams."""
    monkeypatch.setenv("DEEP_COMM_RAIL_NEAR", near)
    local.run(lambda group: run_tier_calls(group, "cpu", 4, ranks_per_node), 4, timeout_s=60)
