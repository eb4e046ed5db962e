"""Prefill steps of a layer that are two native ones: what they give and keep, and what is left to
Python."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import random
import weakref
from typing import Any

import fake_cuda
import pytest
import torch
from deep_comm.layer.quick_prefill import NEVER
from layer_cases import Experts, LayerCase, build, inputs
from layer_spy import Spy, require_same

import deep_comm
from deep_comm import ExpertIndexError, HandleMismatch, PeerTimeout, _core, defaults, local
from deep_comm.layer.by_steps import by_steps
from deep_comm.layer.prefill import ExpandedPrefill

CASE = LayerCase(((5, 2),), 24, 8, mode="prefill", alignment=2)
WAYS = [("prefill", False), ("prefill", True), ("auto", False)]


def ready(layer: Any, parts: Any, bounded: bool = False, **options: Any) -> None:
    """The forms of a step are known."""
    for _ in range(2):
        layer(*parts, Experts(), bounded=bounded, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("mode", "bounded"), WAYS)
def test_dispatch_and_combine_apart_are_native(
    mode: str, bounded: bool, dtype: torch.dtype
) -> None:
    case = LayerCase(((20, 3), (9, 24)), 96, 8, mode=mode, dtype=dtype)  # room for two batches

    def main(group: Any) -> None:
        with build(group, case, max_recv_rows=90) as layer, torch.no_grad():
            spy, experts, slow = Spy(layer), Experts(), by_steps(layer)
            for step in range(len(case.steps)):
                parts = inputs(case, group.rank(), step)
                ready(layer, parts, bounded)
                spy.taken()
                batch = layer.dispatch(*parts, bounded=bounded)
                y = layer.combine(batch, experts(batch))
                assert spy.taken() == [True, True]
                before = vars_of(layer.rule)
                require_bits(y, slow(*parts, experts, bounded=bounded))
                # The rule has learned as much of either.
                learned = vars_of(layer.rule)["num_steps"] - before["num_steps"]
                layer.combine(*one_of(layer.dispatch(*parts, bounded=bounded), experts))
                assert vars_of(layer.rule)["num_steps"] - before["num_steps"] == 2 * learned
                assert learned == (mode == "auto")
                # A batch of many steps goes home in one, and the other way round.
                batch = slow.dispatch(*parts, bounded=bounded)
                spy.taken()
                require_bits(layer.combine(batch, experts(batch)), y)
                assert spy.taken() == [True]
                batch = layer.dispatch(*parts, bounded=bounded)
                require_bits(slow.combine(batch, experts(batch)), y)

    local.run(main, 2, timeout_s=60)


def vars_of(rule: Any) -> dict[str, int]:
    return {name: getattr(rule, name) for name in type(rule).__slots__}


def one_of(batch: Any, experts: Any) -> tuple[Any, Any]:
    return batch, experts(batch)


def require_bits(one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def test_auto_learns_from_native_steps_what_it_learns_from_others() -> None:
    """Many tokens, few, many: the rule's numbers after each step, and the modes."""
    case = LayerCase(((3, 20), (24, 1), (8, 7), (2, 8), (9, 0), (1, 1)), 24, 8)

    def main(group: Any) -> None:
        with build(group, case) as layer, torch.no_grad():
            slow = by_steps(layer)
            for step in range(len(case.steps)):
                ready(layer, inputs(case, group.rank(), step))
            spy = Spy(layer)
            found: list[Any] = []
            for way in (layer, slow):
                layer.rule.begin_anew()
                ready(way, inputs(case, group.rank(), 0))  # begins with prefill from here on
                spy.taken()
                taken = []
                for step in range(len(case.steps)):
                    experts = Experts()
                    y = way(*inputs(case, group.rank(), step), experts)
                    taken.append((vars_of(layer.rule), experts.modes, y, spy.taken()))
                found.append(taken)
            for one, other in zip(*found, strict=True):
                assert one[:2] == other[:2]
                require_same(one[2], other[2])
            # Steps 0, 1, 2 begin with prefill, 3 with decode, 4 goes on with prefill, which is done
            # step by step, and 5 begins with prefill.
            for step in (0, 1, 2, 5):
                assert found[0][step][1] == ["prefill"] and found[0][step][3] == [True, True]

    local.run(main, 2, timeout_s=60)


@pytest.mark.parametrize("bounded", [False, True])
def test_a_native_steps_handle_is_that_of_many_steps(bounded: bool) -> None:
    def main(group: Any) -> None:
        with build(group, CASE, max_recv_rows=40) as layer, torch.no_grad():
            parts = inputs(CASE, group.rank(), 0)
            ready(layer, parts, bounded)
            slow = by_steps(layer)
            one, other = (way.dispatch(*parts, bounded=bounded) for way in (layer, slow))
            assert type(one.state) is type(other.state)
            with pytest.raises(AttributeError):
                _ = one.state.no_such_field
            ours, theirs = one.state.handle, other.state.handle
            assert one.state.handle is ours
            for entry in dataclasses.fields(ours):
                if entry.name not in ("_known", "expansion"):
                    require_equal(getattr(ours, entry.name), getattr(theirs, entry.name))
            num_tokens = int(ours.num_recv_tokens_tensor)
            for entry in dataclasses.fields(ours.expansion):
                rows = getattr(ours.expansion, entry.name), getattr(theirs.expansion, entry.name)
                if entry.name == "recv_rows":
                    rows = rows[0][:num_tokens], rows[1][:num_tokens]
                require_equal(*rows)
            # Cached calls along it, copies, and gradients, which all take the handle.
            again = layer.buffer.dispatch(parts[0], handle=ours, zero_padding=True)[0]
            assert torch.equal(again[one.mask()], one.x[one.mask()])
            y = layer.combine(one, one.x)
            for same in (copy.deepcopy(one), pickle.loads(pickle.dumps(one)), copy.copy(one)):
                require_same(layer.combine(same, one.x), y)
            rows = one.x.clone().requires_grad_()
            with torch.enable_grad():
                layer.combine(one, rows).sum().backward()
            assert rows.grad is not None and rows.grad.shape == rows.shape

    local.run(main, 2, timeout_s=60)


def require_equal(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    else:
        assert one == other


def test_a_batch_keeps_its_memory_and_no_buffer() -> None:
    def main(group: Any) -> None:
        layer = build(group, CASE)
        parts = inputs(CASE, 0, 0)
        with torch.no_grad():
            ready(layer, parts)
            gc.collect()
            free = layer.buffer._context.region.num_free_bytes
            batch = layer.dispatch(*parts)
            rows = batch.x.clone()
            for _ in range(3):  # what is free is written
                layer(*parts, lambda other: torch.zeros_like(other.x))
            assert torch.equal(batch.x, rows)
            y = layer.combine(batch, batch.x)
            state = batch.state
            del batch
            rows_only = layer.buffer._context.region.num_free_bytes
            assert rows_only < free  # the weights are in the block of the rows
            require_same(
                layer.combine(dataclasses.replace(again(layer, parts), state=state), rows), y
            )
            del state
            assert layer.buffer._context.region.num_free_bytes == free
            batch = layer.dispatch(*parts)
            alive = weakref.ref(layer.buffer)
            layer.destroy()
            del layer
            gc.collect()
            assert alive() is None and batch.state.handle.num_topk == CASE.topk

    local.run(main, 1, timeout_s=60)


def again(layer: Any, parts: Any) -> Any:
    return layer.dispatch(*parts)


class Tagged(torch.Tensor):
    pass


def test_what_a_native_step_does_not_take() -> None:
    """Each is left to Python, whole, and gives what it gave, or the error that it gave."""

    def main(group: Any) -> None:
        with build(group, CASE) as layer:
            x, idx, weights = parts = inputs(CASE, group.rank(), 0)
            with torch.no_grad():
                ready(layer, parts)
                want = layer(*parts, Experts())
                spy = Spy(layer)
                # A dispatch that is sent and not received: operations are one behind the other.
                pending = layer.dispatch_async(*parts)
                assert layer._steps._begin_prefill(*parts, False, False) is None
                spy.taken()
                require_same(layer(*parts, Experts()), want)
                assert spy.taken() == [False, True]
                batch = pending.result()
                require_same(layer.combine(batch, Experts()(batch)), want)
                assert spy.taken() == [True]
                # A bound that is no boolean; a tensor of a class of somebody's.
                require_same(layer(*parts, Experts(), bounded=0), want)  # type: ignore[arg-type]
                y = layer(x.as_subclass(Tagged), idx, weights, Experts())
                require_same(y.as_subclass(torch.Tensor), want)
                assert spy.taken() == [False, True] * 2
            # Gradients, whether or not they are wanted.
            layer(x.clone().requires_grad_(), idx, weights, lambda batch: batch.x).sum().backward()
            batch = layer.dispatch(*parts)
            assert layer.combine(batch, batch.x).shape == x.shape
            assert spy.taken() == []

    local.run(main, 2, timeout_s=60)


def test_batches_of_another_buffer_or_reset_are_refused() -> None:
    def main(group: Any) -> None:
        with build(group, CASE) as layer, build(group, CASE) as other, torch.no_grad():
            parts = inputs(CASE, group.rank(), 0)
            ready(layer, parts)
            ready(other, parts)
            batch = layer.dispatch(*parts)
            spy = Spy(other)
            assert other._steps._end_prefill(batch.x, batch.state) is None
            # Handles say nothing of their Buffer but its ranks, so that Python takes it.
            other.combine(batch, batch.x)
            assert spy.taken() == [False, False]

    local.run(main, 2, timeout_s=60)


def test_handles_of_before_a_reset_without_ranks_are_refused() -> None:
    def main(group: Any) -> Any:
        with build(group, CASE, timeout_s=3) as layer, torch.no_grad():
            parts = inputs(CASE, group.rank(), 0)
            ready(layer, parts)
            batch = layer.dispatch(*parts)
            group.barrier()
            if group.rank() == 1:
                return None
            with pytest.raises(PeerTimeout):  # of the native step: rank 1 is gone
                layer(*parts, Experts())
            assert layer._steps._begin_prefill(*parts, False, False) is None
            layer.reset(without=[1])
            with pytest.raises(HandleMismatch):
                layer.combine(batch, batch.x)
            ready(layer, parts)
            spy = Spy(layer)
            layer(*parts, Experts())
            assert spy.taken() == [True, True]
        return None

    local.run(main, 2, timeout_s=60)


def test_errors_of_kernels_are_raised_by_the_step_that_waits() -> None:
    def main(group: Any) -> None:
        with build(group, CASE) as layer, torch.no_grad():
            x, idx, weights = parts = inputs(CASE, group.rank(), 0)
            ready(layer, parts)
            want = layer(*parts, Experts())
            bad = idx.clone()
            if group.rank() == 0:
                bad[1, 1] = CASE.experts
            spy = Spy(layer)
            with pytest.raises(ExpertIndexError):
                layer(x, bad, weights, Experts())
            spy.taken()
            require_same(layer(*parts, Experts()), want)
            assert spy.taken() == [True, True]
        with torch.no_grad(), pytest.raises(deep_comm.BufferDestroyed):
            layer(*parts, Experts())
        assert spy.taken() == [False]

    local.run(main, 2, timeout_s=60)


@pytest.mark.parametrize("mode", ["prefill", "auto"])
def test_rows_that_found_no_room_are_moved_step_by_step(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens of all ranks come to one, after steps of few tokens."""
    case = LayerCase(((1, 9), (24, 24), (24, 24)), 24, 8, mode=mode, alignment=2)
    unmoved: list[int] = []
    finish = ExpandedPrefill._finish_unmoved

    def counted(self: Any, *given: Any) -> Any:
        unmoved.append(self._buffer.rank)
        return finish(self, *given)

    monkeypatch.setattr(ExpandedPrefill, "_finish_unmoved", counted)

    def main(group: Any) -> None:
        with build(group, case) as layer, torch.no_grad():
            spy, slow = Spy(layer), by_steps(layer)
            ready(layer, inputs(case, group.rank(), 0))
            unmoved.clear()
            group.barrier()
            for step, moves in ((1, False), (2, True)):
                x, _, weights = inputs(case, group.rank(), step)
                idx = torch.arange(case.topk).expand(len(x), -1).contiguous()
                spy.taken()
                before = vars_of(layer.rule)["num_steps"]
                y = layer(x, idx, weights, Experts())
                assert spy.taken()[0]
                assert vars_of(layer.rule)["num_steps"] - before == (mode == "auto")
                group.barrier()
                assert sorted(unmoved) == ([0, 1] if not moves else [])
                group.barrier()
                unmoved.clear()
                require_same(y, slow(x, idx, weights, Experts()))

    local.run(main, 2, timeout_s=60)


def test_a_program_that_chooses_other_sms_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        defaults.DefaultConfigs,
        "_default_config",
        lambda self, recommended: deep_comm.Config(2 * self.num_sms, 4, 16),
    )

    def main(group: Any) -> None:
        with build(group, CASE) as layer, torch.no_grad():
            parts = inputs(CASE, group.rank(), 0)
            spy = Spy(layer)
            for num_sms in (1, 2, 1):
                layer.buffer.num_sms = num_sms
                ready(layer, parts)
                spy.taken()
                batch = layer.dispatch(*parts)
                layer.combine(batch, batch.x)
                assert spy.taken() == [True, True]
                assert batch.state.handle.num_channels == 2 * num_sms

    local.run(main, 2, timeout_s=60)


def test_layers_without_native_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(group: Any, case: LayerCase, wanted: list[bool]) -> None:
        with build(group, case) as layer, torch.no_grad():
            parts = inputs(case, group.rank(), 0)
            spy = Spy(layer)
            for _ in range(3):
                spy.taken()
                layer(*parts, lambda batch: torch.zeros_like(batch.x, dtype=torch.bfloat16))
            assert spy.taken() == wanted
            if wanted == [False, False]:
                assert layer._steps.transport.prefill.calls(layer.rule) is NEVER

    fp8 = dataclasses.replace(CASE, fp8=True, hidden=128)
    nodes = dataclasses.replace(CASE, ranks_per_node=1)
    local.run(lambda group: main(group, fp8, [False, True]), 2, timeout_s=60)
    local.run(lambda group: main(group, nodes, [False, False]), 2, timeout_s=60)
    monkeypatch.setenv("DEEP_COMM_POISON", "1")
    local.run(lambda group: main(group, CASE, [False, False]), 2, timeout_s=60)


def test_captures_and_other_streams_are_left_to_python() -> None:
    case = dataclasses.replace(CASE, steps=((5,),))

    def main(group: Any, log: Any) -> None:
        with build(group, case) as layer, torch.no_grad():
            parts = inputs(case, 0, 0)
            ready(layer, parts)
            ready(layer, parts, bounded=True)
            want = layer(*parts, Experts())
            batch = layer.dispatch(*parts)
            rows = Experts()(batch)
            spy, launched = Spy(layer), layer.buffer.runtime.num_launches
            log.capturing.add(log.current)
            for bounded in (False, True):
                assert layer._steps._begin_prefill(*parts, bounded, False) is None
            assert layer._steps._end_prefill(rows, batch.state) is None
            log.capturing.clear()
            assert layer.buffer.runtime.num_launches == launched
            home, log.current = log.current, 33
            spy.taken()
            require_same(layer.combine(batch, rows), want)
            assert spy.taken() == [False]  # torch is told who uses the numbering
            require_same(layer(*parts, Experts()), want)
            assert spy.taken() == [True, True]
            log.current = home

    with fake_cuda.installed() as log:
        local.run(lambda group: main(group, log), 1, timeout_s=60)


def test_expected_rows_leave_room_for_what_came() -> None:
    choose = random.Random(5)
    for _ in range(300):
        num_ranks, tokens, places = (
            choose.randint(1, 64),
            choose.randint(0, 99),
            choose.randint(1, 9),
        )
        experts, alignment = choose.randint(1, 512), choose.choice((1, 16, 128))
        most = choose.choice((0, choose.randint(1, 5000)))
        num_local = -(-experts // num_ranks)
        padding = num_local * (alignment - 1)
        even = -(-num_ranks * tokens * places * num_local // experts)
        alike = even + even // 4 + padding
        likely = most + most // 8 if most else 2 * even + padding
        choices = _core.expanded_choices(
            num_ranks=num_ranks, most_rows=most, num_tokens=tokens, places=places,
            num_experts=experts, expert_alignment=alignment,
        )  # fmt: skip
        assert [*choices] == [max(likely, alike), alike]
