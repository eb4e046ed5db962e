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


BOTH = (False, True)
PROGRAMS = [
    *(
        (vllm.high_throughput, num_ranks, (routing, drop_in.HIDDEN, False, False))
        for num_ranks in (2, 3, 4, 8)
        for routing in ("distinct", "holes", "duplicates")
    ),
    # FP8 and dual batches; rows of 256 bytes.
    (vllm.high_throughput, 2, ("holes", drop_in.HIDDEN, True, True)),
    (vllm.high_throughput, 2, ("distinct", 128, False, False)),
    (vllm.two_handles_in_flight, 3, ()),
    *((vllm.low_latency, 4, (use_fp8, has_hook)) for use_fp8 in BOTH for has_hook in BOTH),
    # Packed exponents.
    *((vllm.low_latency, 2, (True, has_hook, True)) for has_hook in BOTH),
    *((vllm.low_latency_nvfp4, 4, (use_fp8,)) for use_fp8 in BOTH),
    (vllm.low_latency_micro_batches, 3, ()),
    (vllm.fault_tolerance, 3, ()),
    *(
        (vllm.elastic, 3, (is_captured, use_fp8, 64 if is_captured else None))
        for is_captured in BOTH
        for use_fp8 in BOTH
    ),
    # A scale for 32 columns.
    *((vllm.elastic, 2, (is_captured, True, None, True)) for is_captured in BOTH),
    *((sglang.auto, num_ranks, ()) for num_ranks in (2, 4)),
    *((sglang.elastic, 3, (is_prefill,)) for is_prefill in BOTH),
    *((megatron.step, 3, (async_finish,)) for async_finish in BOTH),
    *((megatron.recorded, 3, (async_finish,)) for async_finish in BOTH),
    (others.torchtitan, 3, ()),
    *((others.lightllm_prefill, 3, (is_rewritten,)) for is_rewritten in BOTH),
    (others.lightllm_both, 2, ()),
    (others.lmdeploy, 2, ()),
    (others.tensorrt_llm, 4, ()),
    (others.slime, 1, ()),
]


def name_of(value: object) -> str:
    return getattr(value, "__qualname__", str(value))


@pytest.mark.parametrize(("fn", "num_ranks", "arguments"), PROGRAMS, ids=name_of)
def test_a_program_runs_as_it_was_written(fn, num_ranks: int, arguments: tuple) -> None:
    run(fn, num_ranks, *arguments)


def test_lightllm_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_DEEP_EP_FULL_RDMA", "1")
    run(others.lightllm_decode, 2)


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
    ids=name_of,
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
