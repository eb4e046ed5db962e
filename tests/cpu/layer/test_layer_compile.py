"""ExpertParallel in torch.compile graphs without breaks: opaque operators with shapes known to
the compiler.

Ranks are processes: the compiler is not made for ranks that are threads.
"""

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from compiled_layer import (
    equals_eager,
    gradients,
    parts_of,
    scaled,
    scaled_in_tiles,
    scaled_masked,
    unused_result,
)
from layer_cases import LayerCase, build, inputs
from payload import assert_same_bits
from torch import Tensor

from deep_comm import ArgumentError, local, processes
from deep_comm.layer import ops

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
SLOW = [needs_compiler, pytest.mark.slow, pytest.mark.timeout(600)]
BACKENDS = [pytest.param("aot_eager"), pytest.param("inductor", marks=SLOW)]


def backends_and(*modes: str, inductor: tuple[str, ...]) -> list[Any]:
    """Inductor compiles C++ for every shape that it tells apart: only the modes named."""
    quick = [pytest.param("aot_eager", mode) for mode in modes]
    return quick + [pytest.param("inductor", mode, marks=SLOW) for mode in inductor]


@pytest.fixture(scope="module")
def pool() -> Iterator[processes.Pool]:
    """To import torch and its compiler takes longer than to compile: once for all tests."""
    with processes.Pool() as pool:
        yield pool


def afresh(group: Any, fn: Any, *args: object) -> Any:
    torch.compiler.reset()
    return fn(group, *args)


@pytest.fixture
def on_ranks(pool: processes.Pool, tmp_path: Path) -> Callable[..., list[Any]]:
    """Compilers' caches know nothing of how our operators are registered: a fresh one a test."""
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def run(fn: Any, num_ranks: int, *args: object) -> list[Any]:
        return pool.run(afresh, num_ranks, fn, *args, timeout_s=500, variables=variables)

    return run


@pytest.mark.parametrize(
    ("backend", "mode"),
    backends_and("prefill", "decode", "auto", inductor=("auto",)),
)
def test_a_compiled_step_gives_the_bits_of_an_eager_one(
    backend: str, mode: str, on_ranks: Callable[..., list[Any]]
) -> None:
    """Ranks without tokens among them: their results are empty, and take part all the same."""
    case = LayerCase(((3, 1), (2, 4), (9, 0), (1, 2), (0, 3)), 9, 4, experts=6, mode=mode)
    if mode == "decode":
        case = LayerCase(((3, 1), (2, 4), (4, 0), (0, 2)), 4, 4, experts=6, mode=mode)
    results = on_ranks(equals_eager, 2, case, backend)
    assert results[0] == results[1]
    if mode == "auto":
        assert results[0] == [False, False, True, False, False]


def compiled_gradients(group: Any, backend: str) -> None:
    case = LayerCase(((3, 1), (2, 0), (5, 6)), 8, 4, hidden=32, experts=6, mode="prefill")
    with build(group, case) as layer:
        factor = torch.full((32,), 1.5, dtype=case.dtype, requires_grad=True)

        def step(x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
            return layer(x * factor, idx, weights, scaled_in_tiles)

        compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
        for number in range(len(case.steps)):
            grads = []
            for run in (step, compiled):
                factor.grad = None
                grads.append(gradients(run, parts_of(group, case, number, "cpu")))
                grads[-1].append(factor.grad.clone())
            *eager, eager_factor = grads[0]
            *traced, traced_factor = grads[1]
            for name, want, got in zip(("y", "x", "weights"), eager, traced, strict=True):
                assert_same_bits(got, want, f"step {number}: {name}")
            if backend == "inductor":  # a sum of products, which inductor does not round one by one
                torch.testing.assert_close(traced_factor, eager_factor, rtol=2e-2, atol=0.1)
            else:
                assert_same_bits(traced_factor, eager_factor, f"step {number}: factor")
        assert len(ops._states) <= 1  # the last step's, until its graph goes


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_a_compiled_step_have_the_bits_of_an_eager_one(
    backend: str, on_ranks: Callable[..., list[Any]]
) -> None:
    on_ranks(compiled_gradients, 2, backend)


@pytest.mark.parametrize(
    ("backend", "mode"), backends_and("prefill", "decode", inductor=("decode",))
)
def test_a_call_whose_result_is_not_used_is_made_and_in_its_turn(
    backend: str, mode: str, on_ranks: Callable[..., list[Any]]
) -> None:
    case = LayerCase(((3, 2), (4, 4)), 4, 4, experts=6, mode=mode)
    on_ranks(unused_result, 2, case, backend)


def decode_has_no_gradients(group: Any) -> None:
    case = LayerCase(((3,),), 4, 4, experts=6, mode="decode")
    with build(group, case) as layer:
        step = torch.compile(
            lambda *parts: layer(*parts, scaled_masked), backend="aot_eager", fullgraph=True
        )
        x, idx, weights = inputs(case, 0, 0)
        with pytest.raises(Exception, match="no gradients"):
            step(x.requires_grad_(), idx, weights)


def test_a_compiled_decode_step_refuses_gradients(on_ranks: Callable[..., list[Any]]) -> None:
    on_ranks(decode_has_no_gradients, 1)


def operators_pass_opcheck(group: Any) -> None:
    case = LayerCase(((5,),), 8, 8, hidden=32, experts=4, dtype=torch.bfloat16, mode="prefill")
    with build(group, case) as layer:
        x, idx, weights = inputs(case, 0, 0)
        x.requires_grad_()
        weights.requires_grad_()
        utilities = ("test_schema", "test_faketensor", "test_autograd_registration")
        arguments = (x, idx, weights, layer._key, "prefill", False)
        torch.library.opcheck(ops.ep_dispatch, arguments, test_utils=utilities[:2])
        state = ops.ep_dispatch(*arguments)
        with torch.no_grad():
            rows, _, received, _, _ = ops.ep_rows(x, idx, weights, state, layer._key, "prefill")
        rows, received = rows.clone().requires_grad_(), received.clone().requires_grad_()
        torch.library.opcheck(
            ops.ep_combine, (rows, received, idx, state, layer._key), test_utils=utilities
        )
        # Fetched again and again, which real graphs must not.
        kept = ops._kept(state)
        kept.batch = layer.dispatch(x.detach(), idx, weights.detach())
        ops._Kept.take = lambda self: self.batch
        torch.library.opcheck(
            ops.ep_rows,
            (x.detach(), idx, weights.detach(), state, layer._key, "prefill"),
            test_utils=utilities[:2],
        )
        rows, received = rows.detach(), received.detach()
        torch.library.opcheck(
            ops.ep_dispatch_grads,
            (rows, received, idx, state, layer._key),
            test_utils=utilities[:2],
        )
        torch.library.opcheck(
            ops.ep_combine_grads, (x.detach(), rows, received, state, layer._key),
            test_utils=utilities[:2],
        )  # fmt: skip


def test_operators_keep_to_the_rules_of_custom_operators() -> None:
    forked.run(operators_pass_opcheck, 1)


def rows_are_handed_out_once(group: Any) -> None:
    case = LayerCase(((5,),), 8, 8, mode="prefill")
    with build(group, case) as layer, torch.no_grad():
        parts = inputs(case, 0, 0)
        state = ops.ep_dispatch(*parts, layer._key, "prefill", False)
        ops.ep_rows(*parts, state, layer._key, "prefill")
        with pytest.raises(RuntimeError, match="twice"):
            ops.ep_rows(*parts, state, layer._key, "prefill")


def test_rows_of_a_batch_are_handed_out_once(on_ranks: Callable[..., list[Any]]) -> None:
    on_ranks(rows_are_handed_out_once, 1)


def state_dies(group: Any) -> None:
    case = LayerCase(((5,),), 8, 8, mode="prefill")
    with build(group, case) as layer, torch.no_grad():
        before = len(ops._states)
        state = ops.ep_dispatch(*inputs(case, 0, 0), layer._key, "prefill", False)
        view = state.view(1)
        del state
        assert len(ops._states) == before + 1
        del view
        assert len(ops._states) == before
        key = layer._key
    with pytest.raises(RuntimeError, match="outlived"):
        del layer
        ops._layer(key)


def test_the_state_of_a_batch_lives_as_long_as_its_tensor(
    on_ranks: Callable[..., list[Any]],
) -> None:
    on_ranks(state_dies, 1)


def test_a_traced_call_refuses_what_an_eager_one_refuses() -> None:
    """A mode that is none was prefill to it."""
    case = LayerCase(((2,),), 9, 4)

    def main(group: Any) -> None:
        with build(group, case) as layer:
            for options, name in (((case.mode, True), "bounded"), (("Prefill", False), "mode")):
                with pytest.raises(ArgumentError, match=f"^{name} "):
                    ops.traced_forward(layer, *inputs(case, 0, 0), scaled, *options)

    local.run(main, 1)


@pytest.mark.parametrize("part", ["x", "topk_weights"])
def test_a_traced_call_refuses_gradients_of_fp8_rows(part: str) -> None:
    case = LayerCase(((2,),), 9, 4, hidden=128, fp8=True, mode="prefill")

    def main(group: Any) -> None:
        with build(group, case) as layer:
            given = inputs(case, 0, 0)
            given[0 if part == "x" else 2].requires_grad_()
            for call in (layer.forward, functools.partial(ops.traced_forward, layer)):
                with pytest.raises(ArgumentError, match=f"^{part} must not require a gradient"):
                    call(*given, scaled, mode="prefill", bounded=False)

    local.run(main, 1)


def test_a_traced_call_refuses_decode_of_a_layer_that_does_not_decode() -> None:
    """Such a layer has no memory for it, and native calls do not look."""
    case = LayerCase(((2,),), 9, 4, mode="prefill")

    def main(group: Any) -> None:
        with build(group, case) as layer, torch.no_grad():
            x, idx, weights = inputs(case, 0, 0)
            with pytest.raises(ArgumentError, match="^mode needs a layer"):
                ops.traced_forward(layer, x, idx, weights, scaled, "decode", False)
            with pytest.raises(ArgumentError, match="^mode needs a layer"):
                ops.ep_dispatch(x, idx, weights, layer._key, "decode", False)

    local.run(main, 1)


def masks(group: Any) -> None:
    case = LayerCase(((5, 0), (0, 3)), 8, 8, mode="prefill")
    with build(group, case) as layer, torch.no_grad():

        def step_of(x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
            return layer(
                x, idx, weights, lambda batch: batch.x * batch.mask().unsqueeze(1), mode="prefill"
            )

        compiled = torch.compile(step_of, backend="aot_eager", fullgraph=True, dynamic=True)
        for step in range(2):
            given = inputs(case, group.rank(), step)
            assert_same_bits(compiled(*given), step_of(*given), f"step {step}")


def test_which_rows_count_can_be_asked_in_a_compiled_step(
    on_ranks: Callable[..., list[Any]],
) -> None:
    on_ranks(masks, 2)
