"""The names of vLLM that the adapters use, or stand-ins for them where vLLM is not installed."""

from __future__ import annotations

import abc
import enum
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IS_AVAILABLE = importlib.util.find_spec("vllm") is not None
BATCHED_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.fused_batched_moe"
"""The module of vLLM's Triton experts of rows by expert."""
GROUPED_ROUTER = "vllm.model_executor.layers.fused_moe.router.grouped_topk_router"
"""The module of vLLM's router of grouped top-k."""

if IS_AVAILABLE:
    from vllm.distributed.device_communicators.base_device_communicator import (
        All2AllManagerBase,
    )
    from vllm.model_executor.layers.fused_moe.modular_kernel import (
        ExpertTokensMetadata,
        FusedMoEActivationFormat,
        FusedMoEPrepareAndFinalizeModular,
    )
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
        TopKWeightAndReduceContiguous,
        TopKWeightAndReduceDelegate,
    )
    from vllm.model_executor.layers.fused_moe.utils import (
        moe_kernel_quantize_input,
        normalize_batched_scales_shape,
    )
    from vllm.v1.worker.ubatching import (
        dbo_current_ubatch_id,
        dbo_enabled,
        dbo_get_previous_event,
        dbo_maybe_run_recv_hook,
        dbo_switch_to_comm,
        dbo_switch_to_compute,
        dbo_switch_to_compute_sync,
        dbo_yield_and_switch_from_comm_to_compute,
        dbo_yield_and_switch_from_compute_to_comm,
    )
else:

    class FusedMoEActivationFormat(enum.Enum):  # type: ignore[no-redef]
        Standard = ("standard",)
        BatchedExperts = ("batched_experts",)

    @dataclass
    class ExpertTokensMetadata:  # type: ignore[no-redef]
        expert_num_tokens: Tensor | None
        expert_num_tokens_cpu: Tensor | None
        psum_recv_per_rank: Tensor | None = None
        rank_expert_offset: int | None = None

    class FusedMoEPrepareAndFinalizeModular(abc.ABC):  # type: ignore[no-redef]  # noqa: B024
        pass

    class All2AllManagerBase:  # type: ignore[no-redef]
        def __init__(self, cpu_group: Any, tcp_store_group: Any = None) -> None:
            self.cpu_group = cpu_group
            self.tcp_store_group = tcp_store_group
            self.rank = cpu_group.rank()
            self.world_size = cpu_group.size()

    class TopKWeightAndReduceDelegate:  # type: ignore[no-redef]
        pass

    def _missing(*args: Any, **options: Any) -> Any:
        from deep_comm.errors import UnsupportedError

        raise UnsupportedError("this needs vLLM, which is not installed")

    TopKWeightAndReduceContiguous = _missing
    moe_kernel_quantize_input = normalize_batched_scales_shape = _missing

    def dbo_enabled() -> bool:
        return False

    def dbo_current_ubatch_id() -> int:
        return 0

    def dbo_get_previous_event(func: Callable[[], Any]) -> Any:
        return None

    def _nothing() -> None:
        return None

    dbo_maybe_run_recv_hook = dbo_switch_to_comm = dbo_switch_to_compute = _nothing
    dbo_switch_to_compute_sync = dbo_yield_and_switch_from_comm_to_compute = _nothing
    dbo_yield_and_switch_from_compute_to_comm = _nothing


def tokens_of_ranks() -> list[int] | None:
    """The numbers of tokens of all ranks in this step, which vLLM exchanges before it; None where
    it does not. If there are fewer numbers than ranks, each is that of as many ranks."""
    try:
        from vllm.forward_context import get_forward_context, is_forward_context_available
    except ImportError:
        return None
    if not is_forward_context_available():
        return None
    metadata = get_forward_context().dp_metadata
    shares = getattr(metadata, "local_sizes", None)  # in a layer whose tokens are split further
    if shares is not None:
        return list(shares)
    counts = getattr(metadata, "num_tokens_across_dp_cpu", None)
    return None if counts is None else counts.tolist()


def are_triton_experts_by_expert(experts: Any) -> bool:
    """Are these vLLM's own Triton experts of rows by expert?"""
    module = sys.modules.get(BATCHED_EXPERTS)  # loaded, if they are
    return isinstance(experts, getattr(module, "BatchedTritonExperts", ()))


def is_capturing() -> bool:
    """Does a CUDA graph take up what the current stream is given?"""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def most_captured_tokens() -> int:
    """The most tokens of a rank in a step that CUDA graphs hold. Asked while a model is built."""
    try:
        from vllm.config import get_current_vllm_config

        compilation = get_current_vllm_config().compilation_config
    except (ImportError, AttributeError, AssertionError):
        return 0  # none, or nobody knows: then graphs end with the error that says so
    mode = getattr(compilation, "cudagraph_mode", None)
    has_graphs = mode is not None and getattr(mode, "name", mode) != "NONE"
    return (getattr(compilation, "max_cudagraph_capture_size", 0) or 0) if has_graphs else 0


def rounds_scales() -> bool:
    """Are the scales of FP8 rows powers of two, as vLLM's own quantisation makes them?"""
    try:
        from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used
    except ImportError:
        return False
    return bool(is_deep_gemm_e8m0_used())


def is_fault_tolerant() -> bool:
    """Does this vLLM go on when a rank falls silent? Asked when a manager is made."""
    try:
        from vllm.config import get_current_vllm_config
    except ImportError:
        return False
    parallel = get_current_vllm_config().parallel_config
    return bool(getattr(parallel, "enable_fault_tolerance", False))  # older releases have none


def used_on_this_stream(*tensors: Tensor | None) -> None:
    """Under dual-batch overlap memory is allocated on one of two streams and read on the other:
    the allocator must not give it away while kernels of this one still use it."""
    if not dbo_enabled():
        return
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def weighted_input(
    a1: Tensor, topk_weights: Tensor, topk_ids: Tensor, apply_router_weight_on_input: bool
) -> Tensor:
    """Input that the router's only weight was applied to, if the model wants it so."""
    if not apply_router_weight_on_input:
        return a1
    if topk_ids.shape[1] != 1:
        from deep_comm.errors import ArgumentError

        raise ArgumentError(
            "apply_router_weight_on_input", f"top-{topk_ids.shape[1]}", "needs top-1 routing"
        )
    return a1 * topk_weights.to(a1.dtype)


__all__ = [
    "IS_AVAILABLE",
    "All2AllManagerBase",
    "ExpertTokensMetadata",
    "FusedMoEActivationFormat",
    "FusedMoEPrepareAndFinalizeModular",
    "TopKWeightAndReduceContiguous",
    "TopKWeightAndReduceDelegate",
    "dbo_current_ubatch_id",
    "dbo_enabled",
    "dbo_get_previous_event",
    "dbo_maybe_run_recv_hook",
    "dbo_switch_to_comm",
    "dbo_switch_to_compute",
    "dbo_switch_to_compute_sync",
    "dbo_yield_and_switch_from_comm_to_compute",
    "dbo_yield_and_switch_from_compute_to_comm",
    "is_capturing",
    "is_fault_tolerant",
    "moe_kernel_quantize_input",
    "most_captured_tokens",
    "normalize_batched_scales_shape",
    "rounds_scales",
    "tokens_of_ranks",
    "used_on_this_stream",
    "weighted_input",
]
