"""vLLM: the release, what stands in for the parts it needs, and its three steps of a layer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import drop_in
import torch
import torch.distributed as dist
from drop_in import NUM_EXPERTS, NUM_TOPK
from torch import Tensor

from deep_comm.settings import env
from released import host
from released.package import released
from released.program import Checks, Release, synchronise

_MOE = "model_executor.layers.fused_moe"
_QUANT = "model_executor.layers.quantization.utils"
MOE, QUANT = f"vllm.{_MOE}", f"vllm.{_QUANT}"
ALL2ALL = "vllm.distributed.device_communicators.all2all"

RELEASE = Release(
    "vllm", "0.33.0", "vllm",
    (
        f"{_MOE}.prepare_finalize.deepep_ht",
        f"{_MOE}.prepare_finalize.deepep_ll",
        f"{_MOE}.prepare_finalize.deepep_v2",
        f"{_MOE}.activation",
        f"{_MOE}.all2all_utils",
        f"{_MOE}.config",
        f"{_MOE}.modular_kernel",
        f"{_MOE}.moe_output",
        f"{_MOE}.topk_weight_and_reduce",
        f"{_MOE}.utils",
        f"{_QUANT}.ocp_mx_utils",
        f"{_QUANT}.quant_utils",
        "distributed.device_communicators.all2all",
        "distributed.device_communicators.base_device_communicator",
        "envs",
        "scalar_type",
        "utils.math_utils",
        "v1.worker.ubatching",
    ),
)  # fmt: skip

MAX_TOKENS = 64
NVFP4_SCALE = 448.0  # 448 * 6 / 6, the largest magnitude sent
CONFIG = SimpleNamespace(
    parallel_config=SimpleNamespace(enable_fault_tolerance=False),
    model_config=SimpleNamespace(enforce_eager=True),
    scheduler_config=SimpleNamespace(max_num_batched_tokens=MAX_TOKENS),
)
FORWARD = SimpleNamespace(dp_metadata=None)


class _Logger(logging.Logger):
    def __getattr__(self, name: str) -> Any:
        if name.endswith("_once"):
            return getattr(self, name.removesuffix("_once"))
        raise AttributeError(name)


class _Platform:
    """A CUDA device as far as the adapters ask."""

    simple_compile_backend = "eager"

    def is_cuda_alike(self) -> bool:
        return True

    is_cuda = is_cuda_alike

    def is_rocm(self) -> bool:
        return False

    is_xpu = is_cpu = is_tpu = is_rocm

    def fp8_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn


def quantise(x: Tensor, group_size: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    """[T, H] -> e4m3 and float32 scales [T, H / group_size], powers of two, so that what
    `drop_in.routed` makes keeps its value.
    """
    blocks = x.float().unflatten(-1, (-1, group_size))
    largest = blocks.abs().amax(dim=-1).clamp(min=1e-4)
    exponents = torch.ceil(torch.log2(largest / 448)).to(torch.int32)
    scales = (exponents + 127 << 23).view(torch.float32)
    rows = (blocks / scales.unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn)
    return rows, scales


def _quantise_mx(x: Tensor, is_swizzled: bool, alignment: int) -> tuple[Tensor, Tensor]:
    """[T, H] -> e4m3 and uint8 exponents [T, H / 32], row by row."""
    assert not is_swizzled
    rows, scales = quantise(x, 32)
    return rows, (scales.view(torch.int32) >> 23).to(torch.uint8)


def _moe_sum(rows: Tensor, out: Tensor) -> None:
    out.copy_(rows.float().sum(dim=1))


def _everyone() -> Any:
    return SimpleNamespace(rank_in_group=dist.get_rank(), world_size=dist.get_world_size())


def _same_node(group: Any, source_rank: int = 0) -> list[bool]:
    per_node = env.RANKS_PER_NODE.get() or group.size()
    return [rank // per_node == source_rank // per_node for rank in range(group.size())]


class _BatchedTritonExperts:
    """What an adapter asks of vLLM's Triton experts of rows by expert, and tells them."""

    def __init__(self) -> None:
        self.max_num_tokens = MAX_TOKENS

    def supports_packed_ue8m0_act_scales(self) -> bool:
        return False


def stand_ins() -> Mapping[str, Mapping[str, Any]]:
    alone = SimpleNamespace(rank_in_group=0, world_size=1)
    groups = {
        "get_dp_group": _everyone,
        "get_tp_group": lambda: alone,
        "get_pcp_group": lambda: alone,
        "in_the_same_node_as": _same_node,
    }
    stream = host.current_stream
    if drop_in.device().type == "cuda":
        stream = torch.cuda.current_stream
        import triton
        import triton.language as tl
    else:
        from released.kernels import tl, triton
    there = {name: lambda: True for name in ("has_deep_ep", "has_deep_ep_v2")}
    others = ("has_mori", "has_nixl_ep", "has_moonep", "get_triton_kernels_version")
    return {
        "vllm.logger": {"init_logger": _Logger},
        "vllm.platforms": {"current_platform": _Platform()},
        "vllm.config": {"get_current_vllm_config": lambda: CONFIG},
        "vllm.distributed": groups,
        "vllm.distributed.parallel_state": groups,
        "vllm.forward_context": {
            "get_forward_context": lambda: FORWARD,
            "is_forward_context_available": lambda: FORWARD.dp_metadata is not None,
        },
        "vllm.utils.torch_utils": {"current_stream": stream, "PIN_MEMORY": False},
        "vllm.utils.deep_gemm": {"is_deep_gemm_e8m0_used": lambda: False},
        "vllm.utils.import_utils": {
            **there,
            **{name: lambda: None for name in others},
            "deep_ep_v2_unavailable_reason": lambda: "",
        },
        "vllm.triton_utils": {"triton": triton, "tl": tl},
        "vllm._aiter_ops": {
            "rocm_aiter_ops": SimpleNamespace(
                is_fused_moe_enabled=lambda: False,
                is_fusion_moe_shared_experts_enabled=lambda: False,
            )
        },
        "vllm._custom_ops": {"moe_sum": _moe_sum},
        f"{MOE}.experts.fused_batched_moe": {"BatchedTritonExperts": _BatchedTritonExperts},
        f"{QUANT}.fp8_utils": {"per_token_group_quant_fp8": quantise},
        f"{QUANT}.mxfp8_utils": {"MXFP8_BLOCK_SIZE": 32, "mxfp8_e4m3_quantize": _quantise_mx},
    }


def quant_config(kind: str) -> Any:
    """vLLM's own, of experts that take "bf16", "fp8" in blocks of 128, "mxfp8" or "nvfp4"."""
    config = released(f"{MOE}.config")
    if kind == "bf16":
        return config.FusedMoEQuantConfig.make()
    scale = torch.ones(1)
    if kind == "mxfp8":
        return config.mxfp4_mxfp8_moe_quant_config(scale, scale, is_scale_swizzled=False)
    if kind == "nvfp4":
        sent = torch.full((1,), NVFP4_SCALE, device=drop_in.device())
        return config.nvfp4_moe_quant_config(scale, scale, sent, sent, scale, scale)
    return config.fp8_w8a8_moe_quant_config(w1_scale=scale, w2_scale=scale, block_shape=[128, 128])


def moe_config(group: Any, backend: str, hidden: int, num_topk: int = NUM_TOPK) -> Any:
    """vLLM's description of a layer whose ranks are all data-parallel."""
    config = released(f"{MOE}.config")
    rank, num_ranks = group.rank(), group.size()
    parallel = config.FusedMoEParallelConfig(
        tp_size=1, pcp_size=1, dp_size=num_ranks, ep_size=num_ranks, tp_rank=0, pcp_rank=0,
        dp_rank=rank, ep_rank=rank, sp_size=1, use_ep=True, all2all_backend=backend,
        enable_eplb=False,
    )  # fmt: skip
    return config.FusedMoEConfig(
        num_experts=NUM_EXPERTS, experts_per_token=num_topk, hidden_dim=hidden,
        intermediate_size=hidden, num_local_experts=NUM_EXPERTS // num_ranks,
        num_logical_experts=NUM_EXPERTS,
        activation=released(f"{MOE}.activation").MoEActivation.SILU,
        device=drop_in.device(), routing_method=config.RoutingMethodType.Default,
        moe_parallel_config=parallel, in_dtype=torch.bfloat16, max_num_tokens=MAX_TOKENS,
    )  # fmt: skip


def values(rows: Tensor, scales: Tensor | None) -> Tensor:
    if rows.dtype == torch.uint8 and scales is not None:  # two e2m1 in a byte
        global_scale = torch.full((), NVFP4_SCALE, device=rows.device)
        return drop_in.dequantised_nvfp4(rows.permute(1, 2, 0), scales, global_scale)
    if scales is not None and scales.dtype == torch.uint8:  # exponents of 32 columns each
        factors = (scales.to(torch.int32) << 23).view(torch.float32)
        return (rows.float().unflatten(-1, (-1, 32)) * factors.unsqueeze(-1)).flatten(-2)
    return rows.float() if scales is None else drop_in.dequantised(rows, scales)


def routed(rank: int, num_tokens: int, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`drop_in.routed` with every other row and block of 32 columns halved, so that neighbours have
    other scales.
    """
    x, ids, weights = drop_in.routed(rank, num_tokens, **options)
    x[1::2] *= 0.5
    x.unflatten(-1, (-1, 32))[:, 1::2] *= 0.5
    return x, ids, weights


def for_nvfp4(x: Tensor) -> None:
    """Change rows of :func:`routed` so that e2m1 holds every element: equal blocks."""
    x.unflatten(-1, (-1, 32))[:, 1::2] *= 2
    x[:, ::16] = 6.0
    x[1::2, ::16] = 3.0


def standard_experts(x: Tensor, ids: Tensor, first: int, num_local: int) -> Tensor:
    """[N, K, H] of rows [N, H] with global ids [N, K]: expert e multiplies by e + 1."""
    is_local = (ids >= first) & (ids < first + num_local)
    factors = torch.where(is_local, ids + 1, 0).float().unsqueeze(-1)
    # Rows that never came may hold anything.
    x = torch.where(is_local.any(dim=1, keepdim=True), x, 0.0)
    return (x.unsqueeze(1) * factors).to(torch.bfloat16)


class _Experts:
    """What vLLM's modular kernel asks of experts."""

    expects_unquantized_inputs = False
    moe_config = SimpleNamespace(moe_parallel_config=None)

    def __init__(self, kind: str) -> None:
        self.quant_config = quant_config(kind)

    def finalize_weight_and_reduce_impl(self) -> Any:
        """Weights and sums are the adapter's."""
        return released(f"{MOE}.topk_weight_and_reduce").TopKWeightAndReduceDelegate()


def layer(
    adapter: Any, tokens: tuple[Tensor, Tensor, Tensor], kind: str, is_async: bool, compute: Any,
    output: Tensor, is_weighted: bool = False,
) -> None:  # fmt: skip
    """Prepare, experts, finalise into ``output``: by vLLM's modular kernel, which takes the
    asynchronous halves, or in one piece each.

    ``compute(rows, counts, ids)`` are the experts. ``is_weighted``: weights on the input (top-1).
    """
    x, ids, weights = tokens
    experts = _Experts(kind)
    kernel = released(f"{MOE}.modular_kernel").FusedMoEKernelModularImpl(adapter, experts)
    arguments = (x, weights, ids, NUM_EXPERTS, None, is_weighted)
    if is_async:
        rows, scales, meta, recv_ids, recv_weights = kernel._prepare(*arguments)
        out = compute(values(rows, scales), meta, recv_ids)
        kernel._finalize(output, out, x, recv_weights, recv_ids, is_weighted, None, None)
        return
    rows, scales, meta, recv_ids, recv_weights = adapter.prepare(
        *arguments, experts.quant_config, False
    )
    out = compute(values(rows, scales), meta, recv_ids)
    if recv_ids is None:  # what travels without ids is weighted with those of the sender
        recv_ids, recv_weights = ids, weights
    impl = experts.finalize_weight_and_reduce_impl()
    adapter.finalize(output, out, recv_weights, recv_ids, is_weighted, impl)


def step(
    checks: Checks, adapter: Any, tokens: tuple[Tensor, Tensor, Tensor], kind: str, is_async: bool,
    compute: Any, what: str, is_weighted: bool = False, share: float = 0.0,
    expected: Tensor | None = None,
) -> None:  # fmt: skip
    """A layer, compared.

    ``share``: of the largest magnitude that quantisation may be off by. ``expected``: if it is not
    the whole dense layer.
    """
    output = torch.full_like(tokens[0], float("nan"))
    layer(adapter, tokens, kind, is_async, compute, output, is_weighted)
    synchronise()
    if expected is None:
        expected = drop_in.dense(*tokens)
    checks.agrees(output, expected, share, what)
