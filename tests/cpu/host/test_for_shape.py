"""Buffer.for_shape: no call of the shape goes through rings, and low-latency calls have room."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_buffers import on_buffers

import deep_comm
from deep_comm import local
from deep_comm.errors import ArgumentError

SHAPE: dict[str, Any] = dict(hidden=128, num_experts=6, num_topk=3, max_tokens=40, decode_tokens=7)


def tokens(rank: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, SHAPE["hidden"], generator=generator).bfloat16()
    idx = torch.rand(num_tokens, SHAPE["num_experts"], generator=generator).topk(3).indices
    return x, idx, torch.rand(num_tokens, 3, generator=generator)


def all_calls(group: Any, ranks_per_node: int | None) -> deep_comm.layer.MemoryEstimate | None:
    with deep_comm.Buffer.for_shape(
        group, **SHAPE, device="cpu", ranks_per_node=ranks_per_node, timeout_s=30
    ) as buffer:
        x, idx, weights = tokens(buffer.rank, SHAPE["max_tokens"])
        for _ in range(2):
            rows, _, _, _, handle, _ = buffer.dispatch(
                x, topk_idx=idx, topk_weights=weights, num_experts=SHAPE["num_experts"]
            )
            sums = buffer.combine(rows, handle)[0]
            num_copies = handle.is_token_in_rank.sum(1, keepdim=True)
            torch.testing.assert_close(sums.float(), x.float() * num_copies, rtol=2e-2, atol=0)
            del rows, sums  # between nodes there is room for one call
        stats = buffer.stats()
        assert (stats.dispatch_rings, stats.combine_rings) == (0, 0), stats
        assert (stats.dispatch_direct, stats.combine_direct) == (2, 2), stats
        few = slice(SHAPE["decode_tokens"])
        rows, _, handle, _, _ = buffer.low_latency_dispatch(
            x[few], idx[few], SHAPE["decode_tokens"], SHAPE["num_experts"], use_fp8=False
        )
        sums = buffer.low_latency_combine(rows, idx[few], weights[few], handle)[0]
        expected = x[few].float() * weights[few].sum(1, keepdim=True)
        torch.testing.assert_close(sums.float(), expected, rtol=2e-2, atol=1e-3)
        return buffer.memory


def test_normal_calls_have_room_where_every_step_could_be_a_decode_step() -> None:
    shape = {**SHAPE, "max_tokens": SHAPE["decode_tokens"]}

    def main(group: Any) -> None:
        with deep_comm.Buffer.for_shape(group, **shape, device="cpu", timeout_s=30) as buffer:
            x, idx, weights = tokens(buffer.rank, shape["max_tokens"])
            buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=6)
            assert (buffer.stats().dispatch_direct, buffer.stats().dispatch_rings) == (1, 0)

    local.run(main, 2, timeout_s=60)


@pytest.mark.parametrize("ranks_per_node", [None, 2])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_calls_of_the_shape_have_room(num_ranks: int, ranks_per_node: int | None) -> None:
    memories = local.run(lambda group: all_calls(group, ranks_per_node), num_ranks, timeout_s=60)
    first = memories[0]
    assert first is not None and all(memory == first for memory in memories)
    assert (first.rail > 0) == (num_ranks == 4 and ranks_per_node == 2)
    assert first.receive_region > 0 and first.low_latency_region > 0
    assert "The Buffer holds" in str(first)


def test_a_mode_takes_no_memory_of_the_other() -> None:
    def held(group: Any, mode: str) -> tuple[int, int]:
        with deep_comm.Buffer.for_shape(group, **SHAPE, mode=mode, device="cpu") as buffer:
            assert buffer.memory is not None
            assert buffer.low_latency_mode == (mode == "decode")
            return buffer.memory.receive_region, buffer.memory.low_latency_region

    for mode, unused in (("prefill", 1), ("decode", 0)):
        for regions in local.run(lambda group, mode=mode: held(group, mode), 2, timeout_s=60):
            assert regions[unused] == 0 and regions[1 - unused] > 0


def test_a_buffer_of_given_bytes_has_no_estimate() -> None:
    def built(buffer: deep_comm.Buffer) -> object:
        return buffer.memory

    assert on_buffers(built, 1, 1 << 20) == [None]


@pytest.mark.parametrize(
    "change, argument",
    [
        (dict(hidden=0), "hidden"),
        (dict(num_topk=65), "num_topk"),
        (dict(decode_tokens=41), "decode_tokens"),
        (dict(mode="both"), "mode"),
        (dict(mode="decode", dtype=torch.float32), "mode"),
        (dict(fp8=True, hidden=72), "fp8"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_before_ranks_meet(
    change: dict[str, Any], argument: str
) -> None:
    with pytest.raises(ArgumentError) as refused:
        deep_comm.Buffer.for_shape(None, **{**SHAPE, **change}, device="cpu")
    assert refused.value.argument == argument


def test_other_options_of_the_constructor_are_passed_on() -> None:
    def built(group: Any) -> tuple[bool, int, int]:
        with deep_comm.Buffer.for_shape(
            group, **SHAPE, device="cpu", ranks_per_node=1, enable_shrink=True, trace=3,
            num_qps_per_rank=2, rail="simulated", explicitly_destroy=True,
        ) as buffer:  # fmt: skip
            assert buffer.memory is not None and buffer.explicitly_destroy
            num_queues = len(buffer.rail_put_bytes[0])
            return buffer.enable_shrink, num_queues, buffer.trace().num_ranks

    assert local.run(built, 2, timeout_s=60) == [(True, 2, 2)] * 2


@pytest.mark.parametrize(
    "options, argument, rule",
    [
        (dict(enable_shrnk=True), "enable_shrnk", "is no option of Buffer; did you mean enable_s"),
        (dict(num_nvl_bytes=1), "num_nvl_bytes", "follows from the shape"),
        (dict(low_latency_mode=True), "low_latency_mode", "follows from the shape"),
        (dict(enable_shrink=True, mode="prefill"), "enable_shrink", "needs low-latency calls"),
    ],
)
def test_options_that_cannot_be_are_refused_before_ranks_meet(
    options: dict[str, Any], argument: str, rule: str
) -> None:
    with pytest.raises(ArgumentError, match=rule) as refused:
        deep_comm.Buffer.for_shape(None, **{**SHAPE, **options}, device="cpu")
    assert refused.value.argument == argument


def test_the_variable_sizes_the_receive_region_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(group: Any) -> int:
        with deep_comm.Buffer.for_shape(group, **SHAPE, device="cpu", timeout_s=30) as buffer:
            return buffer.stats().receive_region_bytes

    assert min(local.run(main, 2, timeout_s=60)) > 0
    monkeypatch.setenv("DEEP_COMM_NUM_DIRECT_BYTES", "0")
    assert local.run(main, 2, timeout_s=60) == [0, 0]
