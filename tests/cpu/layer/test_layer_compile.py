"""ExpertParallel in torch.compile graphs without breaks: opaque operators with shapes known to
the compiler.

Ranks are processes: the compiler is not made for ranks that are threads.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from layer_cases import LayerCase, build, inputs
from payload import assert_same_bits
from torch import Tensor

from deep_comm import ArgumentError, ExpertBatch, local, processes
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


def scaled(batch: ExpertBatch) -> Tensor:
    """Experts of a compiled graph: everything by device counts and offsets, no loop over rows."""
    row = torch.arange(batch.x.shape[0])
    expert = torch.searchsorted(batch.offsets[1:].long(), row, right=True)
    expert = expert.clamp(max=batch.num_local_experts - 1)
    return batch.x * (1.0 + (batch.first_expert + expert) / 8).unsqueeze(1).to(batch.x.dtype)


def scaled_masked(batch: ExpertBatch) -> Tensor:
    assert batch.is_masked
    factors = 1.0 + (batch.first_expert + torch.arange(batch.num_local_experts)) / 8
    return (batch.masked() * factors.view(-1, 1, 1).to(batch.x.dtype)).view(batch.x.shape)


def compiled_equals_eager(group: Any, mode: str, backend: str) -> list[bool]:
    """Whether each step was a prefill step."""
    case = LayerCase(((3, 1), (2, 4), (9, 0), (1, 2), (0, 3)), 9, 4, experts=6, mode=mode)
    if mode == "decode":
        case = LayerCase(((3, 1), (2, 4), (4, 0), (0, 2)), 4, 4, experts=6, mode=mode)
    compute = scaled_masked if mode == "decode" else scaled
    results = []
    with build(group, case) as layer, build(group, case) as eager_layer, torch.no_grad():

        @torch.compile(backend=backend, fullgraph=True, dynamic=True)
        def step(x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
            return layer(x * 2, idx, weights, compute) + 1

        for number in range(len(case.steps)):
            x, idx, weights = inputs(case, group.rank(), number)
            got = step(x, idx, weights)
            want = eager_layer(x * 2, idx, weights, compute) + 1
            assert_same_bits(got, want, f"step {number}")
            # A compiled step dispatches and combines, an eager one may do so
            # twice; the rule is one.
            assert layer.rule.begins_with_decode == eager_layer.rule.begins_with_decode
            results.append(not layer.rule.begins_with_decode)
    return results


@pytest.mark.parametrize(
    ("backend", "mode"),
    backends_and("prefill", "decode", "auto", inductor=("auto",)),
)
def test_a_compiled_step_gives_the_bits_of_an_eager_one(
    backend: str, mode: str, on_ranks: Callable[..., list[Any]]
) -> None:
    """Ranks without tokens among them: their results are empty, and take part all the same."""
    results = on_ranks(compiled_equals_eager, 2, mode, backend)
    assert results[0] == results[1]
    if mode == "auto":
        assert results[0] == [False, False, True, False, False]


def compiled_gradients(group: Any, backend: str) -> None:
    case = LayerCase(((3, 1), (2, 0), (5, 6)), 8, 4, hidden=32, experts=6, mode="prefill")
    with build(group, case) as layer:
        factor = torch.full((32,), 1.5, dtype=case.dtype, requires_grad=True)

        def step(x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
            return layer(x * factor, idx, weights, scaled)

        compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
        for number in range(len(case.steps)):
            grads = []
            for run in (step, compiled):
                x, idx, weights = inputs(case, group.rank(), number)
                x.requires_grad_()
                weights.requires_grad_()
                factor.grad = None
                y = run(x, idx, weights)
                y.backward(torch.cos(torch.arange(y.numel()).float()).view_as(y).to(y.dtype))
                grads.append((y.detach(), x.grad, weights.grad, factor.grad.clone()))
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


def unused_result(group: Any, mode: str, backend: str) -> None:
    """Two batches that do not depend on each other; the last rank has no use for the second."""
    case = LayerCase(((3, 2), (4, 4)), 4, 4, experts=6, mode=mode)
    compute = scaled_masked if mode == "decode" else scaled
    is_last = group.rank() == group.size() - 1
    with build(group, case) as layer, torch.no_grad():

        def step(first: Any, second: Any) -> tuple[Tensor, ...]:
            a = layer(*first, compute)
            b = layer(*second, compute)
            return (a,) if is_last else (a, b)

        parts = [inputs(case, group.rank(), number) for number in range(2)]
        want = step(*parts)
        got = torch.compile(step, backend=backend, fullgraph=True)(*parts)
        for number in range(len(got)):
            assert_same_bits(got[number], want[number], f"batch {number}")


@pytest.mark.parametrize(
    ("backend", "mode"), backends_and("prefill", "decode", inductor=("decode",))
)
def test_a_call_whose_result_is_not_used_is_made_and_in_its_turn(
    backend: str, mode: str, on_ranks: Callable[..., list[Any]]
) -> None:
    on_ranks(unused_result, 2, mode, backend)


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
