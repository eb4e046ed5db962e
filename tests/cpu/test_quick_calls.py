"""Calls made in one native step give what they give step by step, or are left to Python."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_step_calls import run_calls

import deep_comm
from deep_comm import local
from deep_comm.bench import operations
from deep_comm.bench.expected import Expected as NormalExpected
from deep_comm.bench.low_latency import options as low_latency
from deep_comm.bench.low_latency.expected import Expected as LowLatencyExpected
from deep_comm.bench.low_latency.operations import BufferCalls
from deep_comm.bench.workload import Workload
from deep_comm.errors import ArgumentError, BufferDestroyed
from deep_comm.ops import quick

R, T, M, H, K, E = 2, 7, 9, 256, 3, 6


def _on_ranks(body: Callable[[Any, int], Any], num_ranks: int = R, **options: Any) -> list[Any]:
    def main(group: local.ThreadGroup) -> Any:
        num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(M, H, num_ranks, E)
        with deep_comm.Buffer(
            group, 0, num_bytes, low_latency_mode=True, timeout_s=20, **options
        ) as buffer:
            return body(buffer, group.rank())

    return local.run(main, num_ranks, timeout_s=120)


def _inputs(rank: int, num_tokens: int = T, idx_dtype: torch.dtype = torch.int64) -> Any:
    generator = torch.Generator().manual_seed(17 + rank)
    x = torch.randn(num_tokens, H, generator=generator).bfloat16()
    idx = torch.rand(num_tokens, E, generator=generator).topk(K).indices.to(idx_dtype)
    if num_tokens > 2:
        idx[2, 1] = -1
    return x, idx, torch.rand(num_tokens, K, generator=generator)


class Spy:
    """Says which calls were made in one step."""

    def __init__(self, buffer: Any) -> None:
        self.state = buffer._low_latency
        self.natives = self.state.quick_dispatch, self.state.quick_combine
        self.made: list[bool] = []
        self.state.quick_dispatch = self._spied(self.natives[0])
        self.state.quick_combine = self._spied(self.natives[1])

    def _spied(self, native: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = native(*arguments)
            self.made.append(result is not None)
            return result

        return call

    def forbid(self) -> None:
        self.state.quick_dispatch = self.state.quick_combine = quick.never


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
        x, idx, weights = _inputs(rank, T if rank else 0 if hooked else 1, idx_dtype)
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
        _require_same(one, many)

    _on_ranks(body)


def _require_same(one: tuple[Any, ...], many: tuple[Any, ...]) -> None:
    payload, count, handle, combined, stats = one
    for got, want in ((count, many[1]), (combined, many[3]), (stats, many[4])):
        assert torch.equal(got, want) and got.dtype == want.dtype
    assert torch.equal(handle.recv_tokens, many[2].recv_tokens)
    for source, number in enumerate(handle.recv_tokens.tolist()):
        assert torch.equal(handle.places[source, :number], many[2].places[source, :number])
    assert handle.num_tokens == many[2].num_tokens and handle.shape is many[2].shape
    parts = payload if isinstance(payload, tuple) else (payload,)
    wanted = many[0] if isinstance(payload, tuple) else (many[0],)
    assert len(parts) == len(wanted)
    for got, want in zip(parts, wanted, strict=True):
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
    counts = handle.num_recv_tokens if handle.is_compact else count
    assert counts is not None
    for got, want in zip(parts, wanted, strict=True):
        if got.dim() > 3:  # of NVFP4, in tiles
            continue
        if handle.is_compact:
            got, want = got[None], want[None]
        for group, number in enumerate(counts.tolist()):
            assert torch.equal(got[group, :number].float(), want[group, :number].float())


def test_results_own_their_memory_and_given_tensors_are_let_go_of() -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = _inputs(rank)
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
            assert len(storages) == 3  # the counts are the first of the metadata
            watched = [weakref.ref(tensor) for tensor in tensors]
            del tensors
            gc.collect()
            assert all(watch() is None for watch in watched)
            before = [sys.getrefcount(thing) for thing in objects]
            for _ in range(20):
                step(**options)
            assert [sys.getrefcount(thing) for thing in objects] == before
        assert all(spy.made)

    _on_ranks(body, 1)


def test_hooks_of_one_step_keep_the_rules_of_hooks() -> None:
    kept: list[Any] = []

    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = _inputs(rank)

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

    _on_ranks(body, 1)
    with pytest.raises(BufferDestroyed):
        kept[0]()


class Marked(torch.Tensor):
    """A subclass may mean anything."""


def test_what_is_in_doubt_is_left_to_python() -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = _inputs(rank)
        buffer.low_latency_dispatch(x, idx, M, E)
        handle = buffer.low_latency_dispatch(x, idx, M, E)[2]
        engine, spy = buffer._context.engine, Spy(buffer)
        dispatch, combine = spy.natives
        plain = [x, idx, M, E, None, None, True, False, False, False, None, False, False, False]
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
        ]  # fmt: skip
        launched = engine.num_launches
        for place, value in doubtful:
            arguments = list(plain)
            arguments[place] = value
            assert dispatch(*arguments) is None, (place, value)
        rows = torch.ones(handle.rows_shape, dtype=torch.bfloat16)
        plain = [rows, idx, weights, handle.shape, handle.metadata, T, False, None, None]
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
        ]  # fmt: skip
        for place, value in doubtful:
            arguments = list(plain)
            arguments[place] = value
            assert combine(*arguments) is None, (place, value)
        assert engine.num_launches == launched
        for native, count in ((dispatch, 14), (combine, 9)):
            with pytest.raises(TypeError, match=f"{count} arguments"):
                native(x)
        assert combine(*plain) is not None
        assert engine.num_launches == launched + 1

    _on_ranks(body, 1)


def test_errors_of_kernels_are_raised_by_calls_of_one_step() -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = _inputs(rank)
        buffer.low_latency_dispatch(x, idx, M, E)
        spy = Spy(buffer)
        wrong = idx.clone()
        wrong[1, 0] = E
        with pytest.raises(deep_comm.ExpertIndexError):
            buffer.low_latency_dispatch(x, wrong, M, E)
        assert spy.made == []  # it raised inside
        buffer.low_latency_dispatch(x, idx, M, E)
        assert spy.made == [True]

    _on_ranks(body, 1)


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
        x, idx, weights = _inputs(rank)
        for _ in range(2):
            handle = buffer.low_latency_dispatch(x, idx, M, E, topk_weights=weights)[2]
            rows = torch.ones(handle.rows_shape, dtype=torch.bfloat16)
            combined = buffer.low_latency_combine(rows, idx, None, handle)[0]
            want = weights.where(idx >= 0, 0).sum(1)
            assert torch.allclose(combined[:, 0].float(), want, rtol=1e-2)
        assert buffer._low_latency.quick_dispatch is quick.never

    _on_ranks(body, 1)


def test_outputs_are_poisoned_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_POISON", "1")

    def body(buffer: Any, rank: int) -> None:
        assert buffer._low_latency.quick_dispatch is quick.never

    _on_ranks(body, 1)


# ---- normal mode -----------------------------------------------------------------------------


def _on_normal(body: Callable[[Any, int], Any], num_ranks: int = R, **options: Any) -> None:
    def main(group: local.ThreadGroup) -> Any:
        with deep_comm.Buffer(group, 8 << 20, timeout_s=20, **options) as buffer:
            return body(buffer, group.rank())

    local.run(main, num_ranks, timeout_s=120)


class NormalSpy:
    """Which calls of a Buffer were made in one step; ``is_off``: none may be."""

    def __init__(self, buffer: Any) -> None:
        self.made: list[bool] = []
        self.is_off = False
        for name in ("dispatch", "new_dispatch", "combine"):
            name = f"_quick_{name}"
            setattr(buffer, name, self._spied(getattr(buffer, name)))
        buffer._context.quick_layout = self._spied(buffer._context.quick_layout)

    def _spied(self, quick_call: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = None if self.is_off else quick_call(*arguments)
            self.made.append(result is not None)
            return result

        return call


@pytest.mark.parametrize("num_direct_bytes", [0, 4 << 20])
@pytest.mark.parametrize("config", [None, deep_comm.Config(2, 4, 16)])
@pytest.mark.parametrize("form", ["bf16", "fp32", "fp8", "int-scales", "columns"])
def test_calls_along_a_known_routing(form: str, config: Any, num_direct_bytes: int) -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = _inputs(rank, (0, T)[rank])
        given: Any = x
        if form == "fp32":
            given = x.float()
        elif form != "bf16":
            scales = torch.rand(len(x), 6)
            if form == "int-scales":
                scales = torch.arange(scales.numel(), dtype=torch.int32).view(scales.shape)
            elif form == "columns":
                scales = scales.t().contiguous().t()
            given = x.to(torch.float8_e4m3fn), scales
        handle = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=E)[4]
        if config is not None:
            handle = buffer.dispatch(x, topk_idx=idx, num_experts=E, config=config)[4]
        spy = NormalSpy(buffer)

        def pair() -> tuple[list[torch.Tensor], torch.Tensor]:
            got, *nothing, event = buffer.dispatch(given, handle=handle, config=config)
            assert nothing == [None] * 4 and event.event is None
            parts = list(got) if isinstance(got, tuple) else [got]
            rows = parts[0].to(torch.float32 if form == "fp32" else torch.bfloat16)
            sums, none, event = buffer.combine(rows, handle, config=config)
            assert none is None and event.event is None
            return parts, sums

        pair()
        spy.made.clear()
        one = pair()
        # In rings outputs are torch's, of as many steps as ever.
        assert spy.made == [num_direct_bytes > 0, True]
        pair()
        spy.is_off = True
        many = pair()
        for got, want in zip((*one[0], one[1]), (*many[0], many[1]), strict=True):
            assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
            assert torch.equal(got.float(), want.float())

    _on_normal(body, num_direct_bytes=num_direct_bytes)


@pytest.mark.parametrize("idx_dtype", [torch.int32, torch.int64])
def test_a_layout_is_made_in_one_step(idx_dtype: torch.dtype) -> None:
    def body(buffer: Any, rank: int) -> None:
        spy = NormalSpy(buffer)
        for num_tokens, num_experts in ((T, E), (0, E), (T, 2 * E), (1, E)):
            idx = _inputs(rank, num_tokens, idx_dtype)[1]
            one = buffer.get_dispatch_layout(idx, num_experts)
            assert one[4].event is None
            spy.is_off = True
            many = buffer.get_dispatch_layout(idx, num_experts)
            spy.is_off = False
            assert spy.made[-2:] == [True, False]
            assert one[1] is None and many[1] is None
            for got, want in zip((one[0], *one[2:4]), (many[0], *many[2:4]), strict=True):
                assert (got.shape, got.stride(), got.dtype) == (
                    want.shape,
                    want.stride(),
                    want.dtype,
                )
                assert torch.equal(got, want)
        idx = _inputs(rank, T, idx_dtype)[1]
        idx[1, 0] = E
        with pytest.raises(deep_comm.ExpertIndexError):
            buffer.get_dispatch_layout(idx, E)
        before = sys.getrefcount(idx)
        for _ in range(20):
            buffer.get_dispatch_layout(idx, E + 1)
        assert sys.getrefcount(idx) == before

    _on_normal(body)


def test_layouts_in_doubt_are_left_to_python() -> None:
    def body(buffer: Any, rank: int) -> None:
        idx = _inputs(rank)[1]
        layout = buffer._context.quick_layout
        most = buffer._context.num_max_experts
        launched = buffer._context.engine.num_launches
        for wrong in (
            None, idx.short(), idx.float(), idx[0], idx.t(), idx.repeat(1, 2)[:, ::2], idx[:, :0],
            idx.repeat(1, 64), idx.to("meta"), idx.as_subclass(Marked), idx.tolist(),
        ):  # fmt: skip
            assert layout(wrong, E) is None, wrong
        for wrong in (None, 0, -1, most + 1, 1 << 70, float(E), True, torch.tensor(E)):
            assert layout(idx, wrong) is None, wrong
        assert buffer._context.engine.num_launches == launched
        assert layout(idx, most) is not None
        assert buffer._context.engine.num_launches == launched + 1
        with pytest.raises(ArgumentError, match="topk_idx"):
            buffer.get_dispatch_layout(idx.float(), E)
        with pytest.raises(ArgumentError, match="num_experts"):
            buffer.get_dispatch_layout(idx, most + 1)
        buffer.destroy()
        with pytest.raises(BufferDestroyed):
            buffer.get_dispatch_layout(idx, E)

    _on_normal(body, 1)


@pytest.mark.parametrize("config", [None, deep_comm.Config(2, 4, 16)])
@pytest.mark.parametrize("with_layout", [False, True])
@pytest.mark.parametrize("form", ["bf16", "fp8", "without-weights", "int32", "aligned-zeros"])
def test_calls_with_a_bound_of_rows(form: str, with_layout: bool, config: Any) -> None:
    """And combine along their handles, which no call has seen before."""

    def body(buffer: Any, rank: int) -> None:
        idx_dtype = torch.int32 if form == "int32" else torch.int64
        x, idx, weights = _inputs(rank, (T, 0)[rank], idx_dtype)
        given: Any = x
        if form == "fp8":
            given = x.to(torch.float8_e4m3fn), torch.rand(len(x), 2)
        options: dict[str, Any] = dict(num_worst_tokens=R * T + 3, config=config, topk_idx=idx)
        if form != "without-weights":
            options["topk_weights"] = weights
        if form == "aligned-zeros":
            options.update(expert_alignment=4, zero_tail=True)
        spy = NormalSpy(buffer)

        def step() -> list[torch.Tensor]:
            per_rank, none, per_expert, mask, event = buffer.get_dispatch_layout(idx, E)
            assert none is None and event.event is None
            layout = dict(num_experts=E)
            if with_layout:
                layout = dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert,
                              is_token_in_rank=mask)  # fmt: skip
            got, recv_idx, recv_weights, counts, handle, event = buffer.dispatch(
                given, **options, **layout
            )
            assert counts == [] and event.event is None
            assert (recv_weights is None) == ("topk_weights" not in options)
            num_rows = int(handle.num_recv_tokens_tensor)
            parts = list(got) if isinstance(got, tuple) else [got]
            if form == "aligned-zeros":
                assert not parts[0][num_rows:].any()
            else:
                parts = [part[:num_rows] for part in parts]
            rows = (got[0] if isinstance(got, tuple) else got).bfloat16().nan_to_num(1.0)
            rows[num_rows:] = 1.0
            sums, weight_sums, _ = buffer.combine(rows, handle, recv_weights, config=config)
            assert (weight_sums is None) == (recv_weights is None)
            others = [recv_idx] if recv_weights is None else [recv_idx, recv_weights, weight_sums]
            assert handle.num_recv_tokens is None and handle.num_experts == E
            assert (handle.num_topk, handle.num_recv_rows) == (K, R * T + 3)
            fields = [*handle, handle.num_recv_tokens_per_expert, handle.num_recv_tokens_per_rank]
            return [per_rank, per_expert, mask, *parts, sums, *others, *fields]

        step()
        assert spy.made == [True, False, False]  # layouts need no call before
        spy.made.clear()
        one = step()
        assert spy.made == [True] * 3
        spy.is_off = True
        many = step()
        for number, (got, want) in enumerate(zip(one, many, strict=True)):
            assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
            assert torch.equal(got.float(), want.float()), number

    _on_normal(body, num_direct_bytes=4 << 20)


def test_bounded_calls_in_doubt_are_left_to_python() -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = _inputs(rank)
        per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(idx, E)
        layout = dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert,
                      is_token_in_rank=mask)  # fmt: skip

        def dispatch(x: Any = x, idx: Any = idx, weights: Any = weights, **given: Any) -> Any:
            given = {"num_experts": E, "num_worst_tokens": T, **given}
            return buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **given)

        for _ in range(2):
            dispatch()
            dispatch(**layout)
        spy = NormalSpy(buffer)
        dispatch()
        dispatch(**layout)
        buffer.get_dispatch_layout(idx, E)
        assert spy.made == [True] * 3
        spy.made.clear()
        launched = buffer._context.engine.num_launches
        free = buffer._context.region.num_free_bytes
        for wrong in (
            dict(x=x[:-1]), dict(idx=idx[:-1]), dict(idx=idx.float()), dict(idx=idx.t()),
            dict(weights=weights.double()), dict(weights=weights[:, :-1]), dict(idx=None),
            dict(num_experts="6"), dict(num_worst_tokens=-1), dict(num_worst_tokens=1.0),
            dict(expert_alignment=0), dict(x=x.t()),
            dict(layout, num_experts=E + 1), dict(layout, is_token_in_rank=None),
            dict(layout, is_token_in_rank=mask.int()), dict(layout, num_tokens_per_rank=None),
            dict(layout, num_tokens_per_expert=per_expert.long()), dict(num_experts=1 << 40),
        ):  # fmt: skip
            with pytest.raises((ArgumentError, TypeError)):
                dispatch(**wrong)
        for wrong in ((idx.float(), E), (idx, 0), (idx, "6"), (None, E), (idx.t(), E)):
            with pytest.raises(ArgumentError):
                buffer.get_dispatch_layout(*wrong)
        assert not any(spy.made)
        assert buffer._context.engine.num_launches == launched
        assert buffer._context.region.num_free_bytes == free
        bad = idx.clone()
        bad[1, 1] = E
        with pytest.raises(deep_comm.ExpertIndexError):
            dispatch(idx=bad)
        with pytest.raises(deep_comm.CapacityError):
            dispatch(num_worst_tokens=T - 1)
        with pytest.raises(deep_comm.CapacityError):
            dispatch(num_worst_tokens=T - 1)
        with pytest.raises(deep_comm.ExpertIndexError):
            buffer.get_dispatch_layout(bad, E)
        spy.made.clear()
        assert torch.equal(dispatch()[0], x)
        held = []  # until the region is full: then through the rings, into torch's memory
        while spy.made[-1]:
            held.append(dispatch())
        assert all(torch.equal(rows[0], x) for rows in held)
        first = held[0]
        assert torch.equal(first[4].recv_src_idx, torch.arange(T, dtype=torch.int32))
        assert len(held) > 3
        buffer.destroy()
        with pytest.raises(BufferDestroyed):
            dispatch()
        with pytest.raises(BufferDestroyed):
            buffer.get_dispatch_layout(idx, E)

    _on_normal(body, 1, num_direct_bytes=1 << 20)


def test_normal_calls_in_doubt_are_left_to_python() -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = _inputs(rank)
        handle = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=E)[4]
        rows = buffer.dispatch(x, handle=handle)[0]
        sums = buffer.combine(rows, handle)[0]
        known, calls = handle._known, buffer._context.quick
        named = known.home_stream, None, buffer._default_for_rows("dispatch")

        def dispatch(given: Any) -> Any:
            return calls.dispatch(given, known.numbers, *named)

        def combine(given: Any) -> Any:
            return calls.combine(given, None, known.numbers, *named)

        assert dispatch(x) is not None and combine(rows) is not None
        launched = buffer._context.engine.num_launches
        free = buffer._context.region.num_free_bytes
        shifted = torch.zeros(T * H + 1, dtype=torch.bfloat16)[1:].view(T, H)
        for wrong in (
            None, x.half(), x[:-1], x[:, :-8], x.t(), shifted, x.to("meta"), (x, weights),
            [x], x.as_subclass(Marked), torch.zeros(T, 2 * H, dtype=torch.bfloat16)[:, :H],
        ):  # fmt: skip
            assert dispatch(wrong) is None, wrong
        for wrong in (None, rows[:-1], rows.float(), rows.t(), (rows,)):
            assert combine(wrong) is None, wrong
        for wrong in (None, known.numbers[:-1], [*known.numbers]):
            assert calls.dispatch(x, wrong, *named) is None
            assert calls.combine(rows, None, wrong, *named) is None
        other = deep_comm.Config(2, 4, 16)
        assert calls.dispatch(x, known.numbers, known.home_stream, other, None) is None
        assert buffer._context.engine.num_launches == launched
        assert buffer._context.region.num_free_bytes == free
        # Other forms, and calls that are not plain, go on as they did.
        assert buffer.dispatch(x.float(), handle=handle)[0].dtype == torch.float32
        both = buffer.combine(rows, handle, topk_weights=torch.ones(len(rows), K))
        assert torch.equal(both[0], sums) and both[1] is not None
        biased = buffer.combine(rows, handle, bias=x)[0]
        assert not torch.equal(biased, sums)
        assert torch.equal(buffer.combine(rows, tuple(handle))[0], sums)
        with pytest.raises(deep_comm.HandleMismatch):
            buffer.dispatch(x[:-1], handle=handle)
        with pytest.raises(ArgumentError, match="topk_idx"):
            buffer.dispatch(x, handle=handle, topk_idx=idx)

    _on_normal(body, 1, num_direct_bytes=4 << 20)


def test_blocks_of_one_step_go_back_and_buffers_are_told_apart() -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = _inputs(rank)
        handle = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=E)[4]
        rows = buffer.dispatch(x, handle=handle)[0]
        sums = buffer.combine(rows, handle)[0]
        spy = NormalSpy(buffer)
        free = buffer._context.region.num_free_bytes
        before = sys.getrefcount(x), sys.getrefcount(rows)
        for _ in range(50):
            again = buffer.dispatch(x, handle=handle)[0]
            assert torch.equal(buffer.combine(rows, handle)[0], sums)
            assert buffer._context.region.num_free_bytes < free
            del again
        assert (sys.getrefcount(x), sys.getrefcount(rows)) == before
        assert buffer._context.region.num_free_bytes == free
        assert all(spy.made)
        held = []  # until the region is full: then through the rings, into torch's memory
        while spy.made[-1]:
            held.append(buffer.dispatch(x, handle=handle)[0])
        assert all(torch.equal(again, rows) for again in held)
        buffer.destroy()
        with pytest.raises(BufferDestroyed):
            buffer.combine(rows, handle)

    _on_normal(body, 1, num_direct_bytes=1 << 20)


# ---- the bench --------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [None, deep_comm.Config(2, 4, 16)])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_the_bench_times_calls_of_one_step(dtype: str, config: Any) -> None:
    workload = Workload(R, T, H, E, K, dtype)

    def body(buffer: Any, rank: int) -> None:
        expected = NormalExpected(workload, rank, buffer.device, num_slots=2)
        wanted = {
            operations.LAYOUT, operations.DISPATCH_NO_WAIT, operations.DISPATCH_CACHED,
            operations.COMBINE, operations.PAIR_CACHED,
        }  # fmt: skip
        subject = operations.BufferOperations(buffer, expected, config)
        spy = NormalSpy(buffer)
        for operation in subject.operations("direct"):
            for slot in (0, 1):
                operation.call(slot)
            if operation.name in wanted:
                spy.made.clear()
                operation.call(0)
                assert spy.made and all(spy.made), operation.name
                wanted.remove(operation.name)
        assert not wanted

    _on_normal(body, num_direct_bytes=4 << 20)


@pytest.mark.parametrize("layout", low_latency.LAYOUTS)
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_the_bench_times_low_latency_calls_of_one_step(dtype: str, layout: str) -> None:
    workload = Workload(R, T, H, E, K, dtype)

    def body(buffer: Any, rank: int) -> None:
        expected = LowLatencyExpected(workload, layout, rank, buffer.device, M)
        calls = BufferCalls(buffer, expected, layout, 2)
        spy = Spy(buffer)
        for name, phases in itertools.product(low_latency.NAMES, low_latency.PHASES):
            operation = calls.operation(name, phases)
            operation.call(0)
            spy.made.clear()
            operation.call(1)
            assert spy.made and all(spy.made), (name, phases)

    _on_ranks(body)


def test_normal_calls_in_one_step_behind_each_other_give_what_many_do() -> None:
    """What tests/gpu/test_one_step_calls_gpu.py runs over streams."""
    local.run(lambda group: run_calls(group, "cpu", 5), 3, timeout_s=60)
