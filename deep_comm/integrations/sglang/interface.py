"""The names of SGLang that the dispatcher uses, or stand-ins for them
where SGLang is not installed.
"""

from __future__ import annotations

import enum
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor

from deep_comm.errors import UnsupportedError

IS_AVAILABLE = importlib.util.find_spec("sglang") is not None

if IS_AVAILABLE:
    from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
    from sglang.srt.layers.moe.token_dispatcher.deepep import (
        DeepEPLLDispatchOutput,
        DeepEPNormalDispatchOutput,
    )
    from sglang.srt.layers.moe.utils import DeepEPMode
else:

    class DispatchOutputFormat(enum.Enum):
        DEEPEP_NORMAL = "deepep_normal"
        DEEPEP_LL = "deepep_ll"

    class DeepEPNormalDispatchOutput(NamedTuple):  # type: ignore[no-redef]
        hidden_states: Tensor
        hidden_states_scale: Tensor | None
        topk_ids: Tensor
        topk_weights: Tensor
        num_recv_tokens_per_expert: list[int]

        @property
        def format(self) -> DispatchOutputFormat:
            return DispatchOutputFormat.DEEPEP_NORMAL

    class DeepEPLLDispatchOutput(NamedTuple):  # type: ignore[no-redef]
        hidden_states: Tensor
        hidden_states_scale: Tensor | None
        topk_ids: Tensor
        topk_weights: Tensor
        masked_m: Tensor
        expected_m: int

        @property
        def format(self) -> DispatchOutputFormat:
            return DispatchOutputFormat.DEEPEP_LL

    class DeepEPMode(enum.Enum):  # type: ignore[no-redef]
        NORMAL = "normal"
        LOW_LATENCY = "low_latency"
        AUTO = "auto"

        def enable_normal(self) -> bool:
            return self is not DeepEPMode.LOW_LATENCY

        def enable_low_latency(self) -> bool:
            return self is not DeepEPMode.NORMAL

        def resolve(self, is_extend_in_batch: bool) -> DeepEPMode:
            if self is not DeepEPMode.AUTO:
                return self
            return DeepEPMode.NORMAL if is_extend_in_batch else DeepEPMode.LOW_LATENCY

    class BaseDispatcher:  # type: ignore[no-redef]
        def __init__(self) -> None:
            self.quant_config: dict[str, Any] | None = None
            self.runner_backend: Any = None
            self.overlap_args: Any = None
            self.meta_overlap_args: dict[str, Any] | None = None

        def set_quant_config(self, quant_config: dict[str, Any]) -> None:
            self.quant_config = quant_config

        def set_overlap_args(self, combine_overlap_args: Any, meta_overlap_args: Any) -> None:
            self.overlap_args = combine_overlap_args
            self.meta_overlap_args = meta_overlap_args

        def clear_overlap_args(self) -> None:
            self.overlap_args = self.meta_overlap_args = None


class Formats(NamedTuple):
    """What SGLang's matrix products of this layer want."""

    normal_fp8: bool  # quantise before dispatch in normal mode
    low_latency_fp8: bool
    ue8m0: bool  # low-latency scales are packed exponents (datacentre Blackwell)
    alignment: int  # counts in normal mode are multiples of it
    max_tokens: int  # a rank may have in low-latency mode
    low_latency_nvfp4: bool = False
    normal_ue8m0: bool = False  # as ue8m0, also of other GPUs of that generation


def formats(quant_config: dict[str, Any] | None = None, runner_backend: Any = None) -> Formats:
    """As this server's arguments, environment and device say, and the layer's quantisation.

    Raises UnsupportedError for rows of a type that only other devices send.
    """
    if not IS_AVAILABLE:
        return Formats(False, True, False, 128, 128)
    from sglang.srt.environ import envs
    from sglang.srt.layers import deep_gemm_wrapper

    jit = bool(deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM)
    normal = _type_of_rows(DeepEPMode.NORMAL, quant_config, runner_backend)
    low_latency = _type_of_rows(DeepEPMode.LOW_LATENCY, quant_config, runner_backend)
    return Formats(
        normal_fp8=jit and normal == "fp8",
        low_latency_fp8=low_latency == "fp8",
        low_latency_nvfp4=low_latency == "nvfp4",
        ue8m0=jit and bool(deep_gemm_wrapper.DEEPGEMM_BLACKWELL),
        normal_ue8m0=jit and bool(deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0),
        alignment=128 if jit else 1,
        max_tokens=int(envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get()),
    )


def _type_of_rows(mode: Any, quant_config: dict[str, Any] | None, runner_backend: Any) -> str:
    """bf16, fp8 or nvfp4 between ranks. SGLang decides, from a server argument, its environment,
    the layer's quantisation and the runner behind the dispatcher."""
    try:
        from sglang.srt.layers.moe.utils import get_deepep_output_dtype
    except ImportError:  # older releases have only the variable
        from sglang.srt.environ import envs

        return "bf16" if envs.SGLANG_DEEPEP_BF16_DISPATCH.get() else "fp8"
    asking = SimpleNamespace(
        quant_config=quant_config, runner_backend=runner_backend, dispatch_mode=mode
    )
    name = str(get_deepep_output_dtype(asking).value)
    if name == "int8":  # SGLang's own dispatcher sends FP8 on GPUs then
        return "fp8"
    if name not in ("bf16", "fp8", "nvfp4"):
        raise UnsupportedError(f"deepep_dispatcher_output_dtype {name} is for other devices")
    return name


def is_extend_in_batch() -> bool:
    """Is any rank of the group prefilling in this step? SGLang exchanges that before it."""
    if not IS_AVAILABLE:
        return True
    from sglang.srt.layers.dp_attention import get_is_extend_in_batch

    return bool(get_is_extend_in_batch())


def quantise(x: Tensor, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """(e4m3 [T, H], scales of 128 columns) by SGLang's own kernel."""
    try:
        from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8
    except ImportError:  # where older releases have it
        from sglang.srt.layers.quantization.fp8_kernel import sglang_per_token_group_quant_fp8

    values, scales = sglang_per_token_group_quant_fp8(
        x, 128, column_major_scales=ue8m0, scale_tma_aligned=ue8m0, scale_ue8m0=ue8m0
    )
    return values, scales


def recorder() -> Any:
    """Of expert loads, for load balancing; None where there is none."""
    if not IS_AVAILABLE:
        return None
    from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder

    return get_global_expert_distribution_recorder()


Quantise = Callable[[Tensor, bool], tuple[Tensor, Tensor]]

__all__ = [
    "IS_AVAILABLE",
    "BaseDispatcher",
    "DeepEPLLDispatchOutput",
    "DeepEPMode",
    "DeepEPNormalDispatchOutput",
    "Formats",
    "Quantise",
    "formats",
    "is_extend_in_batch",
    "quantise",
    "recorder",
]
