"""Steps of a layer: what they are made of against the Buffer's calls, what is refused, and what the
other ranks are told when."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
from typing import Any

import fake_cuda
import pytest
import torch
from layer_cases import Experts, LayerCase, build, inputs
from payload import assert_same_bits

import deep_comm
from deep_comm import ExpertBatch, local
from deep_comm.errors import ArgumentError, HandleMismatch
from deep_comm.layer.construction import most_rows
from deep_comm.layer.host_counters import shared_counters

MODES = [("decode", False), ("auto", False), ("prefill", False), ("prefill", True)]


def raw_batch(layer: Any, parts: Any, mode: str, bounded: bool) -> tuple[ExpertBatch, Any]:
    """What a step hands to the experts, of the Buffer's call; and what its combine needs."""
    x, idx, weights = parts
    shape, buffer, calls = layer.shape, layer.buffer, layer._steps.calls
    if mode in ("decode", "auto"):
        recv, counts, handle, _, _ = buffer.low_latency_dispatch(
            x, idx, shape.num_slots, shape.num_experts, use_fp8=shape.fp8, topk_weights=weights
        )
        rows, scales = recv if shape.fp8 else (recv, None)
        offsets = torch.arange(calls.num_local + 1, dtype=torch.int32) * calls.capacity
        batch = ExpertBatch(
            rows.view(-1, shape.hidden),
            None if scales is None else scales.reshape(-1, scales.shape[-1]),
            counts, offsets, None, calls.capacity, "decode", calls.first_expert, 1, handle,
        )  # fmt: skip
        return batch, (handle, idx)
    num_rows = most_rows(shape, buffer.group_size, calls.alignment) if bounded else 0
    recv, _, recv_weights, recv_counts, handle, _ = buffer.dispatch(
        x, topk_idx=idx, topk_weights=weights, num_experts=shape.num_experts, expand=True,
        expert_alignment=calls.alignment, num_worst_tokens=num_rows, zero_padding=True,
        use_fp8=shape.fp8,
    )  # fmt: skip
    rows, scales = recv if shape.fp8 else (recv, None)
    expansion = handle.expansion
    batch = ExpertBatch(
        rows, scales, expansion.expert_counts, expansion.expert_offsets,
        None if bounded else recv_counts, None, "prefill", calls.first_expert, calls.alignment,
        handle,
    )  # fmt: skip
    return batch, (handle, recv_weights)


def raw_sums(layer: Any, mode: str, rows: torch.Tensor, state: Any) -> torch.Tensor:
    handle, given = state
    if mode in ("decode", "auto"):
        rows = rows.view(handle.rows_shape)
        return layer.buffer.low_latency_combine(rows, given, None, handle)[0]
    return layer.buffer.combine(rows, handle, topk_weights=given, apply_weights=True)[0]


def require_same_batch(one: ExpertBatch, other: ExpertBatch) -> None:
    assert type(one) is type(other)
    for name in ("capacity", "mode", "first_expert", "alignment", "counts"):
        assert getattr(one, name) == getattr(other, name), name
    for name in ("offsets", "num_tokens_per_expert"):
        found, want = getattr(one, name), getattr(other, name)
        assert found.dtype == torch.int32 and torch.equal(found, want), name
        assert getattr(one, name) is found  # made once
    is_row = one.mask()
    assert one.x.stride() == other.x.stride()
    assert_same_bits(one.x[is_row], other.x[is_row], "rows")
    assert (one.scales is None) == (other.scales is None)
    if one.scales is not None and other.scales is not None:
        assert_same_bits(one.scales[is_row], other.scales[is_row], "scales")


@pytest.mark.parametrize("form", ["int64", "int32", "fp8", "nodes", "rings"])
@pytest.mark.parametrize(("mode", "bounded"), MODES)
def test_a_step_is_what_the_buffers_calls_make(mode: str, bounded: bool, form: str) -> None:
    """Also the first one of a layer: the batch, what is made of it later, and the sums."""
    case = LayerCase(
        ((3, 0), (8, 1), (1, 8)), 24, 8, hidden=128, fp8=form == "fp8", alignment=2,
        idx_dtype=torch.int32 if form == "int32" else torch.int64,
        ranks_per_node=1 if form == "nodes" else None,
    )  # fmt: skip

    def main(group: Any) -> None:
        with contextlib.ExitStack() as stack:
            options: dict[str, Any] = {}
            if form == "rings":  # outputs are tensors of torch's memory
                options["buffer"] = stack.enter_context(
                    deep_comm.Buffer(
                        group, 32 << 20, 8 << 20, low_latency_mode=True, num_direct_bytes=0,
                        device="cpu", timeout_s=60,
                    )
                )  # fmt: skip
            layer = stack.enter_context(build(group, case, **options))
            stack.enter_context(torch.inference_mode())
            for step in range(len(case.steps)):
                parts, found = inputs(case, group.rank(), step), []

                def experts(batch: Any, found: list[Any] = found) -> torch.Tensor:
                    found.append(batch)
                    return Experts()(batch)

                y = layer(*parts, experts, mode=mode, bounded=bounded)
                batch, state = raw_batch(layer, parts, mode, bounded)
                require_same_batch(found[0], batch)
                want = raw_sums(layer, mode, Experts()(batch), state)
                assert_same_bits(y, want, f"step {step}")
                with layer.dispatch_async(*parts, mode=mode, bounded=bounded) as sent:
                    pass
                require_same_batch(sent.result(), batch)
                with layer.combine_async(sent.result(), Experts()(sent.result())) as sums:
                    pass
                assert_same_bits(sums.result(), want, f"step {step} in halves")

    local.run(main, 2, timeout_s=60)


def test_batches_are_frozen_and_can_be_copied_and_shown() -> None:
    case = LayerCase(((5, 2),), 24, 8)

    def main(group: Any) -> None:
        with build(group, case) as layer, torch.inference_mode():
            for mode in ("decode", "prefill"):
                batch = layer.dispatch(*inputs(case, group.rank(), 0), mode=mode)
                with pytest.raises(AttributeError):
                    batch.x = batch.x  # frozen
                with pytest.raises(AttributeError, match="no_such"):
                    batch.no_such  # noqa: B018
                copied = copy.copy(batch)
                assert f"mode='{mode}'" in repr(copied) and copied.x is batch.x
                assert torch.equal(copied.offsets, batch.offsets)
                changed = dataclasses.replace(batch, x=batch.x * 1)
                assert torch.equal(changed.offsets, batch.offsets)
                layer.combine(changed, changed.x)

    local.run(main, 2, timeout_s=30)


@pytest.mark.usefixtures("poison")
def test_tensors_of_a_prefill_batch_outlive_it() -> None:
    """They lie in blocks that the next calls would take."""
    case = LayerCase(((5, 2), (9, 11)), 24, 8, mode="prefill")

    def main(group: Any) -> None:
        with build(group, case) as layer, torch.inference_mode():
            batch = layer.dispatch(*inputs(case, group.rank(), 0))
            counts, offsets = batch.num_tokens_per_expert, batch.offsets
            weights = batch.state.weights
            kept = [each.clone() for each in (counts, offsets, weights)]
            rows = Experts()(batch)
            layer.combine(batch, rows)
            del batch
            for _ in range(4):
                layer(*inputs(case, group.rank(), 1), Experts())
            for now, then in zip((counts, offsets, weights), kept, strict=True):
                assert torch.equal(now, then)

    local.run(main, 2, timeout_s=30)


@pytest.mark.parametrize(("mode", "bounded"), MODES)
def test_what_breaks_a_rule_is_named_and_nobody_is_told(mode: str, bounded: bool) -> None:
    case = LayerCase(((4,),), 24, 8, experts=4, topk=2)

    def main(group: Any) -> None:
        with build(group, case) as layer, torch.inference_mode():
            layer._steps.use_counters(shared_counters(layer.buffer._context.rendezvous))
            counters = layer._steps._host_counters
            x, idx, weights = inputs(case, 0, 0)
            options: Any = dict(mode=mode, bounded=bounded)
            want = layer(x, idx, weights, Experts(), **options)
            told = counters.exchange()
            columns = torch.zeros(4, 2 * case.hidden, dtype=x.dtype)
            rows_rule = "must be [tokens, 64] of torch.bfloat16"
            idx_rule = "must be [tokens, 2] (num_topk)"
            refused: list[tuple[tuple[Any, Any, Any], tuple[str, Any, str]]] = [
                ((x.float(), idx, weights), ("x", "[4, 64] of torch.float32", rows_rule)),
                ((x[:, :32], idx, weights), ("x", "[4, 32] of torch.bfloat16", rows_rule)),
                ((x[0], idx, weights), ("x", "[64] of torch.bfloat16", rows_rule)),
                ((columns[:, ::2], idx, weights), ("x", "strides (128, 2)", "must be contiguous")),
                (([1], idx, weights), ("x", "list", "must be a tensor")),
                (
                    (x.new_zeros(25, case.hidden), idx.new_zeros(25, 2), weights),
                    ("x", "25 tokens", "must have at most 24 (max_tokens)"),
                ),
                ((x, idx[:3], weights), ("topk_idx", [3, 2], "must have shape [4, top-k]")),
                ((x, idx[:, :1], weights), ("topk_idx", [4, 1], idx_rule)),
                # In "auto" ranks of another top-k would ask in calls of another shape.
                ((x, idx.repeat(1, 2), weights.repeat(1, 2)), ("topk_idx", [4, 4], idx_rule)),
                ((x, idx[0], weights), ("topk_idx", [2], idx_rule)),
                (
                    (x, idx.float(), weights),
                    ("topk_idx", torch.float32, "must have dtype torch.int64 or torch.int32"),
                ),
                ((x, None, weights), ("topk_idx", "NoneType", "must be a tensor")),
                (
                    (x, idx, weights.double()),
                    ("topk_weights", torch.float64, "must have dtype torch.float32"),
                ),
                (
                    (x, idx, weights[:, :1].contiguous()),
                    ("topk_weights", [4, 1], "must have shape [4, 2]"),
                ),
                ((x, idx, None), ("topk_weights", "NoneType", "must be a tensor")),
                ((x, idx, weights.tolist()), ("topk_weights", "list", "must be a tensor")),
            ]
            unused = Experts()
            if mode == "decode":
                nine = x.new_zeros(9, case.hidden), idx.new_zeros(9, 2), weights.new_zeros(9, 2)
                rule = "must have at most 8 (decode_tokens) in a decode step or in a captured one"
                refused.append((nine, ("x", "9 tokens", rule)))
            for given, (name, value, rule) in refused:
                for call in (layer.dispatch, layer.dispatch_async):
                    with pytest.raises(ArgumentError) as caught:
                        call(*given, **options)
                    error = caught.value
                    assert (error.argument, error.value, error.rule) == (name, value, rule)
                with pytest.raises(ArgumentError, match=name):
                    layer(*given, unused, **options)
            assert unused.modes == [] and counters.exchange() == told
            wrong: list[Any] = [None, torch.zeros(3, case.hidden, dtype=x.dtype), x.double()]
            for rows in wrong:
                with pytest.raises(ArgumentError) as caught:
                    layer(x, idx, weights, lambda batch, rows=rows: rows, **options)
                error = caught.value
                shown = "NoneType"
                if rows is not None:
                    shown = f"{list(rows.shape)} of {rows.dtype}"
                assert (error.argument, error.value) == ("rows", shown)
                assert error.rule.startswith("must be what experts made of the batch: [")
                assert error.rule.endswith(", 64] of torch.bfloat16")
            # Rows that are not contiguous are copied first.
            spread = Experts()
            y = layer(
                torch.nn.Parameter(x, requires_grad=False), idx, weights,
                lambda batch: spread(batch).T.contiguous().T, **options,
            )  # fmt: skip
            assert_same_bits(y, want, "rows by column")

    local.run(main, 1, timeout_s=30)


def test_a_shared_buffers_other_forms_are_not_the_layers() -> None:
    """Rows of another dtype and hidden size, which the Buffer has taken before."""
    case = LayerCase(((4,),), 24, 8, experts=4, topk=2, mode="prefill")
    wide = LayerCase(((4,),), 24, 8, experts=4, topk=2, hidden=128, mode="prefill")

    def main(group: Any) -> None:
        with build(group, case) as layer, torch.inference_mode():
            with build(group, wide, buffer=layer.buffer) as other:
                for _ in range(2):
                    other(*inputs(wide, 0, 0), Experts())
                    layer(*inputs(case, 0, 0), Experts())
                x, idx, weights = inputs(case, 0, 0)
                for given in (x.float(), x.repeat(1, 2)):
                    with pytest.raises(ArgumentError, match="x"):
                        layer(given, idx, weights, Experts())
                batch = layer.dispatch(x, idx, weights)
                for rows in (batch.x.float(), batch.x.repeat(1, 2)):
                    with pytest.raises(ArgumentError, match="rows"):
                        layer.combine(batch, rows)

    local.run(main, 1, timeout_s=30)


def test_a_captured_step_of_auto_asks_nobody() -> None:
    case = LayerCase(((4,),), 24, 8, experts=4, topk=2)

    def main(group: Any, log: Any) -> None:
        with build(group, case) as layer, torch.inference_mode():
            layer._steps.use_counters(shared_counters(layer.buffer._context.rendezvous))
            counters, experts = layer._steps._host_counters, Experts()
            parts = inputs(case, 0, 0)
            want = layer(*parts, experts)
            before = layer.rule.num_steps, counters.exchange()
            assert before[1] == 1
            log.capturing.update((log.current, 0))  # 0: what native code sees on the host
            captured = layer(*parts, experts)
            log.capturing.clear()
            assert_same_bits(captured, want, "captured")
            assert (layer.rule.num_steps, counters.exchange()) == before
            assert set(experts.modes) == {"decode"}

    with fake_cuda.installed() as log:
        local.run(lambda group: main(group, log), 1, timeout_s=30)


def test_a_step_that_raises_before_its_launch_has_told_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 has no memory for its few tokens, and comes again with too many: had the others been
    told of the few, they would not follow with prefill."""
    case = LayerCase(((2, 2), (2, 2), (20, 2)), 24, 8)
    has_memory = [True, True]
    ranks: dict[int, int] = {}  # by thread
    empty = torch.empty_strided

    def empty_or_fail(*form: Any, **options: Any) -> Any:
        if not has_memory[ranks.get(threading.get_ident(), 0)]:
            raise MemoryError("no memory")
        return empty(*form, **options)

    def main(group: Any) -> list[str]:
        rank = group.rank()
        ranks[threading.get_ident()] = rank
        with build(group, case, timeout_s=10) as layer, torch.inference_mode():
            experts = Experts()
            for step in range(2):
                y = layer(*inputs(case, rank, step), experts)
            if rank == 0:
                has_memory[0] = False
                with pytest.raises(MemoryError):
                    layer(*inputs(case, 0, 1), experts)
                has_memory[0] = True
            else:
                assert layer._steps._host_counters is not None
            experts.modes.clear()
            y = layer(*inputs(case, rank, 2), experts)
            assert y.shape[0] == case.steps[2][rank]
            return experts.modes

    monkeypatch.setattr(torch, "empty_strided", empty_or_fail)
    assert local.run(main, 2, timeout_s=30) == [["decode", "prefill"]] * 2


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_a_batch_of_a_layer_of_another_shape_is_refused(mode: str) -> None:
    case = LayerCase(((4, 3),), 8, 8)

    def fn(group: Any) -> None:
        with contextlib.ExitStack() as stack, torch.no_grad():
            layer, same, fewer, turned, prefills = (
                stack.enter_context(build(each, dataclasses.replace(case, **change)))
                for each, change in (
                    (group, {}),
                    (group, {}),
                    (group, dict(experts=4, topk=1)),
                    (group.subgroup([1, 0]), {}),
                    (group, dict(mode="prefill")),
                )
            )
            batch = layer.dispatch(*inputs(case, layer.buffer.rank, 0), mode=mode)
            refused = [
                (fewer, "batch must be of a layer with top-1 of 4 experts; got one of top-2 of 8"),
                (turned, "handle must be of this rank"),
            ]
            if mode == "decode":
                refused.append((prefills, "batch must be a prefill batch.*got a decode batch"))
            for other, match in refused:
                for combine in (other.combine, other.combine_async):
                    with pytest.raises(HandleMismatch, match=match):
                        combine(batch, batch.x)
            expected = layer.combine(batch, batch.x)
            assert_same_bits(same.combine(batch, batch.x), expected, "another of the same shape")

    local.run(fn, 2, timeout_s=60)


@pytest.mark.parametrize("given", [None, torch.zeros(2), ("batch",)])
def test_what_is_no_batch_is_named(given: Any) -> None:
    case = LayerCase(((4,),), 8, 8)

    def fn(group: Any) -> None:
        with build(group, case) as layer, torch.no_grad():
            batch = layer.dispatch(*inputs(case, 0, 0))
            for combine in (layer.combine, layer.combine_async):
                with pytest.raises(ArgumentError, match=f"got a {type(given).__name__}") as caught:
                    combine(given, batch.x)
                assert caught.value.argument == "batch"
            layer.combine(batch, batch.x)

    local.run(fn, 1, timeout_s=60)


@pytest.mark.parametrize("num_experts", [10**7, (56 << 10) + 1, 0, "8"])
def test_more_experts_than_kernels_count_are_named_as_given(num_experts: Any) -> None:
    case = LayerCase(((4,),), 8, 8, experts=num_experts)
    given = "got '8' of type str" if num_experts == "8" else f"got {num_experts}"
    with pytest.raises(ArgumentError, match=f"^num_experts must be .*{given}"):
        local.run(lambda group: build(group, case), 1, timeout_s=60)
    with pytest.raises(ArgumentError, match="^num_max_experts must be"):
        deep_comm.Buffer(None, 1 << 20, num_max_experts=num_experts, device="cpu")
