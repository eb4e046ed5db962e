"""Dispatches with new routing between nodes where what a Buffer knows of earlier ones is wrong,
where they are refused or fail; and their handles. Calls of all forms: test_random_calls.py.
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
from schedules import some_of
from small_calls import E, H, T, inputs, on_normal, to_rank

import deep_comm
from deep_comm import simulate
from deep_comm.errors import (
    CapacityError,
    ConfigMismatch,
    ExpertIndexError,
)

NODES = dict(num_rdma_bytes=4 << 20, num_direct_bytes=4 << 20, ranks_per_node=2, device="cpu")
PAIR = {**NODES, "ranks_per_node": 1}

# Where rows are put, the rail may read what a combine has staged when the dispatch behind it has
# begun.
pytestmark = pytest.mark.usefixtures("way")


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

    for seed in some_of(range(12)):
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

    on_normal(body, 2, **{**PAIR, "num_direct_bytes": 1 << 18})


# ---- what is refused, and what fails -------------------------------------------------------------


def failures(buffer: Any, rank: int) -> None:
    """What notify finds leaves nothing of the dispatch behind it, on any rank."""
    x, idx, weights = inputs(rank)
    options = dict(topk_weights=weights, num_experts=E)
    wide, want = torch.randn(T, 2 * H).bfloat16(), buffer.dispatch(x, topk_idx=idx, **options)
    counts, wanted = want[3], want[0].clone()
    del want
    bounds = 0, 5 * T
    for bound in bounds:
        for rows in (x, wide):
            buffer.dispatch(rows, topk_idx=idx, num_worst_tokens=bound, **options)
    free = buffer._context.region.num_free_bytes
    for step in range(2):
        bad = idx.clone()
        if rank == step:
            bad[1, 1] = E
        for bound in bounds:
            with pytest.raises(ExpertIndexError) as caught:
                buffer.dispatch(x, topk_idx=bad, num_worst_tokens=bound, **options)
            assert (caught.value.rank, caught.value.num_experts) == (step, E)
            rows = wide if rank == 1 else x
            with pytest.raises(ConfigMismatch, match="row_bytes"):
                buffer.dispatch(rows, topk_idx=idx, num_worst_tokens=bound, **options)
        again = buffer.dispatch(x, topk_idx=idx, **options)
        assert again[3] == counts and torch.equal(again[0], wanted)
        del again
    assert buffer._context.region.num_free_bytes == free


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_failures_that_notify_finds(ranks_per_node: int) -> None:
    sizes = {**NODES, "ranks_per_node": ranks_per_node}
    on_normal(failures, 2 * ranks_per_node, **sizes)

    def main(group: Any) -> None:
        options = {**sizes, "num_rdma_bytes": 1 << 19, "num_direct_bytes": 1 << 20}
        with deep_comm.Buffer(group, 2 << 20, timeout_s=20, **options) as buffer:
            failures(buffer, group.rank())

    for seed in some_of(range(10)):
        simulate.run(main, 2 * ranks_per_node, seed, timeout_s=60)


def test_more_rows_than_the_bound() -> None:
    def body(buffer: Any, rank: int) -> None:
        for _ in range(2):
            if rank == 1:
                with pytest.raises(CapacityError) as caught:
                    buffer.dispatch(**to_rank(1, T), num_worst_tokens=2 * T - 1)
                rows = caught.value.needed_rows, caught.value.available_rows
                assert rows == (2 * T, 2 * T - 1)
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

    for seed in some_of(range(12)):
        simulate.run(main, 2 * ranks_per_node, seed, timeout_s=60)
