"""One Buffer's calls where what it knows of earlier ones is wrong, where there is no room, and
where they are refused: that launches nothing and takes nothing. Inside a node and between nodes.
Calls of all forms and sizes: test_random_calls.py, test_mixed_calls.py.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from run_by import run_by
from schedules import some_of
from small_calls import (
    CASTS,
    E,
    H,
    K,
    Marked,
    R,
    T,
    inputs,
    layout_of,
    on_normal,
    parts_of,
    to_rank,
)
from torch import Tensor

import deep_comm
from deep_comm import reference, simulate
from deep_comm.errors import BufferDestroyed
from deep_comm.reference.low_latency import quantise

# Of a Buffer, by tier.
NODES = dict(num_rdma_bytes=4 << 20, num_direct_bytes=4 << 20, ranks_per_node=1)
ROOM = {"node": dict(num_direct_bytes=4 << 20), "put": NODES, "stored": NODES}


def require_same(got: Tensor, want: Tensor, what: str) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype), what
    if got.dtype == torch.float8_e4m3fn:
        got, want = got.view(torch.uint8), want.view(torch.uint8)
    assert torch.equal(got, want), what


@pytest.mark.parametrize("idx_dtype", [torch.int32, torch.int64])
@run_by(on_normal)
def test_layouts(buffer: Any, rank: int, /, idx_dtype: torch.dtype) -> None:
    for num_tokens, num_experts in ((T, E), (0, E), (T, 2 * E), (1, E)):
        idx = inputs(rank, num_tokens, idx_dtype)[1]
        per_rank, per_node, per_expert, mask, event = buffer.get_dispatch_layout(idx, num_experts)
        want = reference.get_dispatch_layout(idx, num_experts, R)
        assert per_node is None and event.event is None
        require_same(per_rank, want.num_tokens_per_rank, "per rank")
        require_same(per_expert, want.num_tokens_per_expert, "per expert")
        require_same(mask, want.is_token_in_rank, "mask")
    idx = inputs(rank, T, idx_dtype)[1]
    idx[1, 0] = E
    with pytest.raises(deep_comm.ExpertIndexError):
        buffer.get_dispatch_layout(idx, E)
    before = sys.getrefcount(idx)
    for _ in range(20):
        buffer.get_dispatch_layout(idx, E + 1)
    assert sys.getrefcount(idx) == before


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_what_is_refused_launches_nothing(num_nodes: int) -> None:
    """And takes no memory of the region. The text names an argument that was given."""

    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)
        layout = layout_of(buffer, idx)
        per_expert, mask = layout["num_tokens_per_expert"], layout["is_token_in_rank"]
        most = buffer._context.num_max_experts

        def dispatch(**given: Any) -> Any:
            given = {"x": x, "topk_idx": idx, "topk_weights": weights, "num_experts": E, **given}
            return buffer.dispatch(**given)

        plain, grouped = dispatch(), dispatch(expand=True)
        handle, expanded = plain[4], grouped[4]
        rows, row_weights = plain[0], grouped[2]
        shifted = torch.zeros(T * H + 1, dtype=torch.bfloat16)[1:].view(T, H)
        launched, free = buffer.runtime.num_launches, buffer._context.region.num_free_bytes
        wrong_x = (
            None, x[:-1], x.t(), shifted, x.to("meta"), (x, weights[:-1]), (x,), (), [x, x, x],
            torch.zeros(T, 2 * H, dtype=torch.bfloat16)[:, :H], torch.zeros(T, 3).bfloat16(), 7,
        )  # fmt: skip
        wrong_idx = (
            idx[:-1], idx.float(), idx.t(), idx.repeat(1, 2)[:, ::2], idx[:, :0], idx.tolist(),
            idx.repeat(1, 64), idx.to("meta"), None,
        )  # fmt: skip
        wrong_numbers = (None, 0, -1, most + 1, 1 << 70, float(E), torch.tensor(E), "6")
        per_node = layout.get("num_tokens_per_rdma_rank")
        of_nodes = [] if per_node is None else [
            dict(layout, num_tokens_per_rdma_rank=wrong)
            for wrong in (per_node.long(), per_node[:1], per_node[None])
        ]  # fmt: skip
        refused = [
            *of_nodes, *(dict(x=wrong) for wrong in wrong_x),
            *(dict(topk_idx=wrong) for wrong in wrong_idx),
            *(dict(num_experts=wrong) for wrong in wrong_numbers),
            dict(topk_weights=weights.double()), dict(topk_weights=weights[:, :-1]),
            dict(num_worst_tokens=-1), dict(num_worst_tokens=1.0), dict(num_worst_tokens=None),
            dict(expert_alignment=0), dict(expert_alignment=1 << 17), dict(zero_padding=True),
            dict(expand=True, zero_tail=True), dict(expand=True, topk_idx=None, topk_weights=None),
            dict(layout, num_experts=E + 1), dict(layout, is_token_in_rank=None),
            dict(layout, is_token_in_rank=mask.int()), dict(layout, num_tokens_per_rank=None),
            dict(layout, num_tokens_per_expert=per_expert.long()), dict(round_scale=True),
            dict(use_fp8=True, use_ue8m0=True), dict(column_major_scales=True), dict(config=7),
            dict(config=deep_comm.Config(1, 1 << 20, 1 << 21)), dict(allocate_on_comm_stream=True),
        ]  # fmt: skip
        for wrong in refused:
            with pytest.raises(deep_comm.DeepCommError) as caught:
                dispatch(**wrong)
            names = (*wrong, "num_nvl_bytes", "num_rdma_bytes")  # too small for a config
            assert any(name in str(caught.value) for name in names), caught.value
            assert buffer.runtime.num_launches == launched, wrong
        for call in (
            lambda: buffer.dispatch(x, handle=handle, topk_idx=idx),
            lambda: buffer.dispatch(x, handle=handle, topk_weights=weights),
            lambda: buffer.dispatch(x, handle=handle, expand=True),
            lambda: buffer.dispatch(x, handle=handle, zero_padding=True),
            lambda: buffer.dispatch(x[:-1], handle=expanded),
            lambda: buffer.dispatch(x, handle=handle, config=deep_comm.Config(6, 4, 16, 4, 16)),
            lambda: buffer.dispatch(x[:-1], handle=tuple(handle)),
            lambda: buffer.combine(rows[:-1], handle),
            lambda: buffer.combine(rows.to(torch.float64), handle),
            lambda: buffer.combine(rows.t(), handle),
            lambda: buffer.combine((rows,), handle),
            lambda: buffer.combine(rows, None),
            lambda: buffer.combine(rows, handle, weights.double()),
            lambda: buffer.combine(rows, handle, bias=x.float()),
            lambda: buffer.combine(rows, handle, bias=(x,)),
            lambda: buffer.combine(rows, handle, bias=()),
            lambda: buffer.combine(rows, handle, bias=(None, x[:-1])),
            lambda: buffer.combine(rows, handle, config=deep_comm.Config(9, 4, 16)),
            lambda: buffer.combine(grouped[0], expanded, weights),
            lambda: buffer.combine(grouped[0], expanded, row_weights[:-1], apply_weights=True),
            lambda: buffer.combine(grouped[0], expanded, apply_weights=True),
            lambda: buffer.combine(rows, handle, weights, apply_weights=True),
            lambda: buffer.get_dispatch_layout(idx.float(), E),
            lambda: buffer.get_dispatch_layout(idx.t(), E),
            lambda: buffer.get_dispatch_layout(None, E),
            lambda: buffer.get_dispatch_layout(idx, most + 1),
            lambda: buffer.get_dispatch_layout(idx, "6"),
        ):
            with pytest.raises(deep_comm.DeepCommError):
                call()
        assert buffer.runtime.num_launches == launched
        assert buffer._context.region.num_free_bytes == free
        # Tensors of a subclass are tensors.
        marked = x.as_subclass(Marked)
        assert torch.equal(buffer.dispatch(marked, handle=handle)[0], rows)
        buffer.destroy()
        for call in (
            dispatch,
            lambda: buffer.dispatch(x, handle=handle),
            lambda: buffer.combine(rows, handle),
            lambda: buffer.get_dispatch_layout(idx, E),
        ):
            with pytest.raises(BufferDestroyed):
                call()

    sizes = dict(num_direct_bytes=4 << 20, num_rdma_bytes=4 << 20, ranks_per_node=1)
    on_normal(body, num_nodes, **sizes)


def failures(buffer: Any, rank: int, expand: bool) -> None:
    """What notify finds leaves nothing of the dispatch behind it, on any rank."""
    x, idx, weights = inputs(rank)
    options = dict(topk_weights=weights, num_experts=E, expand=expand)
    wide, want = torch.randn(T, 2 * H).bfloat16(), buffer.dispatch(x, topk_idx=idx, **options)
    counts, wanted = want[3], want[0].clone()
    del want
    bounds = 0, 5 * T * (K if expand else 1)
    for bound in bounds:
        for rows in (x, wide):
            buffer.dispatch(rows, topk_idx=idx, num_worst_tokens=bound, **options)
    free = buffer._context.region.num_free_bytes
    for step in range(2):
        bad = idx.clone()
        if rank == step:
            bad[1, 1] = E
        for bound in bounds:
            with pytest.raises(deep_comm.ExpertIndexError) as caught:
                buffer.dispatch(x, topk_idx=bad, num_worst_tokens=bound, **options)
            assert (caught.value.rank, caught.value.num_experts) == (step, E)
            rows = wide if rank == 1 else x
            with pytest.raises(deep_comm.ConfigMismatch, match="row_bytes"):
                buffer.dispatch(rows, topk_idx=idx, num_worst_tokens=bound, **options)
        again = buffer.dispatch(x, topk_idx=idx, **options)
        assert again[3] == counts and torch.equal(again[0], wanted)
        del again
    assert buffer._context.region.num_free_bytes == free


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("ranks_per_node", [None, 1, 2])
def test_after_failures_that_notify_finds_the_buffer_goes_on(
    ranks_per_node: int | None, expand: bool
) -> None:
    num_ranks = 2 * (ranks_per_node or 1)
    sizes = dict(num_direct_bytes=4 << 20, num_rdma_bytes=4 << 20, ranks_per_node=ranks_per_node)
    on_normal(lambda buffer, rank: failures(buffer, rank, expand), num_ranks, **sizes)

    def main(group: Any) -> None:
        few = {**sizes, "num_rdma_bytes": 1 << 19, "num_direct_bytes": 1 << 20}
        with deep_comm.Buffer(group, 2 << 20, device="cpu", timeout_s=20, **few) as buffer:
            failures(buffer, group.rank(), expand)

    for seed in some_of(range(10)):
        simulate.run(main, num_ranks, seed, timeout_s=60)


@pytest.mark.parametrize("expand", [False, True])
def test_more_rows_than_the_bound_are_an_error_where_they_come(expand: bool, tier: str) -> None:
    def body(buffer: Any, rank: int) -> None:
        arguments = to_rank(1, 12)
        buffer.dispatch(**arguments, expand=expand, num_worst_tokens=40)
        for _ in range(2):
            if rank == 1:
                with pytest.raises(deep_comm.CapacityError) as caught:
                    buffer.dispatch(**arguments, expand=expand, num_worst_tokens=20)
                assert (caught.value.needed_rows, caught.value.available_rows) == (24, 20)
            else:
                buffer.dispatch(**arguments, expand=expand, num_worst_tokens=20)
            received = buffer.dispatch(**arguments, expand=expand, num_worst_tokens=24)
            assert int(received[4].num_recv_tokens_tensor) == (24 if rank == 1 else 0)

    on_normal(body, **ROOM[tier])


def wrong_guess(buffer: Any, rank: int, most: int, **options: Any) -> None:
    """Rank 1 has one token and gets ``most`` more: nobody could tell it before."""
    free = buffer._context.region.num_free_bytes
    cast = {name: value for name, value in options.items() if name != "expand"}
    # Notify and a dispatch that left at once; between nodes a layout and counts, too; what numbers
    # rows and what places them. One more is the dispatch that moved.
    expected = 2 + 2 * (buffer.num_nodes > 1) + 2 * ("expand" in options)
    buffer.dispatch(**to_rank(1, 1), **options)
    # What places rows is launched with each dispatch inside a node.
    has_moved = 1 + (buffer.num_nodes == 1 and "expand" in options)
    for launches in (expected + has_moved, expected):
        before = buffer.runtime.num_launches
        arguments = to_rank(1, most if rank == 0 else 1)
        received = buffer.dispatch(**arguments, **options)
        assert buffer.runtime.num_launches - before == launches
        got, handle = parts_of(received[0])[0], received[4]
        assert len(got) == (most + 1 if rank == 1 else 0)
        if rank == 1:
            x = torch.cat([to_rank(1, num_tokens)["x"] for num_tokens in (most, 1)])
            rows = quantise(x, cast.get("round_scale", False))[0] if cast else x
            require_same(got, rows, "rows")
        assert received[3] == [most + 1 if rank == 1 else 0, 0, 0]
        assert (handle.num_recv_tokens, handle.max_num_tokens) == (len(got), most)
        assert handle.recv_src_idx.tolist() == [*range(most), 0][: len(got)]
        if rank == 1 and (buffer.num_nodes == 1 or "expand" not in options):
            assert buffer._context.region.num_free_bytes <= free - got.nbytes
        again = parts_of(buffer.dispatch(arguments["x"], handle=handle, **cast)[0])[0]
        require_same(again, got, "rows of a cached dispatch")
        if not cast:
            assert torch.equal(buffer.combine(again, handle)[0], arguments["x"])
        del received, handle, got, again
    assert buffer._context.region.num_free_bytes == free


@pytest.mark.parametrize(
    "options",
    [{}, dict(expand=True), *CASTS.values(), dict(use_fp8=True, expand=True)],
    ids=["plain", "expanded", *CASTS, "cast-expanded"],
)
def test_rows_that_could_not_leave_at_once_are_moved(options: dict[str, Any], tier: str) -> None:
    on_normal(lambda buffer, rank: wrong_guess(buffer, rank, 40, **options), **ROOM[tier])


@pytest.mark.parametrize("options", [{}, dict(expand=True)], ids=["plain", "expanded"])
def test_schedules_of_guesses_that_are_wrong(options: dict[str, Any], tier: str) -> None:
    sizes = dict(num_direct_bytes=1 << 18, ranks_per_node=ROOM[tier].get("ranks_per_node"))

    def main(group: Any) -> None:
        with deep_comm.Buffer(
            group, 1 << 19, 1 << 19, device="cpu", timeout_s=20, **sizes
        ) as buffer:
            wrong_guess(buffer, group.rank(), 9, **options)

    for seed in range(25) if tier == "node" else some_of(range(12)):
        simulate.run(main, R, seed, timeout_s=60)


@pytest.mark.parametrize("cast", [{}, *CASTS.values()], ids=["plain", *CASTS])
@run_by(on_normal, num_direct_bytes=1 << 18)
def test_without_room_the_rows_take_the_rings(
    buffer: Any, rank: int, /, cast: dict[str, bool]
) -> None:
    """One rank's region is full, the others' are not; then it is free again."""
    arguments = {**to_rank(1, 12), **cast}
    launched = []

    def dispatch() -> Any:
        before = buffer.runtime.num_launches
        received = buffer.dispatch(**arguments)
        launched.append(buffer.runtime.num_launches - before)
        return received

    want = [part.clone() for part in parts_of(buffer.dispatch(**arguments)[0])]
    kept = None
    if rank == 1:
        region = buffer._context.region
        kept = region.allocate(region.num_free_bytes - 4096)
    for _ in range(2):
        received = dispatch()
        handle = received[4]
        again = buffer.dispatch(arguments["x"], handle=handle, **cast)[0]
        for got, cached, part in zip(parts_of(received[0]), parts_of(again), want, strict=True):
            require_same(got, part, "rows")
            require_same(cached, part, "rows of a cached dispatch")
        assert handle.num_recv_tokens_tensor.tolist() == [len(want[0])]
        if not cast:
            sums = buffer.combine(again, handle)[0]
            assert torch.equal(sums, arguments["x"])
    del kept
    for got, part in zip(parts_of(dispatch()[0]), want, strict=True):
        require_same(got, part, "rows")
    # The full rank had nothing to launch in hope; the third call is no attempt.
    assert launched == ([2, 2, 2] if rank == 1 else [3, 3, 2])


@run_by(on_normal, 1, num_direct_bytes=1 << 20)
def test_memory_goes_back_and_a_full_region_is_no_error(buffer: Any, rank: int, /) -> None:
    x, idx, weights = inputs(rank)
    handle = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=E)[4]
    rows = buffer.dispatch(x, handle=handle)[0]
    sums = buffer.combine(rows, handle)[0]
    region, heap = buffer._context.region, buffer._context.heap
    free = region.num_free_bytes
    before = sys.getrefcount(x), sys.getrefcount(rows)
    for _ in range(50):
        again = buffer.dispatch(x, handle=handle)[0]
        assert torch.equal(buffer.combine(rows, handle)[0], sums)
        assert region.num_free_bytes < free
        del again
    assert (sys.getrefcount(x), sys.getrefcount(rows)) == before
    assert region.num_free_bytes == free

    def is_in_region(tensor: Tensor) -> bool:
        return heap.base <= tensor.data_ptr() < heap.base + heap.num_bytes

    for call in (
        lambda: buffer.dispatch(x, handle=handle)[0],
        lambda: buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, num_experts=E, num_worst_tokens=T
        )[0],
    ):
        held = [call()]  # until the region is full: then through the rings
        while is_in_region(held[-1]):
            held.append(call())
        assert len(held) > 3
        assert all(torch.equal(again, rows) for again in held)
        del held
    assert region.num_free_bytes == free
