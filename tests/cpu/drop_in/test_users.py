"""Programs written for DeepEP, argument by argument, against the drop-in on the host target."""

from __future__ import annotations

import drop_in
import forked
import pytest

from deep_comm import local

from users import megatron, others, sglang, vllm  # isort: skip


pytestmark = pytest.mark.usefixtures("on_the_host")


def run(fn, num_ranks: int, *args: object) -> None:
    local.run(lambda group: fn(group, *args), num_ranks, timeout_s=120)


def test_vllm_finds_the_names_it_annotates_with() -> None:
    vllm.annotations()


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("routing", ["distinct", "holes", "duplicates"])
def test_vllm_high_throughput(num_ranks: int, routing: str) -> None:
    run(vllm.high_throughput, num_ranks, routing, drop_in.HIDDEN, False, False)


def test_vllm_high_throughput_with_fp8_and_dual_batches() -> None:
    run(vllm.high_throughput, 2, "holes", drop_in.HIDDEN, True, True)


def test_vllm_high_throughput_with_rows_of_256_bytes() -> None:
    run(vllm.high_throughput, 2, "distinct", 128, False, False)


def test_vllm_keeps_two_handles() -> None:
    run(vllm.two_handles_in_flight, 3)


@pytest.mark.parametrize("use_fp8", [False, True])
@pytest.mark.parametrize("return_recv_hook", [False, True])
def test_vllm_low_latency(use_fp8: bool, return_recv_hook: bool) -> None:
    run(vllm.low_latency, 4, use_fp8, return_recv_hook)


@pytest.mark.parametrize("return_recv_hook", [False, True])
def test_vllm_low_latency_with_packed_exponents(return_recv_hook: bool) -> None:
    run(vllm.low_latency, 2, True, return_recv_hook, True)


@pytest.mark.parametrize("use_fp8", [False, True])
def test_vllm_low_latency_with_rows_of_four_bits(use_fp8: bool) -> None:
    run(vllm.low_latency_nvfp4, 4, use_fp8)


def test_vllm_low_latency_with_two_micro_batches() -> None:
    run(vllm.low_latency_micro_batches, 3)


def test_vllm_fault_tolerance() -> None:
    run(vllm.fault_tolerance, 3)


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("use_fp8", [False, True])
def test_vllm_elastic(is_captured: bool, use_fp8: bool) -> None:
    run(vllm.elastic, 3, is_captured, use_fp8, 64 if is_captured else None)


@pytest.mark.parametrize("is_captured", [False, True])
def test_vllm_elastic_with_a_scale_for_32_columns(is_captured: bool) -> None:
    run(vllm.elastic, 2, is_captured, True, None, True)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sglang_normal_and_low_latency_over_one_buffer(num_ranks: int) -> None:
    run(sglang.auto, num_ranks)


@pytest.mark.parametrize("is_prefill", [False, True])
def test_sglang_elastic(is_prefill: bool) -> None:
    run(sglang.elastic, 3, is_prefill)


@pytest.mark.parametrize("async_finish", [False, True])
def test_megatron_forward_and_backward(async_finish: bool) -> None:
    run(megatron.step, 3, async_finish)


@pytest.mark.parametrize("async_finish", [False, True])
def test_nemo_replays_the_dispatches_it_has_recorded(async_finish: bool) -> None:
    run(megatron.recorded, 3, async_finish)


def test_torchtitan_forward_and_backward() -> None:
    run(others.torchtitan, 3)


@pytest.mark.parametrize("is_rewritten", [False, True])
def test_lightllm_prefill(is_rewritten: bool) -> None:
    run(others.lightllm_prefill, 3, is_rewritten)


def test_lightllm_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_DEEP_EP_FULL_RDMA", "1")
    run(others.lightllm_decode, 2)


def test_lightllm_prefill_while_a_decode_is_under_way() -> None:
    run(others.lightllm_both, 2)


def test_lmdeploy() -> None:
    run(others.lmdeploy, 2)


def test_tensorrt_llm() -> None:
    run(others.tensorrt_llm, 4)


def test_slime_replaces_the_constructor() -> None:
    run(others.slime, 1)


def test_two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_RANKS_PER_NODE", "2")
    run(others.two_nodes, 4)


@pytest.mark.parametrize("routing", ["distinct", "holes"])
def test_vllm_high_throughput_over_two_nodes(routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_RANKS_PER_NODE", "2")
    monkeypatch.setattr(vllm, "RDMA_BYTES", 128 << 20)
    run(vllm.high_throughput, 4, routing, drop_in.HIDDEN, False, False)


@pytest.mark.parametrize(
    ("fn", "arguments"),
    [
        (vllm.elastic, (False, False, None)),
        (vllm.elastic, (True, True, 64)),
        (vllm.low_latency, (True, True)),
        (vllm.low_latency_micro_batches, ()),
        (vllm.low_latency_nvfp4, (False,)),
        (sglang.auto, ()),
        (sglang.elastic, (False,)),
        (sglang.elastic, (True,)),
        (megatron.step, (False,)),
        (megatron.step, (True,)),
        (others.torchtitan, ()),
        (others.lightllm_prefill, (False,)),
        (others.lightllm_prefill, (True,)),
    ],
    ids=lambda value: getattr(value, "__qualname__", str(value)),
)
def test_over_two_nodes_unmodified(fn, arguments: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_RANKS_PER_NODE", "2")
    run(fn, 4, *arguments)


def everything(group) -> None:
    """In processes over a torch.distributed group, as servers and trainers have it."""
    vllm.high_throughput(group, "holes", drop_in.HIDDEN, False, False)
    vllm.low_latency(group, True, True)
    vllm.low_latency_micro_batches(group)
    vllm.low_latency_nvfp4(group, False)
    vllm.elastic(group, False, True, None)
    sglang.auto(group)
    sglang.elastic(group, True)
    megatron.step(group, True)
    others.torchtitan(group)
    others.lightllm_both(group)
    others.lmdeploy(group)
    others.tensorrt_llm(group)
    others.slime(group)


def test_everything_between_processes() -> None:
    forked.run(
        everything, 2, variables={"DEEP_COMM_DEVICE": "cpu"},
        timeout_s=200,
    )  # fmt: skip
