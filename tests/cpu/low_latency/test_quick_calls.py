"""Low-latency calls in one native step give what they give step by step, or are left to Python."""

from __future__ import annotations

import gc
import resource
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from quick_calls import (
    E,
    H,
    M,
    Marked,
    R,
    Spy,
    T,
    inputs,
    on_ranks,
    require_same,
)

import deep_comm
from deep_comm import local
from deep_comm.errors import ArgumentError, BufferDestroyed
from deep_comm.ops import quick

FORMS = {
    "fp8": {},
    "bf16": dict(use_fp8=False),
    "ue8m0": dict(round_scale=True, use_ue8m0=True),
    "nvfp4": dict(use_nvfp4=True),
    "compact": dict(compact=True),
    "compact-bf16": dict(compact=True, use_fp8=False),
}


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("weights_travel", [False, True])
@pytest.mark.parametrize("form", list(FORMS))
def test_one_step_gives_what_many_do(form: str, weights_travel: bool, hooked: bool) -> None:
    def body(buffer: Any, rank: int) -> None:
        idx_dtype = torch.int32 if hooked else torch.int64
        x, idx, weights = inputs(rank, T if rank else 0 if hooked else 1, idx_dtype)
        given = dict(FORMS[form], topk_weights=weights if weights_travel else None)
        spy = Spy(buffer)

        def pair() -> tuple[Any, ...]:
            stats = torch.zeros(E // R, dtype=torch.int32)
            waits = torch.zeros(2, R, dtype=torch.int64)
            payload, count, handle, event, hook = buffer.low_latency_dispatch(
                x, idx, M, E, stats, waits[0], return_recv_hook=hooked, **given
            )
            assert (hook is not None) == hooked and event.event is None
            if hook is not None:
                hook()
            generator = torch.Generator().manual_seed(rank)
            rows = torch.randn(handle.rows_shape, generator=generator).bfloat16()
            combined, event, hook = buffer.low_latency_combine(
                rows, idx, weights, handle, return_recv_hook=hooked,
                combine_wait_recv_cost_stats=waits[1],
            )  # fmt: skip
            assert (hook is not None) == hooked and event.event is None
            if hook is not None:
                hook()
            return payload, count, handle, combined, stats

        pair()  # the first of a form goes step by step
        spy.made.clear()
        one = pair()
        assert spy.made == [True, True]
        spy.forbid()
        many = pair()
        require_same(one, many)

    on_ranks(body)


def test_results_own_their_memory_and_given_tensors_are_let_go_of() -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)
        out = torch.empty(T, H, dtype=torch.bfloat16)
        shape = buffer.low_latency_dispatch(x, idx, M, E, topk_weights=weights)[2].shape
        spy = Spy(buffer)

        def step(**options: Any) -> list[Any]:
            (rows, scales), count, handle, _, hook = buffer.low_latency_dispatch(
                x, idx, M, E, topk_weights=weights, **options
            )
            if hook is not None:
                hook()
            y = torch.ones(handle.rows_shape, dtype=torch.bfloat16)
            combined, _, back = buffer.low_latency_combine(y, idx, None, handle, out=out, **options)
            if back is not None:
                back()
            assert combined is out
            return [rows, scales, count, handle.metadata]

        objects = (x, idx, weights, out, shape, spy.state._pending["dispatch"])
        for options in ({}, dict(return_recv_hook=True)):
            tensors = step(**options)
            storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
            # The counts are the first of the metadata, the scales lie beside it.
            assert len(storages) == 2 and tensors[0].untyped_storage().data_ptr() in storages
            watched = [weakref.ref(tensor) for tensor in tensors]
            del tensors
            gc.collect()
            assert all(watch() is None for watch in watched)
            before = [sys.getrefcount(thing) for thing in objects]
            for _ in range(20):
                step(**options)
            assert [sys.getrefcount(thing) for thing in objects] == before
        assert all(spy.made)

    on_ranks(body, 1)


def test_hooks_of_one_step_keep_the_rules_of_hooks() -> None:
    kept: list[Any] = []

    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)

        def dispatch() -> Any:
            return buffer.low_latency_dispatch(
                x, idx, M, E, topk_weights=weights, return_recv_hook=True
            )

        dispatch()[4]()
        spy = Spy(buffer)
        first, second = dispatch(), dispatch()
        assert spy.made == [True, True]
        with pytest.raises(ArgumentError, match="return_recv_hook"):
            dispatch()  # and no launch
        second[4]()
        first[4]()
        with pytest.raises(ArgumentError, match="once"):
            first[4]()
        with pytest.raises(TypeError):
            first[4](1)
        rows = torch.ones(first[2].rows_shape, dtype=torch.bfloat16)
        backs = [
            buffer.low_latency_combine(rows, idx, None, result[2], return_recv_hook=True)
            for result in (first, second)
        ]
        with pytest.raises(ArgumentError, match="return_recv_hook"):
            buffer.low_latency_combine(rows, idx, None, first[2], return_recv_hook=True)
        del rows  # hooks keep what they need
        for combined, _, hook in backs:
            hook()
            want = weights.where(idx >= 0, 0).sum(1)
            assert torch.allclose(combined[:, 0].float(), want, rtol=1e-2)
        late = dispatch()[4]
        buffer.reset()
        with pytest.raises(ArgumentError, match="reset"):
            late()
        kept.append(dispatch()[4])

    on_ranks(body, 1)
    with pytest.raises(BufferDestroyed):
        kept[0]()


def test_what_is_in_doubt_is_left_to_python() -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)
        buffer.low_latency_dispatch(x, idx, M, E)
        handle = buffer.low_latency_dispatch(x, idx, M, E)[2]
        engine, spy = buffer._context.engine, Spy(buffer)
        dispatch, combine = spy.natives
        plain = [
            x, idx, M, E, None, None, True, False, False, False, None, False, False, False, None,
            False,
        ]  # fmt: skip
        assert dispatch(*plain) is not None
        wide = torch.zeros(T, 2 * H, dtype=torch.bfloat16)
        shifted = torch.zeros(T * H + 1, dtype=torch.bfloat16)[1:].view(T, H)
        doubtful: list[tuple[int, Any]] = [
            (0, None), (0, x.float()), (0, wide[:, :H]), (0, x[0]), (0, x.t()), (0, shifted),
            (0, x.to("meta")), (0, x.as_subclass(Marked)), (0, x.tolist()),
            (0, torch.zeros(T, 2 * H, dtype=torch.bfloat16)),
            (1, None), (1, idx.short()), (1, idx[:-1]), (1, idx[:, :-1]), (1, idx.t()),
            (1, idx.float()), (1, idx.repeat(1, 2)[:, ::2]),
            (2, float(M)), (2, M + 1), (2, -1), (2, T - 1), (2, 1 << 70), (2, True),
            (3, None), (3, E + 1), (3, torch.tensor(E)),
            (4, torch.zeros(E + 1, dtype=torch.int32)), (4, torch.zeros(E, dtype=torch.int64)),
            (5, torch.zeros(1, dtype=torch.int32)), (5, 3),
            *((place, value) for place in (6, 7, 8, 9, 11, 12, 13) for value in (None, 1, "yes")),
            (7, True), (8, True), (11, True),  # forms that nobody has called
            (10, weights.double()), (10, weights[:-1]), (10, weights[:, :-1]), (10, weights.t()),
            (14, torch.ones(1)),  # without use_nvfp4
            (14, 1.0), (15, None), (15, 1),
        ]  # fmt: skip
        launched = engine.num_launches
        for place, value in doubtful:
            arguments = list(plain)
            arguments[place] = value
            assert dispatch(*arguments) is None, (place, value)
        rows = torch.ones(handle.rows_shape, dtype=torch.bfloat16)
        plain = [
            rows, idx, weights, handle.shape, handle.metadata, T, False, None, None, False, False,
            None, False,
        ]  # fmt: skip
        out = torch.empty(T, H, dtype=torch.bfloat16)
        doubtful = [
            (0, None), (0, rows.float()), (0, rows[0]), (0, rows[:, :-1]), (0, rows[:-1]),
            (0, rows.mT), (0, rows.as_subclass(Marked)),
            (1, idx[:-1]), (1, idx[:, :-1]), (1, idx.short()), (1, None),
            (2, None), (2, weights[:-1]), (2, weights.double()),  # it needs weights here
            (3, None), (3, object()),
            (4, None), (5, T + 1), (5, -1), (5, None), (6, 1),
            (7, out.float()), (7, out[:-1]), (7, out.t()), (7, shifted),
            (8, torch.zeros(1, dtype=torch.int32)),
            (9, None), (9, 1), (10, None), (10, 1), (11, rows.float()), (11, rows[0]),
            (11, rows.as_subclass(Marked)), (12, None), (12, 1),
        ]  # fmt: skip
        for place, value in doubtful:
            arguments = list(plain)
            arguments[place] = value
            assert combine(*arguments) is None, (place, value)
        for places in ((6, 12), (9, 10)):  # a hook and async_finish, LogFMT and one rounding
            assert (
                combine(*(True if at in places else each for at, each in enumerate(plain))) is None
            )
        with_buffer = [*plain[:9], True, False, rows, False]  # LogFMT and zero_copy
        assert combine(*with_buffer) is None
        assert engine.num_launches == launched
        for native, count in ((dispatch, 16), (combine, 13)):
            with pytest.raises(TypeError, match=f"{count} arguments"):
                native(x)
        assert combine(*plain) is not None
        assert engine.num_launches == launched + 1

    on_ranks(body, 1)


def test_errors_of_kernels_are_raised_by_calls_of_one_step() -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)
        buffer.low_latency_dispatch(x, idx, M, E)
        spy = Spy(buffer)
        wrong = idx.clone()
        wrong[1, 0] = E
        with pytest.raises(deep_comm.ExpertIndexError):
            buffer.low_latency_dispatch(x, wrong, M, E)
        assert spy.made == []  # it raised inside
        buffer.low_latency_dispatch(x, idx, M, E)
        assert spy.made == [True]

    on_ranks(body, 1)


def _by_python(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Tensors are made by functions of Python, which write down what they are asked for."""
    guards = torch._C._dynamo.guards  # type: ignore[attr-defined]
    native = guards._empty_strided_cpu
    made: list[object] = []

    def empty(*form: Any) -> torch.Tensor:
        made.append(form)
        return native(*form)

    monkeypatch.setattr(guards, "_empty_strided_cpu", empty)
    return made


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize(
    "form",
    [
        dict(use_fp8=False),
        dict(use_fp8=True),
        dict(use_fp8=True, compact=True),
        dict(use_fp8=True, round_scale=True, use_ue8m0=True),
        dict(use_nvfp4=True),
        dict(use_nvfp4=True, compact=True),
    ],
    ids=lambda form: "-".join(form),
)
def test_tensors_are_the_same_by_torchs_own_functions_and_by_pythons(
    monkeypatch: pytest.MonkeyPatch, form: dict[str, bool], mode: Any
) -> None:
    def body(buffer: Any, rank: int) -> Any:
        with mode():
            return results(buffer, rank)

    def results(buffer: Any, rank: int) -> Any:
        x, idx, weights = inputs(rank)
        for _ in range(2):  # the second time in one step
            payload, count, handle, _, _ = buffer.low_latency_dispatch(
                x, idx, M, E, topk_weights=weights, **form
            )
        rows, scales = payload if isinstance(payload, tuple) else (payload, None)
        tensors = [rows, count, handle.metadata, *([] if scales is None else [scales])]
        assert all(type(tensor) is torch.Tensor for tensor in tensors)
        kinds = [
            (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad,
             tensor.is_inference(), tensor.data_ptr() % 16)
            for tensor in tensors
        ]  # fmt: skip
        y = torch.ones(handle.rows_shape, dtype=torch.bfloat16)
        combined = buffer.low_latency_combine(y, idx, None, handle)[0]
        values = [count, combined, handle.recv_tokens]
        storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        return kinds, values, storages

    quick_ones = on_ranks(body)
    with monkeypatch.context() as patch:
        made = _by_python(patch)
        slow_ones = on_ranks(body)
    assert made
    for (kinds, values, storages), (want_kinds, want, apart) in zip(
        quick_ones, slow_ones, strict=True
    ):
        assert kinds == want_kinds
        for value, wanted in zip(values, want, strict=True):
            assert torch.equal(value, wanted)
        # Rows for themselves; the counts are of the metadata, and the scales lie beside it.
        assert len(set(storages)) == 2 and storages.count(storages[0]) == 1
        assert len(set(apart)) == len(apart) - 1


def test_no_memory_for_an_output_is_raised_as_torch_raises_it() -> None:
    experts, tokens, hidden = 64, 256, 7168  # rows of 117 MB: more than a thread has in reserve

    def main(group: local.ThreadGroup) -> None:
        num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(tokens, hidden, 1, experts)
        with deep_comm.Buffer(group, 0, num_bytes, low_latency_mode=True, timeout_s=20) as buffer:
            x, idx = torch.zeros(1, hidden).bfloat16(), torch.zeros(1, 2, dtype=torch.int64)
            spy = Spy(buffer)

            def dispatch() -> Any:
                return buffer.low_latency_dispatch(x, idx, tokens, experts)[0]

            for _ in range(2):
                dispatch()
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limits = resource.getrlimit(resource.RLIMIT_AS)
            few = pages * resource.getpagesize() + (16 << 20)
            try:
                resource.setrlimit(resource.RLIMIT_AS, (few, limits[1]))
                with pytest.raises(RuntimeError, match="memory"):
                    dispatch()
            finally:
                resource.setrlimit(resource.RLIMIT_AS, limits)
            assert dispatch()[0].shape == (experts, tokens, hidden)
            assert spy.made == [False, True, True]

    local.run(main, 1, timeout_s=60)


@pytest.mark.parametrize("lacking", ["__dlpack_c_exchange_api__", "empty", "part"])
def test_calls_go_step_by_step_where_torch_lacks_something(
    monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    guards = torch._C._dynamo.guards  # type: ignore[attr-defined]
    if lacking == "empty":
        monkeypatch.delattr(guards, "_empty_strided_cpu")
    elif lacking == "part":
        monkeypatch.delattr(guards, "_reinterpret_tensor")
    else:
        monkeypatch.delattr(torch.Tensor, lacking)
    assert quick.torch_of(torch.device("cpu")) is None

    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)
        for _ in range(2):
            handle = buffer.low_latency_dispatch(x, idx, M, E, topk_weights=weights)[2]
            rows = torch.ones(handle.rows_shape, dtype=torch.bfloat16)
            combined = buffer.low_latency_combine(rows, idx, None, handle)[0]
            want = weights.where(idx >= 0, 0).sum(1)
            assert torch.allclose(combined[:, 0].float(), want, rtol=1e-2)
        assert buffer._low_latency.quick_dispatch is quick.never

    on_ranks(body, 1)


def test_outputs_are_poisoned_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_POISON", "1")

    def body(buffer: Any, rank: int) -> None:
        assert buffer._low_latency.quick_dispatch is quick.never

    on_ranks(body, 1)
