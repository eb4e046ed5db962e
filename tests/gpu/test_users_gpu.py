"""Programs written for DeepEP, argument by argument, against the drop-in on GPUs."""

from __future__ import annotations

import drop_in
import pytest
import torch
from gpu_cases import POISON, run

from users import megatron, others, sglang, vllm  # isort: skip


def call(group, fn, arguments: tuple) -> None:
    fn(group, *arguments)
    torch.cuda.synchronize()


CALLS = [
    *((vllm.high_throughput, (r, drop_in.HIDDEN, False, False))
      for r in ("distinct", "holes", "duplicates")),
    (vllm.high_throughput, ("holes", drop_in.HIDDEN, True, True)),
    (vllm.high_throughput, ("distinct", 128, False, False)),
    (vllm.two_handles_in_flight, ()),
    (vllm.fault_tolerance, ()),
    *((vllm.low_latency, (fp8, hook)) for fp8 in (False, True) for hook in (False, True)),
    (vllm.low_latency, (True, True, True)),
    (vllm.low_latency_micro_batches, ()),
    (vllm.low_latency_nvfp4, (False,)),
    (vllm.elastic, (False, True, None, True)),
    *((vllm.elastic, (captured, fp8, 64 if captured else None))
      for captured in (False, True) for fp8 in (False, True)),
    (sglang.auto, ()),
    (sglang.elastic, (True,)),
    (sglang.elastic, (False,)),
    (megatron.step, (False,)),
    (megatron.step, (True,)),
    (megatron.recorded, (True,)),
    (others.torchtitan, ()),
    (others.lightllm_prefill, (False,)),
    (others.lightllm_prefill, (True,)),
    (others.lightllm_both, ()),
    (others.lmdeploy, ()),
    (others.tensorrt_llm, ()),
    (others.slime, ()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fn", "arguments"), CALLS, ids=lambda v: getattr(v, "__qualname__", str(v))
)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_program(num_ranks: int, fn, arguments: tuple, backend: str) -> None:
    if backend == "nccl" and fn in (vllm.high_throughput, vllm.low_latency):
        pytest.skip("these programs hand over a gloo group")
    run(call, num_ranks, fn, arguments, backend=backend)


def captured_elastic(group, is_expanded: bool) -> None:
    """Dispatch and combine without CPU sync in one CUDA graph, replayed with other tokens."""
    import deep_ep

    rank, num_ranks = group.rank(), group.size()
    buffer = deep_ep.ElasticBuffer(
        group, num_max_tokens_per_rank=16, hidden=drop_in.HIDDEN, num_topk=drop_in.NUM_TOPK
    )
    x, ids, weights = drop_in.routed(rank, 8)
    first = drop_in.first_of(rank, num_ranks)

    def step():
        recv, recv_ids, recv_weights, handle, _ = buffer.dispatch(
            x, ids, weights, num_experts=drop_in.NUM_EXPERTS, do_cpu_sync=False,
            do_expand=is_expanded,
        )  # fmt: skip
        if is_expanded:
            ends = handle.psum_num_recv_tokens_per_expert
            rows = torch.arange(recv.shape[0], dtype=torch.int32, device=x.device)
            expert = torch.searchsorted(ends, rows, right=True)
            is_real = rows < ends[-1]
            scale = torch.where(is_real, recv_weights * (first + expert + 1), 0.0).unsqueeze(1)
            out = torch.where(is_real.unsqueeze(1), recv.float() * scale, 0.0).to(torch.bfloat16)
        else:
            is_real = (
                torch.arange(recv.shape[0], device=x.device)
                < handle.psum_num_recv_tokens_per_scaleup_rank[-1]
            ).unsqueeze(1)
            out = drop_in.local_experts(
                torch.where(is_real, recv.float(), 0.0), recv_ids, recv_weights, first
            )
        return buffer.combine(out, handle)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    stream.synchronize()
    drop_in.barrier(group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        combined = step()
    for seed in range(5):
        other = drop_in.routed(rank, 8, seed=seed + 1, routing="holes" if seed % 2 else "distinct")
        for old, new in zip((x, ids, weights), other, strict=True):
            old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(combined.float(), drop_in.dense(x, ids, weights)), seed
    drop_in.barrier(group)


@pytest.mark.parametrize("is_expanded", [False, True])
def test_elastic_without_cpu_sync_in_a_cuda_graph(num_ranks: int, is_expanded: bool) -> None:
    run(captured_elastic, num_ranks, is_expanded)


def test_lightllm_decode(num_ranks: int) -> None:
    variables = {**POISON, "DEEP_COMM_DEEP_EP_FULL_RDMA": "1"}
    run(others.lightllm_decode, num_ranks, variables=variables)


@pytest.mark.parametrize(
    ("fn", "arguments"),
    [
        (others.two_nodes, ()),
        (megatron.step, (True,)),
        (vllm.elastic, (False, True, None)),
        (vllm.elastic, (True, False, 64)),
        (sglang.elastic, (True,)),
        (others.torchtitan, ()),
        (others.lightllm_prefill, (True,)),
    ],
    ids=lambda value: getattr(value, "__qualname__", str(value)),
)
def test_program_over_two_logical_nodes(num_ranks: int, fn, arguments: tuple) -> None:
    if num_ranks % 2 != 0:
        pytest.skip("needs an even number of GPUs")
    variables = {**POISON, "DEEP_COMM_RANKS_PER_NODE": str(num_ranks // 2)}
    run(call, num_ranks, fn, arguments, variables=variables)
