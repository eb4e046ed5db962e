"""Steps of a layer: native decode steps against the Buffer's calls, what is refused and by whom,
and what the other ranks are told when."""

from __future__ import annotations

import copy
import threading
from typing import Any

import fake_cuda
import pytest
import torch
from layer_cases import Experts, LayerCase, build, inputs
from layer_spy import Spy, require_same

from deep_comm import local
from deep_comm.errors import ArgumentError
from deep_comm.layer.host_words import HostWords

MODES = [("decode", False), ("auto", False), ("prefill", False), ("prefill", True)]


@pytest.mark.parametrize("idx_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("mode", ["decode", "auto"])
def test_a_step_gives_what_the_buffers_calls_do(mode: str, idx_dtype: torch.dtype) -> None:
    """Also the first one of a layer."""
    case = LayerCase(((3, 0), (8, 1), (1, 8)), 24, 8, idx_dtype=idx_dtype, alignment=2)

    def main(group: Any) -> None:
        with build(group, case) as layer, torch.inference_mode():
            spy, experts = Spy(layer), Experts()
            for step in range(len(case.steps)):
                parts = inputs(case, group.rank(), step)

                def call(parts: Any = parts) -> torch.Tensor:
                    return layer(*parts, experts, mode=mode)

                one = call()
                assert spy.taken() == [True, True]
                spy.is_off = True
                require_same(one, call())
                assert not any(spy.taken())
                spy.is_off = False

    local.run(main, 2, timeout_s=30)


def test_batches_hold_what_the_buffers_calls_give_them() -> None:
    case = LayerCase(((5, 2),), 24, 8)

    def main(group: Any) -> None:
        with build(group, case) as layer, torch.inference_mode():
            parts = inputs(case, group.rank(), 0)
            found: list[Any] = []

            def experts(batch: Any) -> torch.Tensor:
                found.append(batch)
                return batch.x

            layer(*parts, experts, mode="decode")
            spy = Spy(layer)
            spy.is_off = True
            layer(*parts, experts, mode="decode")
            one, other = found
            assert type(one) is type(other) and vars(one).keys() == vars(other).keys()
            for name in ("capacity", "mode", "first_expert", "alignment", "counts"):
                assert getattr(one, name) == getattr(other, name), name
            assert one.x.shape == other.x.shape and one.x.stride() == other.x.stride()
            assert one.scales is None and torch.equal(one.offsets, other.offsets)
            assert torch.equal(one.num_tokens_per_expert, other.num_tokens_per_expert)
            assert torch.equal(one.x[one.mask()], other.x[other.mask()])
            with pytest.raises(AttributeError):
                one.x = other.x  # frozen
            assert "mode=" in repr(one) and copy.copy(one).x is one.x

    local.run(main, 2, timeout_s=30)


@pytest.mark.parametrize(("mode", "bounded"), MODES)
def test_what_breaks_a_rule_is_named_and_nobody_is_told(mode: str, bounded: bool) -> None:
    case = LayerCase(((4,),), 24, 8, experts=4, topk=2)

    def main(group: Any) -> None:
        with build(group, case) as layer, torch.inference_mode():
            layer._steps.use_words(HostWords.create(layer.buffer._context.rendezvous))
            words = layer._steps._host_words
            x, idx, weights = inputs(case, 0, 0)
            options: Any = dict(mode=mode, bounded=bounded)
            want = layer(x, idx, weights, Experts(), **options)
            spy, told = Spy(layer), words.exchange()
            columns = torch.zeros(4, 2 * case.hidden, dtype=x.dtype)
            refused: list[tuple[str, tuple[Any, Any, Any]]] = [
                ("x", (x.float(), idx, weights)),
                ("x", (x[:, :32].contiguous(), idx, weights)),
                ("x", (x[0], idx, weights)),
                ("x", (columns[:, ::2], idx, weights)),
                ("x", ([1], idx, weights)),
                ("x", (x.new_zeros(25, case.hidden), idx.new_zeros(25, 2), weights)),
                ("topk_idx", (x, idx[:3], weights)),
                ("topk_idx", (x, idx.float(), weights)),
                ("topk_idx", (x, None, weights)),
                ("topk_weights", (x, idx, weights.double())),
                ("topk_weights", (x, idx, weights[:, :1].contiguous())),
                ("topk_weights", (x, idx, None)),
            ]
            for name, given in refused:
                with pytest.raises(ArgumentError, match=name):
                    layer(*given, Experts(), **options)
            assert not any(spy.taken()) and words.exchange() == told
            is_native = mode != "prefill"
            for rows in (None, torch.zeros(3, case.hidden, dtype=x.dtype)):
                with pytest.raises(ArgumentError, match="rows"):
                    layer(x, idx, weights, lambda batch, rows=rows: rows, **options)
            with pytest.raises(ArgumentError, match="rows"):
                layer(x, idx, weights, lambda batch: batch.x.float(), **options)
            assert spy.taken() == 3 * [True, False] * is_native
            # Rows that are not contiguous are copied first.
            spread = Experts()
            y = layer(
                torch.nn.Parameter(x, requires_grad=False), idx, weights,
                lambda batch: spread(batch).T.contiguous().T, **options,
            )  # fmt: skip
            assert spy.taken() == [True, False] * is_native
            require_same(y, want)

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
            layer._steps.use_words(HostWords.create(layer.buffer._context.rendezvous))
            words, experts = layer._steps._host_words, Experts()
            parts = inputs(case, 0, 0)
            want = layer(*parts, experts)
            before = layer.rule.num_steps, words.exchange()
            assert before[1] == 1
            log.capturing.update((log.current, 0))  # 0: what native code sees on the host
            captured = layer(*parts, experts)
            log.capturing.clear()
            require_same(captured, want)
            assert (layer.rule.num_steps, words.exchange()) == before
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
                assert layer._steps._host_words is not None
            experts.modes.clear()
            y = layer(*inputs(case, rank, 2), experts)
            assert y.shape[0] == case.steps[2][rank]
            return experts.modes

    monkeypatch.setattr(torch, "empty_strided", empty_or_fail)
    assert local.run(main, 2, timeout_s=30) == [["decode", "prefill"]] * 2
