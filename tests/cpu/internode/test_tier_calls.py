"""Cached dispatches and combines between nodes, in all their forms: first and later calls of a
Buffer give what the reference says. Handles, a full region, memory that the rail may still read.
Dispatches with new routing: test_random_calls.py, test_normal_calls.py.
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
from chained_calls import run_calls
from payload import assert_same_bits
from run_by import run_by
from schedules import some_of
from small_calls import E, H, K, T, inputs, on_normal, parts_of

import deep_comm
from deep_comm import local, simulate
from deep_comm.errors import BufferDestroyed
from deep_comm.reference import internode as reference_internode

NODES = dict(num_rdma_bytes=4 << 20, num_direct_bytes=4 << 20, ranks_per_node=2, device="cpu")
PAIR = {**NODES, "ranks_per_node": 1}

pytestmark = pytest.mark.usefixtures("way")


def given_of(x: torch.Tensor, form: str) -> Any:
    if form == "bf16":
        return x
    if form == "fp32":
        return x.float()
    scales = torch.arange(6 * len(x)).view(-1, 6).float() + x[:, :1].float()
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
    of_ranks = [inputs(rank, num_tokens) for rank, num_tokens in enumerate(tokens)]
    sent = [given_of(x, form) for x, _, _ in of_ranks]
    dtype = torch.float32 if form == "fp32" else torch.bfloat16

    def wanted(num_channels: int) -> tuple[Any, Any]:
        want = reference_internode.dispatch(
            sent, [idx for _, idx, _ in of_ranks], E, 2, num_channels=num_channels
        )
        rows = [each.received.recv_x.to(dtype) for each in want]
        return want, reference_internode.combine(rows, want, [torch.ones(len(x), K) for x in rows])

    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = of_ranks[rank]
        handle = buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, num_experts=E, config=config
        )[4]
        dispatched, combined = wanted(handle.num_channels)
        want = dispatched[rank].received
        for with_weights in (False, True, True):
            got, *nothing, event = buffer.dispatch(
                sent[rank], handle=handle, config=config, **streams
            )
            assert nothing == [None] * 4 and (event.event is not None) == bool(streams)
            parts = parts_of(got)
            assert_same_bits(parts[0], want.recv_x, "rows")
            if want.recv_x_scales is not None:
                assert_same_bits(parts[1], want.recv_x_scales, "scales")
            some = torch.ones(len(parts[0]), K) if with_weights else None
            sums, weight_sums, event = buffer.combine(
                parts[0].to(dtype), handle, some, config=config, **streams
            )
            assert (event.event is not None) == bool(streams)
            assert_same_bits(sums, combined[rank][0], "sums")
            assert (weight_sums is None) is not with_weights
            if with_weights:
                assert_same_bits(weight_sums, combined[rank][1], "weights")

    on_normal(body, 4, **NODES)


@run_by(on_normal, 2, **PAIR)
def test_what_is_added_to_calls(buffer: Any, rank: int, /) -> None:
    x, idx, weights = inputs(rank)
    handle = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=E)[4]
    rows = buffer.dispatch(x, handle=handle)[0]
    sums = buffer.combine(rows, handle)[0]
    copies = handle.is_token_in_rank.sum(1, keepdim=True)
    assert torch.equal(sums, x * copies)
    for other in 2 * (handle, tuple(handle)):
        biased = buffer.combine(rows, other, bias=x)[0]
        assert torch.equal(biased, (sums.float() + x.float()).bfloat16())
    fp8, scales = buffer.dispatch(x, handle, use_fp8=True)[0]
    assert (fp8.dtype, scales.shape) == (torch.float8_e4m3fn, (len(rows), H // 128))
    by_column = buffer.dispatch(x, handle, use_fp8=True, column_major_scales=True)[0]
    assert torch.equal(by_column[1], scales) and by_column[1].stride(0) == 1
    assert torch.equal(by_column[0].float(), fp8.float())


@pytest.mark.parametrize("lacks", ["num_direct_bytes", "num_rdma_bytes"])
def test_calls_through_rings_give_the_same(lacks: str) -> None:
    """Without a receive region; and where the rail has no place for every row."""
    sizes = {**PAIR, lacks: 0 if lacks == "num_direct_bytes" else 1 << 17}

    def body(buffer: Any, rank: int) -> None:
        x, idx, _ = inputs(rank, 64)
        config = deep_comm.Config(2, 1, 8, 1, 8)
        rows, *_, handle, _ = buffer.dispatch(x, topk_idx=idx, num_experts=E, config=config)
        copies = handle.is_token_in_rank.sum(1, keepdim=True)
        for other in (handle, handle, tuple(handle)):
            assert torch.equal(buffer.dispatch(x, other, config=config)[0], rows)
            assert torch.equal(buffer.combine(rows, other, config=config)[0], x * copies)

    on_normal(body, 2, **sizes)


@run_by(on_normal, 2, **PAIR)
def test_blocks_go_back(buffer: Any, rank: int, /) -> None:
    x, idx, _ = inputs(rank)
    handle = buffer.dispatch(x, topk_idx=idx, num_experts=E)[4]
    rows = buffer.dispatch(x, handle)[0]
    sums = buffer.combine(rows, handle)[0]
    region = buffer._context.region
    free = region.num_free_bytes
    before = sys.getrefcount(x), sys.getrefcount(rows), sys.getrefcount(handle)
    for _ in range(20):
        again = buffer.dispatch(x, handle)[0]
        assert torch.equal(buffer.combine(again, handle)[0], sums)
        del again
    assert (sys.getrefcount(x), sys.getrefcount(rows), sys.getrefcount(handle)) == before
    assert region.num_free_bytes == free
    buffer.destroy()
    with pytest.raises(BufferDestroyed):
        buffer.combine(rows, handle)


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_calls_behind_each_other_give_what_they_give_alone(ranks_per_node: int) -> None:
    """What tests/gpu/test_chained_calls_gpu.py runs over streams."""
    local.run(lambda group: run_calls(group, "cpu", 4, ranks_per_node), 4, timeout_s=60)


# Launches of a dispatch: layout, counts, notify, one that left at once; and one that moved.
EARLY, TWICE = 4, 5


@run_by(on_normal, 2, **{**PAIR, "num_direct_bytes": 1 << 18})
def test_where_a_region_is_full_all_ranks_do_alike(buffer: Any, rank: int, /) -> None:
    """One rank has no room. All try less and less often, and again when one attempt was right."""
    x, idx, weights = inputs(rank, 12)
    region = buffer._context.region
    want = []

    def launches() -> int:
        before = buffer.runtime.num_launches
        rows = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=E)[0]
        want.append(rows.clone())
        assert torch.equal(rows, want[0])
        return buffer.runtime.num_launches - before

    assert [launches(), launches()] == [EARLY, EARLY]
    kept = region.allocate(region.num_free_bytes - 8192) if rank == 1 else None
    tried = [True, True, False, True, False, False, True]
    assert [launches() for _ in tried] == [TWICE if early else EARLY for early in tried]
    del kept
    # Three calls are not tried. The fourth is, and then every one.
    assert [launches() for _ in range(6)] == [EARLY] * 6


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


# ---- memory that the rail may still read: puts end when they like --------------------------------


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

    for seed in some_of(range(12)):
        simulate.run(main, 2 * ranks_per_node, seed, timeout_s=60)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_what_poison_fills_spoils_no_sum_of_the_combine_before(ranks_per_node: int) -> None:
    """Rows of the next dispatch get the memory that combine has just staged its sums in."""
    num_tokens, num_experts = 16, 8

    def main(group: Any) -> None:
        with deep_comm.Buffer(
            group, 1 << 19, 1 << 19, num_direct_bytes=1 << 18, device="cpu",
            ranks_per_node=ranks_per_node,
        ) as buffer:  # fmt: skip
            for step in range(4):
                x = torch.arange(num_tokens * H).view(num_tokens, H) % 251 + buffer.rank + step
                idx = torch.arange(2 * num_tokens).view(num_tokens, 2) * 3 + step
                routing = dict(topk_idx=idx % num_experts, num_experts=num_experts)
                rows, *_, handle, _ = buffer.dispatch(x.bfloat16(), **routing)
                sums, *_ = buffer.combine(rows, handle)
                again = [buffer.dispatch(x.bfloat16(), handle=handle)[0] for _ in range(2)]
                copies = handle.is_token_in_rank.sum(1, keepdim=True)
                assert torch.equal(sums, x.bfloat16() * copies)
                assert all(torch.equal(other, rows) for other in again)

    for seed in some_of(range(40)):
        simulate.run(main, 2 * ranks_per_node, seed)
