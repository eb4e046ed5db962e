"""Dispatches with new routing between nodes, in all their forms, and calls along their handles:
first and later calls of a Buffer give what the reference says.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_calls import E, H, T, inputs, layout_of, on_normal, to_rank
from tier_calls import (
    Call,
    require_received,
    rows_of,
    summands,
    wanted_expanded_sums,
    wanted_expansion,
    wanted_sums,
)

import deep_comm
from deep_comm import reference, simulate
from deep_comm.errors import (
    ArgumentError,
    BufferDestroyed,
    CapacityError,
    ConfigMismatch,
    ExpertIndexError,
)

NODES = dict(num_rdma_bytes=4 << 20, num_direct_bytes=4 << 20, ranks_per_node=2, device="cpu")
PAIR = {**NODES, "ranks_per_node": 1}
TOKENS = ((T, 0, 3, T), (T, 0, 3, T), (3, T, 0, 1), (0, 0, 0, 0), (T, T, T, T))
RAILS = {"stored": "1", "put": "0"}


@pytest.fixture(params=RAILS, autouse=True)
def _rail(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows are put, the rail may read what a combine has staged when the dispatch behind it
    has begun."""
    monkeypatch.setenv("DEEP_COMM_RAIL_NEAR", RAILS[request.param])


@pytest.mark.parametrize("bound", [0, 4 * T + 3], ids=["counted", "bounded"])
@pytest.mark.parametrize("config", [None, deep_comm.Config(4, 4, 16, 4, 16)])
@pytest.mark.parametrize("with_layout", [False, True])
@pytest.mark.parametrize("form", ["bf16", "fp8", "without-weights", "int32", "aligned"])
def test_calls_with_new_routing(form: str, with_layout: bool, config: Any, bound: int) -> None:
    def body(buffer: Any, rank: int) -> None:
        for tokens in TOKENS:
            call = Call(form, tokens, 2, bound)
            given, options = call.given(rank)
            zero_tail = form == "aligned" and bound > 0
            layout = layout_of(buffer, options["topk_idx"])
            require_layout(layout, options["topk_idx"])
            if with_layout:
                options.update(layout)
            received = buffer.dispatch(
                given, **options, config=config, num_worst_tokens=bound, zero_tail=zero_tail
            )
            require_received(call, received, rank)
            payload, _, weights, _, handle, event = received
            assert event.event is None
            num_rows = int(handle.num_recv_tokens_tensor)
            rows = rows_of(payload)[0]
            assert not zero_tail or not rows[num_rows:].any()
            sums, weight_sums, _ = buffer.combine(
                summands(rows, num_rows), handle, weights, config=config
            )
            want, want_weights = wanted_sums(call, handle.num_channels)[rank]
            assert torch.equal(sums, want)
            assert (weight_sums is None) == (want_weights is None)
            assert want_weights is None or torch.equal(weight_sums, want_weights)
            again = rows_of(buffer.dispatch(given, handle=handle, config=config)[0])
            for got, part in zip(again, rows_of(payload), strict=True):
                assert torch.equal(got[:num_rows].float(), part[:num_rows].float())

    on_normal(body, 4, **NODES)


def require_layout(layout: dict[str, torch.Tensor], idx: torch.Tensor) -> None:
    want = reference.get_dispatch_layout(idx, E, 4, 2)
    for name, tensor in layout.items():
        assert torch.equal(tensor, getattr(want, name)), name


@pytest.mark.parametrize("streams", [dict(), dict(async_finish=True)], ids=["sync", "async"])
@pytest.mark.parametrize("bound", [0, 3 * 4 * T + 3 * E], ids=["counted", "bounded"])
@pytest.mark.parametrize("form", ["bf16", "fp8", "without-weights", "padded"])
def test_expanded_calls(form: str, bound: int, streams: Any) -> None:
    def body(buffer: Any, rank: int) -> None:
        for with_layout in (False, True):
            for tokens in TOKENS:
                expanded_calls(buffer, rank, Call(form, tokens, 2, bound), with_layout, streams)

    on_normal(body, 4, **NODES)


def expanded_calls(buffer: Any, rank: int, call: Call, with_layout: bool, streams: Any) -> None:
    given, options = call.given(rank)
    is_padded = call.form == "padded"
    if with_layout:
        options.update(layout_of(buffer, options["topk_idx"]))
    payload, experts, weights, counts, handle, event = buffer.dispatch(
        given,
        **options,
        num_worst_tokens=call.bound,
        expand=True,
        zero_padding=is_padded,
        **streams,
    )
    assert (event.event is not None) == bool(streams)
    if streams:
        event.current_stream_wait()
    want = wanted_expansion(call, handle.num_channels, rank)
    rows, is_token = rows_of(payload), want.recv_topk_idx >= 0
    wanted = [want.recv_x] if want.recv_x_scales is None else [want.recv_x, want.recv_x_scales]
    for got, part in zip(rows, wanted, strict=True):
        assert (got.shape, got.dtype) == (part.shape, part.dtype)
        assert torch.equal(got[is_token].float(), part[is_token].float())
        assert not is_padded or not got[~is_token].float().any()
    assert torch.equal(experts, want.recv_topk_idx)
    assert (weights is None) == (want.recv_topk_weights is None)
    assert weights is None or torch.equal(weights, want.recv_topk_weights)
    expansion, num_recv = handle.expansion, len(want.recv_rows)
    assert torch.equal(expansion.expert_offsets, want.expert_offsets)
    assert torch.equal(expansion.expert_counts, want.expert_counts)
    assert torch.equal(expansion.recv_rows[:num_recv], want.recv_rows)
    assert (expansion.num_rows, expansion.expert_alignment) == (len(rows[0]), call.alignment)
    assert handle.num_output_rows == len(rows[0])
    assert counts == ([] if call.bound else torch.diff(want.expert_offsets).tolist())

    values = rows[0].bfloat16().nan_to_num(1.0)
    values[~is_token] = 1.0
    sums = buffer.combine(values, handle, weights, apply_weights=weights is not None)[0]
    assert torch.equal(sums, wanted_expanded_sums(call, handle.num_channels)[rank][0])
    for got, part in zip(rows_of(buffer.dispatch(given, handle=handle)[0]), rows, strict=True):
        assert torch.equal(got[is_token].float(), part[is_token].float())


# ---- rows that could not leave before their number was known -------------------------------------

# Layout, counts, notify, a dispatch that left at once, the one that moved; then as it should be.
TWICE, EARLY = 5, 4


def wrong_guess(buffer: Any, rank: int, most: int) -> None:
    """Rank 1 has one token and gets ``most`` more: nobody could tell it before."""
    free = buffer._context.region.num_free_bytes
    buffer.dispatch(**to_rank(1, 1))
    for launches in (TWICE, EARLY):
        before = buffer.runtime.num_launches
        arguments = to_rank(1, most if rank == 0 else 1)
        rows, *_, counts, handle, _ = buffer.dispatch(**arguments)
        assert buffer.runtime.num_launches - before == launches
        assert len(rows) == (most + 1 if rank == 1 else 0)
        if rank == 1:
            assert torch.equal(rows, torch.cat([to_rank(1, n)["x"] for n in (most, 1)]))
        assert counts == [len(rows), 0, 0]
        assert (handle.num_recv_tokens, handle.max_num_tokens) == (len(rows), most)
        assert handle.recv_src_idx.tolist() == [*range(most), 0][: len(rows)]
        again = buffer.dispatch(arguments["x"], handle=handle)[0]
        assert torch.equal(again, rows)
        assert torch.equal(buffer.combine(again, handle)[0], arguments["x"])
        del rows, handle, again
    assert buffer._context.region.num_free_bytes == free


def test_rows_that_could_not_leave_at_once_leave_when_they_are_counted() -> None:
    on_normal(lambda buffer, rank: wrong_guess(buffer, rank, 40), 2, **PAIR)


def test_schedules_of_wrong_guesses() -> None:
    def main(group: Any) -> None:
        sizes = dict(num_direct_bytes=1 << 18, device="cpu", ranks_per_node=1)
        with deep_comm.Buffer(group, 1 << 19, 1 << 19, timeout_s=20, **sizes) as buffer:
            wrong_guess(buffer, group.rank(), 9)

    for seed in range(12):
        simulate.run(main, 2, seed, timeout_s=60)


def test_expanded_rows_that_could_not_leave_at_once() -> None:
    def body(buffer: Any, rank: int) -> None:
        buffer.dispatch(**to_rank(1, 1), expand=True)
        for launches in (TWICE + 2, EARLY + 2):  # two local kernels
            before = buffer.runtime.num_launches
            received = buffer.dispatch(**to_rank(1, 40 if rank == 0 else 1), expand=True)
            assert buffer.runtime.num_launches - before == launches
            assert len(received[0]) == (41 if rank == 1 else 0)
            if rank == 1:
                assert torch.equal(received[0][:40], to_rank(1, 40)["x"])
            assert received[3] == [41 if rank == 1 else 0, 0, 0]

    on_normal(body, 2, **PAIR)


def test_where_a_region_is_full_all_ranks_do_alike() -> None:
    """One rank has no room. All try less and less often, and again when one attempt was right."""

    def body(buffer: Any, rank: int) -> None:
        call, region = Call("bf16", (12, 12), 1), buffer._context.region

        def launches() -> int:
            given, options = call.given(rank)
            before = buffer.runtime.num_launches
            require_received(call, buffer.dispatch(given, **options), rank)
            return buffer.runtime.num_launches - before

        assert [launches(), launches()] == [EARLY, EARLY]
        kept = region.allocate(region.num_free_bytes - 8192) if rank == 1 else None
        tried = [True, True, False, True, False, False, True]
        assert [launches() for _ in tried] == [TWICE if early else EARLY for early in tried]
        del kept
        # Three calls are not tried. The fourth is, and then every one.
        assert [launches() for _ in range(6)] == [EARLY] * 6

    on_normal(body, 2, **{**PAIR, "num_direct_bytes": 1 << 18})


# ---- what is refused, and what fails -------------------------------------------------------------


def test_wrong_arguments_launch_nothing() -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)
        layout = layout_of(buffer, idx)

        def dispatch(**given: Any) -> Any:
            given = {"x": x, "topk_idx": idx, "topk_weights": weights, "num_experts": E, **given}
            return buffer.dispatch(**given)

        for bound in (0, 2 * T):
            dispatch(num_worst_tokens=bound)
            dispatch(num_worst_tokens=bound, **layout)
        dispatch(**{**layout, "num_tokens_per_rdma_rank": None})
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
            ("zero_tail", dict(expand=True, zero_tail=True)),
            ("zero_padding", dict(zero_padding=True)),
            ("even", dict(config=deep_comm.Config(3, 4, 16, 4, 16))),
        ):  # fmt: skip
            with pytest.raises(ArgumentError, match=name):
                dispatch(**wrong)
        for given in ((idx.float(), E), (idx, 0), (idx, "6"), (None, E), (idx.t(), E)):
            with pytest.raises(ArgumentError):
                buffer.get_dispatch_layout(*given)
        assert buffer.runtime.num_launches == launched
        assert buffer._context.region.num_free_bytes == free
        buffer.destroy()
        with pytest.raises(BufferDestroyed):
            dispatch()
        with pytest.raises(BufferDestroyed):
            buffer.get_dispatch_layout(idx, E)

    on_normal(body, 2, **PAIR)


def failures(buffer: Any, rank: int) -> None:
    """What notify finds leaves nothing of the dispatch behind it, on any rank."""
    call = Call("bf16", (T, T), 1)
    x, options = call.given(rank)
    idx, wide = options.pop("topk_idx"), torch.randn(T, 2 * H).bfloat16()
    bounds = 0, 3 * T
    for bound in bounds:
        for rows in (x, wide):
            buffer.dispatch(rows, topk_idx=idx, num_worst_tokens=bound, **options)
    free = buffer._context.region.num_free_bytes
    for step in range(2):
        bad = idx.clone()
        if rank == step:
            bad[1, 1] = E
        for bound in bounds:
            with pytest.raises(ExpertIndexError):
                buffer.dispatch(x, topk_idx=bad, num_worst_tokens=bound, **options)
            rows = wide if rank == 1 else x
            with pytest.raises(ConfigMismatch, match="row_bytes"):
                buffer.dispatch(rows, topk_idx=idx, num_worst_tokens=bound, **options)
        require_received(call, buffer.dispatch(x, topk_idx=idx, **options), rank)
    assert buffer._context.region.num_free_bytes == free


def test_failures_that_notify_finds() -> None:
    on_normal(failures, 2, **PAIR)


def test_schedules_of_failures_that_notify_finds() -> None:
    def main(group: Any) -> None:
        sizes = dict(num_direct_bytes=1 << 20, device="cpu", ranks_per_node=1)
        with deep_comm.Buffer(group, 2 << 20, 1 << 19, timeout_s=20, **sizes) as buffer:
            failures(buffer, group.rank())

    for seed in range(4):
        simulate.run(main, 2, seed, timeout_s=60)


def test_more_rows_than_the_bound() -> None:
    def body(buffer: Any, rank: int) -> None:
        for _ in range(2):
            if rank == 1:
                with pytest.raises(CapacityError):
                    buffer.dispatch(**to_rank(1, T), num_worst_tokens=2 * T - 1)
            else:
                buffer.dispatch(**to_rank(1, T), num_worst_tokens=2 * T - 1)
            handle = buffer.dispatch(**to_rank(1, T), num_worst_tokens=2 * T)[4]
            assert int(handle.num_recv_tokens_tensor) == (2 * T if rank == 1 else 0)

    on_normal(body, 2, **PAIR)


# ---- handles -------------------------------------------------------------------------------------


def copies_of(handle: Any) -> Iterator[Any]:
    yield copy.copy(handle)
    yield copy.deepcopy(handle)
    yield pickle.loads(pickle.dumps(handle))
    yield dataclasses.replace(handle, num_topk=None)
    yield tuple(handle)


@pytest.mark.parametrize("direct_bytes", [4 << 20, 0], ids=["region", "rings"])
@pytest.mark.parametrize("bound", [0, 2 * T])
def test_handles_can_be_copied_and_outlive_the_rows(bound: int, direct_bytes: int) -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)
        routing = dict(topk_idx=idx, topk_weights=weights, num_experts=E, num_worst_tokens=bound)
        buffer.dispatch(x, **routing)
        region = buffer._context.region
        free = region.num_free_bytes
        before = sys.getrefcount(x), sys.getrefcount(idx)
        rows, *_, handle, _ = buffer.dispatch(x, **routing)
        rows = rows.clone()
        if bound:
            rows[int(handle.num_recv_tokens_tensor) :] = 1.0
        sums = buffer.combine(rows, handle)[0]
        others = [*copies_of(handle)]
        del handle
        for other in others:
            for _ in range(2):
                assert torch.equal(buffer.combine(rows, other)[0], sums)
                again = buffer.dispatch(x, handle=other)[0]
                assert torch.equal(buffer.combine(again, other)[0], sums)
        one, two = others[:2]
        for got, want in zip(one, two, strict=True):
            assert torch.equal(got, want)
        with pytest.raises(AttributeError, match="nothing_like_it"):
            _ = one.nothing_like_it
        del others, other, one, two, again, got, want
        assert region.num_free_bytes == free
        assert (sys.getrefcount(x), sys.getrefcount(idx)) == before

    on_normal(body, 2, **{**PAIR, "num_direct_bytes": direct_bytes})


# ---- memory that the rail may still read ---------------------------------------------------------


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_what_a_dispatch_counts_spoils_no_sum_of_the_combine_before(ranks_per_node: int) -> None:
    """A combine of few rows stages at the region's end, where the next dispatch would count; and
    its sums cross when the network likes."""

    def main(group: Any) -> None:
        with deep_comm.Buffer(
            group, 1 << 20, 1 << 19, num_direct_bytes=1 << 19, device="cpu",
            ranks_per_node=ranks_per_node,
        ) as buffer:  # fmt: skip
            x, idx, _ = inputs(group.rank(), 4 * T)
            short, few_idx = x[:2, :16].contiguous(), idx[:2]
            for _ in range(3):
                many = buffer.dispatch(x, topk_idx=idx, num_experts=E)[4]
                rows, *_, few, _ = buffer.dispatch(short, topk_idx=few_idx, num_experts=E)
                del many
                sums = buffer.combine(rows, few)[0]
                buffer.dispatch(x, topk_idx=idx, num_experts=E)
                assert torch.equal(sums, short * few.is_token_in_rank.sum(1, keepdim=True))
                del rows, few

    for seed in range(12):
        simulate.run(main, 2 * ranks_per_node, seed, timeout_s=60)
