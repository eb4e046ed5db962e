from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang.srt.layers.moe.token_dispatcher.base import (
    BaseDispatcher,
    CombineInputFormat,
    DispatchOutputFormat,
)
from sglang.srt.layers.moe.utils import DeepEPMode


class DeepEPNormalDispatchOutput(NamedTuple):
    hidden_states: Tensor
    hidden_states_scale: Tensor | None
    topk_ids: Tensor
    topk_weights: Tensor
    num_recv_tokens_per_expert: list[int]

    @property
    def format(self) -> DispatchOutputFormat:
        return DispatchOutputFormat.DEEPEP_NORMAL


class DeepEPLLDispatchOutput(NamedTuple):
    hidden_states: Tensor
    hidden_states_scale: Tensor | None
    topk_ids: Tensor
    topk_weights: Tensor
    masked_m: Tensor
    expected_m: int

    @property
    def format(self) -> DispatchOutputFormat:
        return DispatchOutputFormat.DEEPEP_LL


class DeepEPNormalCombineInput(NamedTuple):
    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor

    @property
    def format(self) -> CombineInputFormat:
        return CombineInputFormat.DEEPEP_NORMAL


class DeepEPLLCombineInput(NamedTuple):
    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor

    @property
    def format(self) -> CombineInputFormat:
        return CombineInputFormat.DEEPEP_LL


class DeepEPDispatcher(BaseDispatcher):
    def __init__(
        self,
        group: Any,
        router_topk: int,
        permute_fusion: bool = False,
        num_experts: int | None = None,
        num_local_experts: int | None = None,
        hidden_size: int | None = None,
        params_dtype: torch.dtype | None = None,
        deepep_mode: DeepEPMode = DeepEPMode.AUTO,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        runner_backend: Any = None,
    ) -> None:
        super().__init__()

    def dispatch(self, hidden_states: Tensor, topk_output: Any) -> Any: ...

    def dispatch_a(self, hidden_states: Tensor, topk_output: Any) -> None: ...

    def dispatch_b(self) -> Any: ...

    def combine(self, combine_input: Any) -> Tensor: ...

    def combine_a(self, combine_input: Any) -> None: ...

    def combine_b(self) -> Tensor: ...

    def register_deepep_dispatch_hook(self, hook: Any) -> Any: ...
