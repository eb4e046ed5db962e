from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor


class FusedMoEActivationFormat(Enum):
    Standard = ("standard",)
    BatchedExperts = ("batched_experts",)


@dataclass
class ExpertTokensMetadata:
    expert_num_tokens: Tensor | None
    expert_num_tokens_cpu: Tensor | None
    psum_recv_per_rank: Tensor | None = None
    rank_expert_offset: int | None = None


class TopKWeightAndReduce(ABC):
    @abstractmethod
    def apply(
        self,
        output: Tensor | None,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
    ) -> Tensor: ...


class FusedMoEPrepareAndFinalize(ABC):
    def post_init_setup(self, fused_experts: Any) -> None:
        return

    @property
    @abstractmethod
    def activation_format(self) -> FusedMoEActivationFormat: ...

    @abstractmethod
    def topk_indices_dtype(self) -> torch.dtype | None: ...

    @abstractmethod
    def max_num_tokens_per_rank(self) -> int | None: ...

    @abstractmethod
    def num_dispatchers(self) -> int: ...

    @abstractmethod
    def output_is_reduced(self) -> bool: ...

    def supports_async(self) -> bool:
        return False

    def supports_dbo(self) -> bool:
        return self.supports_async()

    def supports_deferred_moe_finalize(self) -> bool:
        return False


class FusedMoEPrepareAndFinalizeModular(FusedMoEPrepareAndFinalize):
    def allocate_fused_expert_output(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> Tensor | None:
        return None

    @abstractmethod
    def prepare(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> Any: ...

    def prepare_async(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> Any:
        raise NotImplementedError

    @abstractmethod
    def finalize(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> None: ...

    def finalize_async(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> tuple[Callable, Callable] | Callable:
        raise NotImplementedError
