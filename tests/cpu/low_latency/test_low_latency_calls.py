"""What low-latency calls give and own, by form, in first and in later calls; what they refuse."""

from __future__ import annotations

import gc
import resource
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from low_latency import LowLatencyCase, run_case, verify
from on_buffers import on_buffers
from run_by import run_by
from small_calls import E, H, M, Marked, T, inputs, on_ranks

import deep_comm
from deep_comm import local
from deep_comm.errors import ArgumentError, BufferDestroyed, HandleMismatch

FORMS: dict[str, dict[str, bool]] = {
    "fp8": dict(use_fp8=True), "bf16": {},
    "ue8m0": dict(use_fp8=True, round_scale=True, use_ue8m0=True), "nvfp4": dict(use_nvfp4=True),
    "compact": dict(use_fp8=True, compact=True), "compact-bf16": dict(compact=True),
}  # fmt: skip
# Of torch as it is, of one without DLPack's exchange API, and of a Buffer that poisons.
WAYS = ["plain", "attributes", "poisoned"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "attributes":
        monkeypatch.setattr("deep_comm.backends.cpu.EXCHANGE_API", None)
        monkeypatch.setattr("deep_comm.context.EXCHANGE_API", None)
    if request.param == "poisoned":
        monkeypatch.setenv("DEEP_COMM_POISON", "1")
    return str(request.param)


@pytest.mark.parametrize("mode", ["plain", "hook", "async"])
@pytest.mark.parametrize("weights_ahead", [False, True])
@pytest.mark.parametrize("form", list(FORMS))
def test_every_form_gives_its_rows_and_sums(
    form: str, weights_ahead: bool, mode: str, way: str
) -> None:
    """In the first call of the form and in later ones; with a rank that has no tokens."""
    case = LowLatencyCase(
        (0 if mode == "hook" else 1, 7), 9, hidden=256, experts=6, topk=3, calls=3, mode=mode,
        weights_ahead=weights_ahead,
        idx_dtype=torch.int32 if mode == "hook" else torch.int64, **FORMS[form],
    )  # fmt: skip
    verify(case, local.run(lambda group: run_case(group, case, timeout_s=20), 2, timeout_s=120))


def count_storage_is_metadata(tensors: list[torch.Tensor]) -> bool:
    """Of (rows, scales, counts, metadata)."""
    return tensors[2].untyped_storage().data_ptr() == tensors[3].untyped_storage().data_ptr()


@run_by(on_ranks, 1)
def test_results_own_their_memory_and_given_tensors_are_let_go_of(
    buffer: Any, rank: int, /
) -> None:
    x, idx, weights = inputs(rank)
    out = torch.empty(T, H, dtype=torch.bfloat16)

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

    objects = (x, idx, weights, out, buffer._low_latency)
    for options in ({}, dict(return_recv_hook=True)):
        tensors = step(**options)
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        # The counts are the first of the metadata.
        assert len(storages) == 3 and count_storage_is_metadata(tensors)
        watched = [weakref.ref(tensor) for tensor in tensors]
        del tensors
        gc.collect()
        assert all(watch() is None for watch in watched)
        before = [sys.getrefcount(thing) for thing in objects]
        for _ in range(20):
            step(**options)
        assert [sys.getrefcount(thing) for thing in objects] == before


def test_hooks_keep_their_rules() -> None:
    kept: list[Any] = []

    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)

        def dispatch() -> Any:
            return buffer.low_latency_dispatch(
                x, idx, M, E, topk_weights=weights, return_recv_hook=True
            )

        first, second = dispatch(), dispatch()
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


@run_by(on_ranks, 1)
def test_what_breaks_a_rule_is_named_and_launches_nothing(
    buffer: Any, rank: int, /, way: str
) -> None:
    """In a first call, and of a form that is known."""
    x, idx, weights = inputs(rank)
    wide = torch.zeros(T, 2 * H, dtype=torch.bfloat16)
    shifted = torch.zeros(T * H + 1, dtype=torch.bfloat16)[1:].view(T, H)
    count, tokens = "num_experts", "num_max_dispatch_tokens_per_rank"
    stats, waits = "cumulative_local_expert_recv_stats", "dispatch_wait_recv_cost_stats"
    plain: dict[str, Any] = {"x": x, "topk_idx": idx, tokens: M, count: E}
    refused: list[tuple[str, Any]] = [
        ("x", None), ("x", x.float()), ("x", wide[:, :H]), ("x", x[0]), ("x", x.t()),
        ("x", shifted), ("x", x.to("meta")), ("x", x.tolist()), ("x", wide[:, :130].clone()),
        ("x", wide[:, :0].clone()),
        ("topk_idx", None), ("topk_idx", idx.short()), ("topk_idx", idx[:-1]),
        ("topk_idx", idx[:, :0]), ("topk_idx", idx.t()), ("topk_idx", idx.float()),
        ("topk_idx", idx.repeat(1, 2)[:, ::2]), ("topk_idx", idx.repeat(1, 22)),
        (tokens, float(M)), (tokens, -1), (tokens, 1 << 70), (tokens, None), (tokens, "9"),
        (count, None), (count, 1 << 20), (count, torch.tensor(E)), (count, 0),
        (stats, torch.zeros(E + 1, dtype=torch.int32)), (stats, 3),
        (stats, torch.zeros(E, dtype=torch.int64)),
        (waits, torch.zeros(1, dtype=torch.int32)), (waits, 3),
        ("use_ue8m0", True), ("x_global_scale", torch.ones(1)),
        ("topk_weights", weights.double()), ("topk_weights", weights[:-1]),
        ("topk_weights", weights[:, :-1]), ("topk_weights", weights.t()), (tokens, 0),
        (tokens, 1 << 16),
    ]  # fmt: skip
    # With more than the argument that is named.
    together: list[tuple[str, dict[str, Any]]] = [
        ("x", dict(x=x[:, :12].clone(), use_fp8=False)),
        ("x", dict(x=x[:, :0].clone(), use_fp8=False)),
        ("round_scale", dict(use_fp8=False, round_scale=True)),
    ]
    together += [(name, {name: value}) for name, value in refused]
    engine = buffer.runtime

    def refuse_all(launched: int) -> None:
        for name, changes in together:
            with pytest.raises(ArgumentError) as caught:
                buffer.low_latency_dispatch(**(plain | changes))
            assert caught.value.argument == name, changes
            assert engine.num_launches == launched
        for max_tokens in (T - 1, True):
            with pytest.raises(ArgumentError, match=f"^x must have at most {int(max_tokens)}"):
                buffer.low_latency_dispatch(**(plain | {tokens: max_tokens}))

    refuse_all(0)
    handle = buffer.low_latency_dispatch(**plain)[2]
    refuse_all(1)
    rows = torch.ones(handle.rows_shape, dtype=torch.bfloat16)
    out = torch.empty(T, H, dtype=torch.bfloat16)
    plain = dict(x=rows, topk_idx=idx, topk_weights=weights, handle=handle)
    stats = "combine_wait_recv_cost_stats"
    refused = [
        ("x", None), ("x", rows.float()), ("x", rows[0]), ("x", rows[:, :-1]),
        ("x", rows[:-1]), ("x", rows.mT),
        ("topk_idx", idx[:-1]), ("topk_idx", idx.short()),
        ("topk_weights", None), ("topk_weights", weights[:-1]),
        ("topk_weights", weights.double()),
        ("handle", None), ("handle", object()), ("handle", handle.as_tuple()),
        ("out", out.float()), ("out", out[:-1]), ("out", out.t()), ("out", shifted),
        (stats, torch.zeros(1, dtype=torch.int32)), (stats, 3),
    ]  # fmt: skip
    for name, value in refused:
        with pytest.raises(ArgumentError) as caught:
            buffer.low_latency_combine(**(plain | {name: value}))
        assert caught.value.argument == name, (name, value)
    with pytest.raises(HandleMismatch):  # of another top-k
        few = dict(topk_idx=idx[:, :1].clone(), topk_weights=weights[:, :1].clone())
        buffer.low_latency_combine(**(plain | few))
    assert engine.num_launches == 1
    buffer.low_latency_combine(**plain)
    assert engine.num_launches == 2


@run_by(on_ranks, 1)
def test_tensors_of_other_classes_and_flags_of_other_types_will_do(
    buffer: Any, rank: int, /
) -> None:
    x, idx, weights = inputs(rank)
    (want, _), want_count, *_ = buffer.low_latency_dispatch(x, idx, M, E, topk_weights=weights)
    (rows, _), count, handle, _, hook = buffer.low_latency_dispatch(
        x.as_subclass(Marked), torch.nn.Parameter(idx, requires_grad=False), M, E, None, None,
        1, 0, "", [], "a hook", topk_weights=weights.as_subclass(Marked), compact=None,
    )  # fmt: skip
    hook()
    assert type(rows) is torch.Tensor and type(count) is torch.Tensor
    assert torch.equal(count, want_count) and not handle.is_compact
    for expert, number in enumerate(count.tolist()):
        assert torch.equal(rows[expert, :number].float(), want[expert, :number].float())
    y = torch.ones(handle.rows_shape, dtype=torch.bfloat16)
    out = torch.empty_like(x).as_subclass(Marked)
    combined = buffer.low_latency_combine(y.as_subclass(Marked), idx, None, handle, out=out)[0]
    assert combined is out
    with pytest.raises(RuntimeError, match="ambiguous"):  # torch's
        buffer.low_latency_dispatch(x, idx, M, E, use_fp8=torch.ones(2))


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
def test_results_are_ordinary_tensors_of_torchs(form: dict[str, bool], mode: Any, way: str) -> None:
    def body(buffer: Any, rank: int) -> Any:
        with mode():
            return results(buffer, rank)

    def results(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)
        payload, count, handle, _, _ = buffer.low_latency_dispatch(
            x, idx, M, E, topk_weights=weights, **form
        )
        rows, scales = payload if isinstance(payload, tuple) else (payload, None)
        y = torch.ones(handle.rows_shape, dtype=torch.bfloat16)
        combined = buffer.low_latency_combine(y, idx, None, handle)[0]
        tensors = [rows, count, handle.metadata, combined, handle.recv_tokens]
        tensors += [] if scales is None else [scales]
        plain = torch.empty(1)
        for tensor in tensors:
            assert type(tensor) is torch.Tensor and tensor.device == buffer.device
            assert not tensor.requires_grad and tensor.is_inference() == plain.is_inference()
        assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
        assert handle.recv_tokens is handle.recv_tokens
        storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        # The counts and the handle's tensors are of the metadata; all else has memory of its own.
        assert storages[1] == storages[2] == storages[4]
        assert len(set(storages)) == len(storages) - 2

    on_ranks(body)


def test_no_memory_for_an_output_is_raised_as_torch_raises_it() -> None:
    experts, tokens, hidden = 64, 256, 7168  # rows of 117 MB: more than a thread has in reserve

    num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(tokens, hidden, 1, experts)

    def main(buffer: deep_comm.Buffer) -> None:
        x, idx = torch.zeros(1, hidden).bfloat16(), torch.zeros(1, 2, dtype=torch.int64)

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

    on_buffers(main, 1, 0, num_bytes, low_latency_mode=True, timeout_s=20)


@pytest.mark.usefixtures("poison")
@run_by(on_ranks, 1)
def test_outputs_are_poisoned_where_kernels_do_not_write(buffer: Any, rank: int, /) -> None:
    x, idx, _ = inputs(rank)
    for options in ({}, dict(async_finish=True), dict(return_recv_hook=True)):
        (rows, scales), count, _, _, hook = buffer.low_latency_dispatch(x, idx, M, E, **options)
        if hook is not None:
            hook()
        for expert, number in enumerate(count.tolist()):
            assert number < M
            for part in (rows, scales):
                unwritten = part[expert, number:].contiguous()
                assert bool((unwritten.view(torch.uint8) == 0xA5).all())
