"""estimate_memory says what the Buffer takes, and what calls make, in plain words."""

from typing import Any

import pytest
import torch
from layer_cases import LayerCase, build, inputs

from deep_comm import ArgumentError, ExpertParallel, local

SHAPE = dict(hidden=7168, num_experts=256, num_topk=8, max_tokens=4096)


@pytest.mark.parametrize("mode", ["auto", "prefill", "decode"])
def test_the_buffer_is_as_large_as_estimated(mode: str) -> None:
    case = LayerCase(((6, 6, 6),), 24, 6, hidden=256, experts=9, mode=mode)

    def main(group: Any) -> None:
        with build(group, case) as layer:
            memory, ctx = layer.memory, layer.buffer._context
            assert abs(ctx.heap.num_bytes - memory.buffer) <= 1024
            assert layer.buffer.num_nvl_bytes == memory.num_nvl_bytes
            assert ctx.low_latency_bytes == memory.low_latency_region
            assert (memory.low_latency_region == 0) == (mode == "prefill")
            assert (memory.prefill_call == 0) == (mode == "decode")

    local.run(main, 3, timeout_s=30)


@pytest.mark.parametrize("mode", ["auto", "prefill", "decode"])
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_the_buffer_between_nodes_is_as_large_as_estimated(mode: str, ranks_per_node: int) -> None:
    case = LayerCase(
        ((6,) * 4,), 24, 6, hidden=256, experts=8, mode=mode, ranks_per_node=ranks_per_node
    )

    def main(group: Any) -> None:
        with build(group, case) as layer:
            memory, shape = layer.memory, layer.shape
            assert abs(layer.buffer._context.heap.num_bytes - memory.buffer) <= 1024
            assert memory == ExpertParallel.estimate_memory(
                4, hidden=256, num_experts=8, num_topk=shape.num_topk, max_tokens=24,
                decode_tokens=6, mode=mode, device_type="cpu", ranks_per_node=ranks_per_node,
            )  # fmt: skip

    local.run(main, 4, timeout_s=30)


def test_more_ranks_than_a_node_holds_are_several_nodes() -> None:
    estimate = ExpertParallel.estimate_memory
    assert estimate(64, **SHAPE) == estimate(64, **SHAPE, ranks_per_node=8)
    assert estimate(12, **SHAPE) == estimate(12, **SHAPE, ranks_per_node=6)
    assert estimate(8, **SHAPE).rail == 0 < estimate(8, **SHAPE, ranks_per_node=4).rail
    with pytest.raises(ArgumentError, match="ranks_per_node"):
        estimate(8, **SHAPE, ranks_per_node=3)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("shape", [(2, 2), (3, 1), (3, 2)], ids=str)
def test_between_nodes_rows_and_sums_have_places(
    shape: tuple[int, int], fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of even routing, with max_tokens on all ranks: no call takes the rings. Rows that are put."""
    monkeypatch.setenv("DEEP_COMM_RAIL_NEAR", "0")
    num_ranks = shape[0] * shape[1]
    steps = ((40,) * num_ranks,) * 3
    case = LayerCase(
        steps, 40, 6, hidden=256, experts=8 * num_ranks, topk=4, mode="prefill",
        ranks_per_node=shape[1], fp8=fp8,
    )  # fmt: skip

    def main(group: Any) -> None:
        with build(group, case) as layer, torch.no_grad():
            region, engine = layer.buffer._context.region, layer.buffer.runtime
            launches = []
            for step in range(3):
                before = engine.num_launches
                batch = layer.dispatch(*inputs(case, group.rank(), step))
                launches.append(engine.num_launches - before)
                handle = batch.state.handle
                num_rows = handle.num_returning_rows + handle.num_forward_rows
                num_rows += handle.num_tokens * min(case.topk, shape[0] - 1)
                # Combine has a place for each of them.
                assert region.allocate(num_rows * _slot_bytes(layer.shape.row_bytes)) is not None
                layer.combine(batch, batch.map(lambda expert, rows: rows.bfloat16()))
            # None was made twice: what had been reserved was enough. The first call may have
            # reserved for more than ever comes.
            assert launches[1] == launches[2] <= launches[0]
            assert launches[1] == len(("layout", "count", "notify", "move", "number", "expand"))

    local.run(main, num_ranks, timeout_s=60)


def _slot_bytes(row_bytes: int) -> int:
    """Of a row in combine's staging, which the layer sends without weights: whole lines."""
    return -(-row_bytes // 128) * 128


def test_the_tensors_of_a_call_are_as_large_as_estimated() -> None:
    case = LayerCase(((64,) * 4,), 64, 6, hidden=256, experts=16, topk=4)

    def main(group: Any) -> None:
        with build(group, case) as layer, torch.no_grad():
            memory = layer.memory
            batch = layer.dispatch(*inputs(case, group.rank(), 0), mode="prefill")
            # Outputs, sums and results; routing is random, so only about as many as uniform.
            num_received = batch.state.handle.num_recv_tokens
            used = batch.x.nbytes + (num_received + 64) * layer.shape.row_bytes
            assert 0.7 < used / memory.prefill_call < 1.3, (used, memory.prefill_call)
            few = LayerCase(((6,) * 4,), 64, 6, hidden=256, experts=16, topk=4)
            batch = layer.dispatch(*inputs(few, group.rank(), 0), mode="decode")
            used = 2 * batch.x.nbytes
            assert 0.95 < used / memory.decode_call < 1.05, (used, memory.decode_call)

    local.run(main, 4, timeout_s=30)


def test_the_words_name_every_part_and_the_total() -> None:
    memory = ExpertParallel.estimate_memory(8, **SHAPE, decode_tokens=128)
    text = str(memory)
    for words in (
        "8 ranks, 256 experts of hidden size 7168, top-8, bfloat16",
        "up to 4096 tokens per rank",
        "The Buffer holds",
        "for decode calls of up to 128 tokens per rank",
        "A prefill call of 4096 tokens per rank",
        "A decode call makes tensors",
        "GiB",
    ):
        assert words in text, words
    assert memory.buffer == sum(
        (memory.rings, memory.receive_region, memory.low_latency_region, memory.control_words)
    )
    assert memory.total == memory.buffer + max(memory.prefill_call, memory.decode_call)


def test_the_estimate_grows_with_what_it_depends_on() -> None:
    base = ExpertParallel.estimate_memory(8, **SHAPE)
    for change in (dict(max_tokens=8192), dict(hidden=8192), dict(num_topk=9)):
        assert ExpertParallel.estimate_memory(8, **{**SHAPE, **change}).total > base.total, change
    # One rank does not receive more than there is.
    alone = ExpertParallel.estimate_memory(1, **SHAPE)
    assert alone.receive_region < base.receive_region
    fp8 = ExpertParallel.estimate_memory(8, **SHAPE, fp8=True)
    assert fp8.receive_region < 0.6 * base.receive_region
    wide = ExpertParallel.estimate_memory(8, **SHAPE, dtype=torch.float32)
    assert wide.low_latency_region == 0 and wide.receive_region > 1.9 * base.receive_region
    few = ExpertParallel.estimate_memory(8, **{**SHAPE, "max_tokens": 128})
    assert 0 < few.receive_region < base.receive_region  # for prefill, as with gradients
    for wrong in (
        dict(mode="foo"),
        dict(mode="decode", dtype=torch.float32),
        dict(device_type="gpu"),
    ):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            ExpertParallel.estimate_memory(8, **SHAPE, **wrong)
    with pytest.raises(ArgumentError, match="num_ranks"):
        ExpertParallel.estimate_memory(0, **SHAPE)


def test_where_decode_ends_is_preset_alike_for_layer_and_estimate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {**SHAPE, "max_tokens": 128}
    monkeypatch.setenv("DEEP_COMM_DECODE_TOKENS", "16")
    preset = ExpertParallel.estimate_memory(8, **sizes)
    assert preset == ExpertParallel.estimate_memory(8, **sizes, decode_tokens=16)
    monkeypatch.setenv("DEEP_COMM_DECODE_TOKENS", "0")
    with pytest.raises(ArgumentError, match="^DEEP_COMM_DECODE_TOKENS must be at least 1"):
        ExpertParallel.estimate_memory(8, **sizes)


def test_a_layer_whose_steps_all_decode_takes_what_was_estimated() -> None:
    sizes = dict(hidden=64, num_experts=4, num_topk=2, max_tokens=8)

    def main(group: Any) -> None:
        with ExpertParallel(group, **sizes, device="cpu") as layer:
            assert layer.memory == layer.buffer.memory
            estimate = ExpertParallel.estimate_memory(2, **sizes, device_type="cpu")
            assert estimate == layer.memory

    local.run(main, 2)
