"""The names of SGLang that the dispatcher uses, or stand-ins for them
where SGLang is not installed.
"""

from __future__ import annotations

import enum
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

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
    """What SGLang's matrix products of this server want."""

    normal_fp8: bool  # quantise before dispatch in normal mode
    low_latency_fp8: bool
    ue8m0: bool  # scales are packed exponents (Blackwell)
    alignment: int  # counts in normal mode are multiples of it
    max_tokens: int  # a rank may have in low-latency mode


def formats() -> Formats:
    """As this server's environment and device say."""
    if not IS_AVAILABLE:
        return Formats(False, True, False, 128, 128)
    from sglang.srt.environ import envs
    from sglang.srt.layers import deep_gemm_wrapper

    bf16 = bool(envs.SGLANG_DEEPEP_BF16_DISPATCH.get())
    jit = bool(deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM)
    return Formats(
        normal_fp8=jit and not bf16,
        low_latency_fp8=not bf16,
        ue8m0=jit and bool(deep_gemm_wrapper.DEEPGEMM_BLACKWELL),
        alignment=128 if jit else 1,
        max_tokens=int(envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get()),
    )


def is_extend_in_batch() -> bool:
    """Is any rank of the group prefilling in this step? SGLang exchanges that before it."""
    if not IS_AVAILABLE:
        return True
    from sglang.srt.layers.dp_attention import get_is_extend_in_batch

    return bool(get_is_extend_in_batch())


def quantise(x: Tensor, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """(e4m3 [T, H], scales of 128 columns) by SGLang's own kernel."""
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
