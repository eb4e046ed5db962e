from __future__ import annotations

from enum import Enum
from typing import Any

from sglang.srt.environ import envs


class DeepEPMode(Enum):
    NORMAL = "normal"
    LOW_LATENCY = "low_latency"
    AUTO = "auto"

    def enable_normal(self) -> bool:
        return self in (DeepEPMode.NORMAL, DeepEPMode.AUTO)

    def enable_low_latency(self) -> bool:
        return self in (DeepEPMode.LOW_LATENCY, DeepEPMode.AUTO)

    def resolve(self, is_extend_in_batch: bool) -> DeepEPMode:
        if self != DeepEPMode.AUTO:
            return self
        return DeepEPMode.NORMAL if is_extend_in_batch else DeepEPMode.LOW_LATENCY


class DispatcherOutputDtype(Enum):
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    NVFP4 = "nvfp4"
    MXFP8 = "mxfp8"


server_arguments = {"deepep_dispatcher_output_dtype": "auto"}


def get_deepep_output_dtype(self: Any) -> DispatcherOutputDtype:
    """The server's argument, the environment, the layer's quantisation, the runner; else FP8."""
    asked = server_arguments["deepep_dispatcher_output_dtype"]
    if asked != "auto":
        return DispatcherOutputDtype(asked)
    if envs.SGLANG_DEEPEP_BF16_DISPATCH.get():
        return DispatcherOutputDtype.BF16
    config = self.quant_config
    if config is not None:
        if config.get("input_global_scale") is not None:
            return DispatcherOutputDtype.NVFP4
        mode = f"{self.dispatch_mode.value}_dispatcher_output_dtype"
        named = config.get(mode) or config.get("dispatcher_output_dtype")
        if named is not None:
            return DispatcherOutputDtype(named)
    runner = self.runner_backend
    if runner is not None and runner.is_flashinfer_cutedsl():
        return DispatcherOutputDtype.BF16
    return DispatcherOutputDtype.FP8
