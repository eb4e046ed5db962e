"""Cached dispatches and combines between nodes, in all their forms: first and later calls of a
Buffer give what the reference says.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from typing import Any

import pytest
import torch
from chained_calls import run_calls
from payload import assert_same_bits
from small_calls import E, H, K, T, inputs, on_normal, parts_of

import deep_comm
from deep_comm import local
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


def test_handles_of_all_kinds_and_what_is_added_to_calls() -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)
        handle = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=E)[4]
        rows = buffer.dispatch(x, handle=handle)[0]
        sums = buffer.combine(rows, handle)[0]
        copies = handle.is_token_in_rank.sum(1, keepdim=True)
        assert torch.equal(sums, x * copies)
        others = tuple(handle), copy.deepcopy(handle), dataclasses.replace(handle, num_topk=None)
        for other in (*others, *others):
            assert torch.equal(buffer.dispatch(x, other)[0], rows)
            assert torch.equal(buffer.combine(rows, other)[0], sums)
            assert torch.equal(
                buffer.combine(rows, other, bias=x)[0], (sums.float() + x.float()).bfloat16()
            )
        fp8, scales = buffer.dispatch(x, handle, use_fp8=True)[0]
        assert (fp8.dtype, scales.shape) == (torch.float8_e4m3fn, (len(rows), H // 128))
        by_column = buffer.dispatch(x, handle, use_fp8=True, column_major_scales=True)[0]
        assert torch.equal(by_column[1], scales) and by_column[1].stride(0) == 1
        assert torch.equal(by_column[0].float(), fp8.float())

    on_normal(body, 2, **PAIR)


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


def test_blocks_go_back() -> None:
    def body(buffer: Any, rank: int) -> None:
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

    on_normal(body, 2, **PAIR)


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_calls_behind_each_other_give_what_they_give_alone(ranks_per_node: int) -> None:
    """What tests/gpu/test_tier_calls_gpu.py runs over streams."""
    local.run(lambda group: run_calls(group, "cpu", 4, ranks_per_node), 4, timeout_s=60)
