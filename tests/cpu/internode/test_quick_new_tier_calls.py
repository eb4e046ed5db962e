"""Layouts and dispatches with new routing between nodes in one native step give what they give step
by step, or are left to Python.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
from typing import Any

import pytest
import torch
from quick_calls import (
    E,
    H,
    NormalSpy,
    T,
    form_of,
    inputs,
    layout_of,
    on_normal,
    require_same_dispatch,
    to_rank,
    wrong_guess,
)

import deep_comm
from deep_comm import simulate
from deep_comm.errors import (
    ArgumentError,
    BufferDestroyed,
    CapacityError,
    ConfigMismatch,
    ExpertIndexError,
)

NODES = dict(num_rdma_bytes=4 << 20, num_direct_bytes=4 << 20, ranks_per_node=2, device="cpu")
PAIR = {**NODES, "ranks_per_node": 1}


@pytest.fixture(autouse=True)
def _near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a network reads what a combine has staged, the dispatch behind it goes step by step."""
    monkeypatch.setenv("DEEP_COMM_RAIL_NEAR", "1")


def everything(received: tuple[Any, ...], num_rows: int | None = None) -> list[Any]:
    """What a dispatch returned, as tensors and plain values; with a bound of rows but the first,
    since the others are not written."""
    rows, recv_idx, recv_weights, per_expert, handle, event = received
    assert event.event is None
    parts = [*(rows if isinstance(rows, tuple) else [rows]), recv_idx, recv_weights]
    sources = [handle.recv_src_idx, handle.recv_src_meta]
    num_forward = int(handle.recv_rdma_rank_prefix_sum[-1])
    matrices = [*handle[:7], handle[8], handle.send_nvl_head[:num_forward]]
    counts = [
        handle.num_recv_tokens_tensor, handle.num_recv_tokens_per_rank,
        handle.num_recv_tokens_per_expert, handle.forward_places, handle.send_places,
    ]  # fmt: skip
    cut = [None if part is None else part[:num_rows] for part in (*parts, *sources)]
    fields = [
        handle.num_recv_tokens, handle.max_num_tokens, handle.num_experts, handle.num_topk,
        handle.rank, handle.num_tokens, handle.num_recv_rows, handle.num_channels,
        handle.num_returning_rows, handle.num_nodes, handle.num_ranks, per_expert,
    ]  # fmt: skip
    if handle.num_recv_tokens is not None:
        fields.append(handle.num_forward_rows)
    return [*cut, *matrices, *counts, *fields]


@pytest.mark.parametrize("bound", [0, 4 * T + 3], ids=["counted", "bounded"])
@pytest.mark.parametrize("config", [None, deep_comm.Config(4, 4, 16, 4, 16)])
@pytest.mark.parametrize("with_layout", [False, True])
@pytest.mark.parametrize("form", ["bf16", "fp8", "without-weights", "int32", "aligned"])
def test_calls_with_new_routing(form: str, with_layout: bool, config: Any, bound: int) -> None:
    """Of other numbers of tokens than the first, and calls along their handles."""

    def body(buffer: Any, rank: int) -> None:
        spy = NormalSpy(buffer)

        def step(num_tokens: int) -> list[Any]:
            given, options = form_of(form, rank, num_tokens)
            options.update(config=config, num_worst_tokens=bound)
            if form == "aligned":
                options.update(zero_tail=bound > 0)
            layout = layout_of(buffer, options["topk_idx"])
            if with_layout:
                options.update(layout)
            received = buffer.dispatch(given, **options)
            num_rows = int(received[4].num_recv_tokens_tensor) if bound else None
            got = received[0][0] if isinstance(received[0], tuple) else received[0]
            if options.get("zero_tail"):
                assert not got[num_rows:].any()
            rows = got.bfloat16().nan_to_num(1.0)
            if bound:
                rows[num_rows:] = 1.0
            sums = buffer.combine(rows, received[4], received[2], config=config)[:2]
            again = buffer.dispatch(given, handle=received[4], config=config)[0]
            again = again[0] if isinstance(again, tuple) else again
            assert torch.equal(again[:num_rows].float(), got[:num_rows].float())
            return [*layout.values(), *everything(received, num_rows), *sums]

        step((T, 0, 3, T)[rank])
        assert spy.made == [True, False, False, False]  # layouts need no call before
        for tokens in ((T, 0, 3, T), (3, T, 0, 1), (0, 0, 0, 0), (T, T, T, T)):
            spy.made.clear()
            one = step(tokens[rank])
            assert spy.made == [True] * 4, spy.made
            spy.is_off = True
            many = step(tokens[rank])
            spy.is_off = False
            require_same_dispatch(one, many)

    on_normal(body, 4, **NODES)


@pytest.mark.parametrize("streams", [dict(), dict(async_finish=True)], ids=["sync", "async"])
@pytest.mark.parametrize("bound", [0, 3 * 4 * T + 3 * E], ids=["counted", "bounded"])
@pytest.mark.parametrize("form", ["bf16", "fp8", "without-weights", "padded"])
def test_expanded_calls_begin_with_the_native_step(form: str, bound: int, streams: Any) -> None:
    def body(buffer: Any, rank: int) -> None:
        spy = NormalSpy(buffer)

        def step(num_tokens: int, with_layout: bool) -> list[Any]:
            given, options = form_of(form, rank, num_tokens)
            options.update(num_worst_tokens=bound, expand=True, **streams)
            if form == "padded":
                options.update(expert_alignment=4, zero_padding=True)
            if with_layout:
                options.update(layout_of(buffer, options["topk_idx"]))
                spy.made.pop()
            rows, experts, row_weights, counts, handle, event = buffer.dispatch(given, **options)
            assert (event.event is not None) == bool(streams)
            expansion = handle.expansion
            num_rows = int(handle.num_recv_tokens_tensor)
            got = rows[0] if isinstance(rows, tuple) else rows
            is_token = experts >= 0
            sent = got.bfloat16().nan_to_num(1.0)
            sent[~is_token] = 1.0
            sums = buffer.combine(sent, handle, row_weights, apply_weights=row_weights is not None)[
                0
            ]
            again = buffer.dispatch(given, handle=handle)[0]
            again = again[0] if isinstance(again, tuple) else again
            assert torch.equal(again[is_token].float(), got[is_token].float())
            parts = [part[is_token] for part in (rows if isinstance(rows, tuple) else (rows,))]
            if form == "padded":
                assert not got[~is_token].any()
            if row_weights is not None:
                parts.append(row_weights)
            return [
                *parts, experts, sums, expansion.expert_offsets, expansion.expert_counts,
                expansion.recv_rows[:num_rows], expansion.num_rows, expansion.expert_alignment,
                handle.num_recv_tokens, handle.num_output_rows, counts,
                *handle[:7], handle[8], handle.recv_src_idx[:num_rows],
            ]  # fmt: skip

        for with_layout in (False, True):
            step((T, 0, 3, T)[rank], with_layout)
            for tokens in ((T, 0, 3, T), (0, 0, 0, 0), (T, T, 1, T)):
                spy.made.clear()
                one = step(tokens[rank], with_layout)
                # Calls along expanded handles go step by step.
                assert spy.made == [True, False, False], spy.made
                spy.is_off = True
                many = step(tokens[rank], with_layout)
                spy.is_off = False
                require_same_dispatch(one, many)

    on_normal(body, 4, **NODES)


def test_expanded_rows_that_a_native_step_could_not_move_are_moved() -> None:
    def body(buffer: Any, rank: int) -> None:
        engine = buffer.runtime
        buffer.dispatch(**to_rank(1, 1), expand=True)
        spy = NormalSpy(buffer)
        for launches in (7, 6):  # the same, and two local kernels
            before = engine.num_launches
            received = buffer.dispatch(**to_rank(1, 40 if rank == 0 else 1), expand=True)
            assert engine.num_launches - before == launches and spy.made.pop()
            assert len(received[0]) == (41 if rank == 1 else 0)
            if rank == 1:
                assert torch.equal(received[0][:40], to_rank(1, 40)["x"])
            assert received[3] == [41 if rank == 1 else 0, 0, 0]

    on_normal(body, 2, **PAIR)


# Layout, counts, notify, a dispatch that left at once, the one that moved; then as it should be.
LAUNCHES = (5, 4)


def test_rows_that_a_native_step_could_not_move_are_moved() -> None:
    on_normal(lambda buffer, rank: wrong_guess(buffer, rank, 40, LAUNCHES, everything), 2, **PAIR)


def test_schedules_of_native_steps_that_guess_wrong() -> None:
    def main(group: Any) -> None:
        sizes = dict(num_direct_bytes=1 << 18, device="cpu", ranks_per_node=1)
        with deep_comm.Buffer(group, 1 << 19, 1 << 19, timeout_s=20, **sizes) as buffer:
            wrong_guess(buffer, group.rank(), 9, LAUNCHES, everything)

    for seed in range(12):
        simulate.run(main, 2, seed, timeout_s=60)


def test_where_room_is_wanting_all_ranks_do_alike() -> None:
    """One rank's region is full: it goes step by step, the others do not; all try less often."""

    def body(buffer: Any, rank: int) -> None:
        arguments = to_rank(1, 12)
        want = everything(buffer.dispatch(**arguments))
        require_same_dispatch(everything(buffer.dispatch(**arguments)), want)
        spy = NormalSpy(buffer)
        kept = None
        if rank == 1:
            region = buffer._context.region
            kept = region.allocate(region.num_free_bytes - 8192)
        is_due = []
        for _ in range(6):
            is_due.append(buffer._context.early_launches.is_due)
            require_same_dispatch(everything(buffer.dispatch(**arguments)), want)
        assert is_due == [True, True, False, True, False, False]
        assert spy.made == [due and rank == 0 for due in is_due]
        del kept
        while not spy.made[-1]:
            require_same_dispatch(everything(buffer.dispatch(**arguments)), want)
        require_same_dispatch(everything(buffer.dispatch(**arguments)), want)
        assert spy.made[-1]

    on_normal(body, 2, **{**PAIR, "num_direct_bytes": 1 << 18})


def test_calls_in_doubt_are_left_to_python() -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)
        names = (
            "num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert",
            "is_token_in_rank",
        )  # fmt: skip
        layout = dict(zip(names, buffer.get_dispatch_layout(idx, E)[:4], strict=True))

        def dispatch(**given: Any) -> Any:
            given = {"x": x, "topk_idx": idx, "topk_weights": weights, "num_experts": E, **given}
            return buffer.dispatch(**given)

        for bound in (0, 2 * T):
            dispatch(num_worst_tokens=bound)
            dispatch(num_worst_tokens=bound, **layout)
        spy = NormalSpy(buffer)
        dispatch()
        dispatch(**layout, num_worst_tokens=2 * T)
        dispatch(**{**layout, "num_tokens_per_rdma_rank": None})
        buffer.get_dispatch_layout(idx, E)
        assert spy.made == [True] * 4
        spy.made.clear()
        launched, free = buffer.runtime.num_launches, buffer._context.region.num_free_bytes
        per_node, mask = layout["num_tokens_per_rdma_rank"], layout["is_token_in_rank"]
        for name, wrong in (
            ("x", dict(x=x.t())), ("topk_idx", dict(topk_idx=idx[:-1])),
            ("topk_idx", dict(topk_idx=idx.float())), ("topk_idx", dict(topk_idx=None)),
            ("topk_weights", dict(topk_weights=weights.double())),
            ("num_experts", dict(num_experts="6")), ("num_experts", dict(num_experts=1 << 40)),
            ("expert_alignment", dict(expert_alignment=0)),
            ("num_worst_tokens", dict(num_worst_tokens=-3)),
            ("num_worst_tokens", dict(num_worst_tokens=None)),
            ("num_experts", dict(layout, num_experts=E + 1)),
            ("num_tokens_per_rdma_rank", dict(layout, num_tokens_per_rdma_rank=per_node.long())),
            ("num_tokens_per_rdma_rank", dict(layout, num_tokens_per_rdma_rank=per_node[:1])),
            ("num_tokens_per_rdma_rank", dict(num_tokens_per_rdma_rank=per_node[None])),
            ("is_token_in_rank", dict(layout, is_token_in_rank=mask.int())),
            ("is_token_in_rank", dict(layout, is_token_in_rank=None)),
        ):  # fmt: skip
            with pytest.raises(ArgumentError, match=name):
                dispatch(**wrong)
        for wrong in ((idx.float(), E), (idx, 0), (idx, "6"), (None, E), (idx.t(), E)):
            with pytest.raises(ArgumentError):
                buffer.get_dispatch_layout(*wrong)
        assert not any(spy.made)
        assert buffer.runtime.num_launches == launched
        assert buffer._context.region.num_free_bytes == free
        for bound in (0, 2 * T):  # step by step
            for _ in range(2):
                spy.made.clear()
                fp8 = dispatch(use_fp8=True, num_worst_tokens=bound)[0]
                assert isinstance(fp8, tuple) and spy.made == []
        for wrong in (dict(zero_tail=True), dict(expand=False, zero_padding=True)):
            with pytest.raises(ArgumentError, match="zero_tail|zero_padding"):
                dispatch(**{"expand": True, **wrong})
        buffer.destroy()
        with pytest.raises(BufferDestroyed):
            dispatch()
        with pytest.raises(BufferDestroyed):
            buffer.get_dispatch_layout(idx, E)

    on_normal(body, 2, **PAIR)


def _failures(buffer: Any, rank: int) -> None:
    """What notify finds leaves nothing of the dispatch behind it, on any rank."""
    x, idx, weights = inputs(rank)

    def dispatch(x: Any = x, idx: Any = idx, **given: Any) -> Any:
        return buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=E, **given)

    wide = torch.randn(T, 2 * H).bfloat16()
    bounds = 0, 3 * T
    for bound in bounds:
        for rows in (x, wide):
            for _ in range(2):
                dispatch(rows, num_worst_tokens=bound)
    want = everything(dispatch())
    spy, free = NormalSpy(buffer), buffer._context.region.num_free_bytes
    for step in range(2):
        bad = idx.clone()
        if rank == step:
            bad[1, 1] = E
        for bound in bounds:
            with pytest.raises(ExpertIndexError):
                dispatch(idx=bad, num_worst_tokens=bound)
            with pytest.raises(ConfigMismatch, match="row_bytes"):
                dispatch(wide if rank == 1 else x, num_worst_tokens=bound)
        require_same_dispatch(everything(dispatch()), want)
    assert spy.made == [True, True]  # others raised, in one step as well
    assert buffer._context.region.num_free_bytes == free


def test_failures_that_notify_finds() -> None:
    on_normal(_failures, 2, **PAIR)


def test_schedules_of_failures_that_notify_finds() -> None:
    def main(group: Any) -> None:
        sizes = dict(num_direct_bytes=1 << 20, device="cpu", ranks_per_node=1)
        with deep_comm.Buffer(group, 2 << 20, 1 << 19, timeout_s=20, **sizes) as buffer:
            _failures(buffer, group.rank())

    for seed in range(4):
        simulate.run(main, 2, seed, timeout_s=60)


def test_more_rows_than_the_bound() -> None:
    def body(buffer: Any, rank: int) -> None:
        for _ in range(2):
            buffer.dispatch(**to_rank(1, T), num_worst_tokens=2 * T)
        spy = NormalSpy(buffer)
        for _ in range(2):
            if rank == 1:
                with pytest.raises(CapacityError):
                    buffer.dispatch(**to_rank(1, T), num_worst_tokens=2 * T - 1)
            else:
                buffer.dispatch(**to_rank(1, T), num_worst_tokens=2 * T - 1)
            handle = buffer.dispatch(**to_rank(1, T), num_worst_tokens=2 * T)[4]
            assert int(handle.num_recv_tokens_tensor) == (2 * T if rank == 1 else 0)
        assert all(spy.made)

    on_normal(body, 2, **PAIR)


@pytest.mark.parametrize("bound", [0, 2 * T])
def test_handles_of_one_step_can_be_copied_and_outlive_the_rows(bound: int) -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)
        routing = dict(topk_idx=idx, topk_weights=weights, num_experts=E, num_worst_tokens=bound)
        buffer.dispatch(x, **routing)
        spy, region = NormalSpy(buffer), buffer._context.region
        free = region.num_free_bytes
        before = sys.getrefcount(x), sys.getrefcount(idx)
        rows, *_, handle, _ = buffer.dispatch(x, **routing)
        rows = rows.clone()
        if bound:
            rows[int(handle.num_recv_tokens_tensor) :] = 1.0
        assert spy.made == [True]
        sums = buffer.combine(rows, handle)[0]
        others = (
            copy.copy(handle), copy.deepcopy(handle), pickle.loads(pickle.dumps(handle)),
            dataclasses.replace(handle, num_topk=None), tuple(handle),
        )  # fmt: skip
        del handle
        for other in others:
            assert torch.equal(buffer.combine(rows, other)[0], sums)
            again = buffer.dispatch(x, handle=other)[0]
            assert torch.equal(buffer.combine(again, other)[0], sums)
        one, two = others[:2]
        for got, want in zip(one, two, strict=True):
            assert torch.equal(got[: len(want)], want)
        with pytest.raises(AttributeError, match="nothing_like_it"):
            _ = one.nothing_like_it
        del others, other, one, two, again, got, want
        assert region.num_free_bytes == free
        assert (sys.getrefcount(x), sys.getrefcount(idx)) == before

    on_normal(body, 2, **PAIR)
