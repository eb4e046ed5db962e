"""deep_comm.integrations.sglang against stand-ins of SGLang's interfaces (stubs/sglang)."""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import drop_in
import pytest
import torch
from drop_in import HIDDEN, NUM_EXPERTS, NUM_TOPK
from run_by import run_by

from deep_comm import UnsupportedError, errors, local

STUBS = Path(__file__).resolve().parents[2] / "support" / "stubs"
sys.path.insert(0, str(STUBS))

from sglang.srt.batch_overlap import two_batch_overlap
from sglang.srt.eplb.expert_distribution import (
    get_global_expert_distribution_recorder,
)
from sglang.srt.layers import deep_gemm_wrapper
from sglang.srt.layers.dp_attention import set_is_extend_in_batch
from sglang.srt.layers.moe import token_dispatcher, utils
from sglang.srt.layers.moe.fused_moe_triton.layer import create_moe_dispatcher
from sglang.srt.layers.moe.token_dispatcher import base, deepep
from sglang.srt.layers.moe.utils import DeepEPMode

from deep_comm.integrations import sglang as adapter
from deep_comm.integrations.sglang import dispatcher as module
from deep_comm.integrations.sglang import interface

ORIGINAL = deepep.DeepEPDispatcher
H = 2 * HIDDEN


@pytest.fixture(autouse=True)
def server_defaults(on_the_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "16")
    for place in (deepep, token_dispatcher, two_batch_overlap):
        monkeypatch.setattr(place, "DeepEPDispatcher", ORIGINAL)


def options(group, mode=DeepEPMode.AUTO, **more):
    return dict(
        group=group, router_topk=NUM_TOPK, permute_fusion=True, num_experts=NUM_EXPERTS,
        num_local_experts=NUM_EXPERTS // group.size(), hidden_size=H, params_dtype=torch.bfloat16,
        deepep_mode=mode, **more,
    )  # fmt: skip


def test_signatures_are_those_of_the_dispatcher_in_whose_place_it_comes() -> None:
    ours = adapter.DeepCommDispatcher
    assert issubclass(ours, base.BaseDispatcher) and not ours.__abstractmethods__
    for name in (
        "__init__", "dispatch", "dispatch_a", "dispatch_b", "combine", "combine_a", "combine_b",
        "set_quant_config", "set_overlap_args", "clear_overlap_args",
        "register_deepep_dispatch_hook",
    ):  # fmt: skip
        wanted = inspect.signature(getattr(ORIGINAL, name)).parameters
        got = inspect.signature(getattr(ours, name)).parameters
        shared = list(got)[: len(wanted)]
        assert shared == list(wanted), name
        assert [got[p].default for p in shared] == [p.default for p in wanted.values()], name
        rest = list(got.values())[len(wanted) :]
        assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in rest), name


def run_experts(output, first: int):
    """What SGLang's runners do with either format: returns the input of combine."""
    if output.format is base.DispatchOutputFormat.DEEPEP_NORMAL:
        x, scales, ids, weights, counts = output
        assert all(type(count) is int and count % 128 == 0 for count in counts)
        rows = x.float() if scales is None else drop_in.dequantised(x, scales)
        out = drop_in.local_experts(rows, ids, weights, first)
        return deepep.DeepEPNormalCombineInput(out, ids, weights)
    assert output.format is base.DispatchOutputFormat.DEEPEP_LL
    x, scales, ids, weights, masked_m, expected_m = output
    rows = x.float() if scales is None else drop_in.dequantised(x, scales)
    out = drop_in.masked_experts(rows, masked_m, first)
    return deepep.DeepEPLLCombineInput(out, ids, weights)


def topk_output(ids, weights):
    return SimpleNamespace(topk_ids=ids.to(torch.int32), topk_weights=weights, router_logits=None)


def check(x, ids, weights, combined, is_exact: bool) -> None:
    wanted = drop_in.dense(x, ids, weights)
    tolerance = 0.0 if is_exact else 0.08 * float(wanted.abs().max())
    assert float((combined.float() - wanted).abs().max()) <= tolerance


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("ranks_per_node", [8, 1])
def test_both_modes_step_by_step(
    ranks_per_node: int, is_async: bool, bf16: bool, monkeypatch
) -> None:
    monkeypatch.setenv("SGLANG_DEEPEP_BF16_DISPATCH", str(int(bf16)))
    monkeypatch.setenv("DEEP_COMM_RANKS_PER_NODE", str(ranks_per_node))

    def fn(group):
        rank, num_ranks = group.rank(), group.size()
        adapter.register()
        dispatcher = create_moe_dispatcher(
            num_inner=1, **options(group, async_finish=is_async, return_recv_hook=is_async)
        )
        first = drop_in.first_of(rank, num_ranks)
        seen = []
        for step, is_extend in enumerate((True, False, False, True)):
            set_is_extend_in_batch(is_extend)
            x, ids, weights = drop_in.routed(rank, 5 + rank, hidden=H, seed=step, routing="holes")
            output = dispatcher.dispatch(hidden_states=x, topk_output=topk_output(ids, weights))
            assert isinstance(output, base.DispatchOutput)
            assert (output.hidden_states_scale is None) == bf16
            seen.append(output.format is base.DispatchOutputFormat.DEEPEP_NORMAL)
            combined = dispatcher.combine(combine_input=run_experts(output, first))
            check(x, ids, weights, combined, is_exact=is_extend or bf16)
        assert seen == [True, False, False, True]
        recorder = get_global_expert_distribution_recorder()
        assert [entry[0] for entry in recorder.seen[-4:]] == [
            "normal", "low_latency", "low_latency", "normal",
        ]  # fmt: skip
        group.barrier()

    local.run(fn, 2, timeout_s=60)


@pytest.mark.parametrize("mode", [DeepEPMode.NORMAL, DeepEPMode.LOW_LATENCY])
@pytest.mark.parametrize("ranks_per_node", [8, 1])
def test_two_halves_of_a_batch_overlap(ranks_per_node: int, mode: DeepEPMode, monkeypatch) -> None:
    """dispatch_a of one half, then of the other, before either receives; likewise combine."""
    monkeypatch.setenv("DEEP_COMM_RANKS_PER_NODE", str(ranks_per_node))
    monkeypatch.setenv("SGLANG_DEEPEP_BF16_DISPATCH", "1")

    def fn(group):
        rank, num_ranks = group.rank(), group.size()
        adapter.register()
        dispatcher = create_moe_dispatcher(
            **options(group, mode, async_finish=True, return_recv_hook=True)
        )
        assert len(module._buffers) <= 1
        first = drop_in.first_of(rank, num_ranks)
        halves = [drop_in.routed(rank, 4 + half, hidden=H, seed=half) for half in range(2)]
        for half, (x, ids, weights) in enumerate(halves):
            dispatcher.dispatch_a(
                hidden_states=x, topk_output=topk_output(ids, weights), tbo_subbatch_index=half
            )
        inputs = [
            run_experts(dispatcher.dispatch_b(tbo_subbatch_index=half), first) for half in range(2)
        ]
        for half in range(2):
            dispatcher.combine_a(combine_input=inputs[half], tbo_subbatch_index=half)
        for half, (x, ids, weights) in enumerate(halves):
            check(x, ids, weights, dispatcher.combine_b(tbo_subbatch_index=half), is_exact=True)
        group.barrier()

    local.run(fn, 2, timeout_s=60)


@run_by(local.run, 1, timeout_s=60)
def test_stages_hooks_and_what_is_not_offered(group, /) -> None:
    set_is_extend_in_batch(False)
    dispatcher = adapter.DeepCommDispatcher(**options(group))
    x, ids, weights = drop_in.routed(0, 3, hidden=H)
    calls = []
    with pytest.raises(errors.ArgumentError, match="dispatch_b"):
        dispatcher.dispatch_b()
    registration = dispatcher.register_deepep_dispatch_hook(lambda d: calls.append(d))
    dispatcher.register_post_combine_hook(lambda d, out: out * 2)
    output = dispatcher.dispatch(x, topk_output(ids, weights))
    assert calls == [dispatcher]
    registration.remove()
    # 3 tokens * 4 selections over 16 experts, rounded up as SGLang's runners expect it.
    assert output.expected_m == (3 * group.size() * NUM_TOPK + NUM_EXPERTS) // NUM_EXPERTS
    combined = dispatcher.combine(run_experts(output, 0))
    assert float((combined / 2 - drop_in.dense(x, ids, weights)).abs().max()) < 8
    output = dispatcher.dispatch(x, topk_output(ids, weights))
    assert calls == [dispatcher]
    dispatcher.set_overlap_args(SimpleNamespace(overlap=True), {"block_m": 64})
    with pytest.raises(UnsupportedError, match="overlap"):
        dispatcher.combine(run_experts(output, 0))
    # A call that was refused can be made again, and so can those after it.
    dispatcher.set_overlap_args(None, None)
    dispatcher.combine(run_experts(output, 0))
    with pytest.raises(errors.ArgumentError, match="^topk_idx "):
        dispatcher.dispatch_a(x, topk_output(ids[:2], weights))
    dispatcher.combine(run_experts(dispatcher.dispatch(x, topk_output(ids, weights)), 0))
    with pytest.raises(errors.ArgumentError, match="num_experts"):
        adapter.DeepCommDispatcher(group, 4)


@pytest.mark.parametrize("is_prefill", [False, True])
@run_by(local.run, 1, timeout_s=60)
def test_goes_on_after_a_dispatch_that_failed(group, /, is_prefill: bool) -> None:
    set_is_extend_in_batch(is_prefill)
    dispatcher = adapter.DeepCommDispatcher(**options(group))
    x, ids, weights = drop_in.routed(0, 3, hidden=H)
    for _ in range(2):
        with pytest.raises(errors.ExpertIndexError):
            dispatcher.dispatch(x, topk_output(ids + NUM_EXPERTS, weights))
        output = dispatcher.dispatch(x, topk_output(ids, weights))
        combined = dispatcher.combine(run_experts(output, 0))
        assert float((combined - drop_in.dense(x, ids, weights)).abs().max()) < 4


@run_by(local.run, 2, timeout_s=60)
def test_rows_of_four_bits_in_the_shapes_of_the_fork(group, /) -> None:
    set_is_extend_in_batch(False)
    dispatcher = adapter.DeepCommDispatcher(**options(group))
    x_global_scale = torch.full((1,), 448.0)
    dispatcher.set_quant_config({"input_global_scale": x_global_scale})
    x, ids, weights = drop_in.routed(group.rank(), 4, hidden=H, routing="holes")
    x[:, ::16] = 6.0  # so that all values are exact
    output = dispatcher.dispatch(x, topk_output(ids, weights))
    assert output.format is base.DispatchOutputFormat.DEEPEP_LL
    assert output.hidden_states.shape[1:] == (H // 2, NUM_EXPERTS // 2)
    rows = drop_in.dequantised_nvfp4(
        output.hidden_states, output.hidden_states_scale, x_global_scale
    )
    out = drop_in.masked_experts(rows, output.masked_m, drop_in.first_of(group.rank(), 2))
    combined = dispatcher.combine(
        deepep.DeepEPLLCombineInput(out, output.topk_ids, output.topk_weights)
    )
    check(x, ids, weights, combined, is_exact=True)
    group.barrier()


@pytest.mark.parametrize(
    ("argument", "quant_config", "runner", "expected"),
    [
        ("auto", {}, None, ("fp8", "fp8")),
        ("bf16", {}, None, ("bf16", "bf16")),
        ("int8", {}, None, ("fp8", "fp8")),
        ("auto", {"dispatcher_output_dtype": "bf16"}, None, ("bf16", "bf16")),
        ("auto", {"low_latency_dispatcher_output_dtype": "bf16"}, None, ("fp8", "bf16")),
        ("auto", {"normal_dispatcher_output_dtype": "bf16"}, None, ("bf16", "fp8")),
        ("auto", {}, "flashinfer_cutedsl", ("bf16", "bf16")),
    ],
)
def test_rows_travel_as_the_server_the_layer_and_its_runner_want(
    argument: str, quant_config: dict, runner: str | None, expected: tuple, monkeypatch
) -> None:
    monkeypatch.setitem(utils.server_arguments, "deepep_dispatcher_output_dtype", argument)
    backend = None
    if runner is not None:
        backend = SimpleNamespace(is_flashinfer_cutedsl=lambda: runner == "flashinfer_cutedsl")

    def fn(group):
        adapter.register()
        dispatcher = create_moe_dispatcher(num_inner=1, runner_backend=backend, **options(group))
        dispatcher.set_quant_config(quant_config)
        assert dispatcher.expert_mask_gpu is None
        for is_extend, kind in zip((True, False), expected, strict=True):
            set_is_extend_in_batch(is_extend)
            x, ids, weights = drop_in.routed(0, 4, hidden=H)
            output = dispatcher.dispatch(hidden_states=x, topk_output=topk_output(ids, weights))
            assert (output.hidden_states_scale is not None) == (kind == "fp8")
            combined = dispatcher.combine(combine_input=run_experts(output, 0))
            check(x, ids, weights, combined, is_exact=is_extend or kind == "bf16")

    local.run(fn, 1, timeout_s=60)


def test_rows_for_other_devices_are_refused_by_name(monkeypatch) -> None:
    monkeypatch.setitem(utils.server_arguments, "deepep_dispatcher_output_dtype", "mxfp8")

    def fn(group):
        with pytest.raises(UnsupportedError, match="mxfp8"):
            adapter.DeepCommDispatcher(**options(group))

    local.run(fn, 1, timeout_s=60)


@pytest.mark.parametrize("is_packed", [False, True])
def test_scales_before_dispatch_are_what_the_matrix_products_take(
    is_packed: bool, monkeypatch
) -> None:
    """Some GPUs want packed exponents in normal mode and have no low-latency form of them."""
    monkeypatch.setattr(deep_gemm_wrapper, "DEEPGEMM_SCALE_UE8M0", is_packed)
    asked = []

    def quantise(x, ue8m0):
        asked.append(ue8m0)
        return interface.quantise(x, False)

    def fn(group):
        dispatcher = adapter.DeepCommDispatcher(
            **options(group, DeepEPMode.NORMAL), quantise=quantise
        )
        x, ids, weights = drop_in.routed(0, 3, hidden=H)
        output = dispatcher.dispatch(x, topk_output(ids, weights))
        check(x, ids, weights, dispatcher.combine(run_experts(output, 0)), is_exact=True)
        assert not dispatcher.formats.ue8m0

    local.run(fn, 1, timeout_s=60)
    assert asked == [is_packed]


def test_quantises_where_older_releases_have_their_kernel(monkeypatch) -> None:
    place = "sglang.kernels.ops.quantization.fp8_kernel"
    kernel = importlib.import_module(place)
    older = "sglang.srt.layers.quantization"
    monkeypatch.setitem(sys.modules, older, ModuleType(older))
    monkeypatch.setitem(sys.modules, f"{older}.fp8_kernel", kernel)
    monkeypatch.setitem(sys.modules, place, None)
    rows, scales = interface.quantise(torch.ones(2, 256, dtype=torch.bfloat16), False)
    assert rows.dtype == torch.float8_e4m3fn and scales.shape == (2, 2)


@run_by(local.run, 1, timeout_s=60)
def test_layers_share_a_buffer_that_goes_with_them(group, /) -> None:
    first = adapter.DeepCommDispatcher(**options(group))
    second = adapter.DeepCommDispatcher(**options(group))
    assert first.buffer is second.buffer and first.buffer.low_latency_mode
    other = adapter.DeepCommDispatcher(**options(group, DeepEPMode.NORMAL))
    assert other.buffer is not first.buffer and not other.buffer.low_latency_mode
    first.buffer.destroy()
    third = adapter.DeepCommDispatcher(**options(group))
    assert third.buffer is not second.buffer  # which nobody can use any more
    del first, second, third, other
    gc.collect()
    assert len(module._buffers) == 0


def test_register_exchanges_the_class_wherever_it_was_imported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "deep_comm")
    assert len(adapter.register()) == 3 == len(adapter.register())
    assert "serves SGLang's --moe-a2a-backend deepep" in caplog.messages[0]
    for place in (deepep, token_dispatcher, two_batch_overlap):
        assert place.DeepEPDispatcher is adapter.DeepCommDispatcher


def test_register_refuses_an_sglang_that_it_does_not_know(monkeypatch) -> None:
    monkeypatch.delattr(deepep, "DeepEPDispatcher")
    with pytest.raises(UnsupportedError, match="DeepEPDispatcher"):
        adapter.register()
    assert two_batch_overlap.DeepEPDispatcher is ORIGINAL


def python(*arguments: str, path: str = "") -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, cwd="/",
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def test_launcher_reaches_the_workers_of_the_server() -> None:
    done = python(
        "-m", "deep_comm.integrations.sglang.launch", "--model-path", "m", path=str(STUBS)
    )
    ours = "deep_comm.integrations.sglang.dispatcher"
    assert done.stdout.split("] ")[1].split() == [ours, ours], done.stdout + done.stderr
    assert "'--model-path', 'm'" in done.stdout


def test_imports_without_sglang() -> None:
    code = (
        "from deep_comm.integrations import sglang\nfrom deep_comm.errors import "
        "UnsupportedError\nassert sglang.DeepCommDispatcher\ntry:\n    "
        "sglang.register()\nexcept UnsupportedError as error:\n    print('refused', error)\n"
    )
    done = python("-c", code)
    assert done.stdout.startswith("refused"), done.stdout + done.stderr
    done = python("-m", "deep_comm.integrations.sglang.launch", "--help")
    assert done.returncode == 1 and "No module named 'sglang'" in done.stderr
    assert "SGLang is not installed here" in done.stderr and "Traceback" not in done.stderr
