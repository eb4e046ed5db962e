"""What the two adapters share: vLLM's calls, which become a step to send and rows to send back."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from deep_comm.errors import ArgumentError
from deep_comm.integrations.vllm import interface as vllm

P = ParamSpec("P")
T = TypeVar("T")
Hook = Callable[[], None]
Pending = Callable[[], T] | tuple[Hook, Callable[[], T]]
"""What an asynchronous call returns: a receiver, or a hook to run before the receiver."""
Prepared = tuple[Tensor, Tensor | None, Any, Tensor | None, Tensor | None]
"""Rows, scales, tokens of experts, ids, weights."""


@dataclass(frozen=True)
class Step:
    """What prepare is given; ``a1`` has the router's weight if it is applied there."""

    a1: Tensor  # [T, H]
    topk_weights: Tensor  # float32 [T, K]
    topk_ids: Tensor  # [T, K]
    num_experts: int
    quant_config: Any
    defer_input_quant: bool


@dataclass(frozen=True)
class ExpertOutput:
    """What finalize is given; ``output`` is to be written."""

    output: Tensor  # [T, H]
    rows: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    apply_router_weight_on_input: bool
    weight_and_reduce_impl: Any


def _finished(begin: Callable[P, Pending[T]]) -> Callable[P, T]:
    """An asynchronous call, and its end."""

    @functools.wraps(begin)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        pending = begin(*args, **kwargs)
        if isinstance(pending, tuple):
            hook, receiver = pending
            hook()
            return receiver()
        return pending()

    return call


class PrepareFinalize(vllm.FusedMoEPrepareAndFinalizeModular):  # type: ignore[misc]
    """The interface, over _send and _send_back. A handle for each of two micro-batches."""

    def __init__(self, num_dispatchers: int) -> None:
        super().__init__()
        self._num_dispatchers = num_dispatchers
        self._handles: list[Any] = [None, None]

    @abc.abstractmethod
    def _send(self, step: Step) -> Pending[Prepared]:
        """Start the dispatch."""

    @abc.abstractmethod
    def _send_back(self, expert_output: ExpertOutput, handle: Any) -> Pending[None]:
        """Start the combine. ``handle``: what _send kept."""

    def _keep(self, handle: Any) -> None:
        """For the finalize of this micro-batch."""
        self._handles[vllm.dbo_current_ubatch_id()] = handle

    def topk_indices_dtype(self) -> torch.dtype | None:
        """int64 as the router makes it; int32 is taken as well."""
        return torch.int64

    def num_dispatchers(self) -> int:
        return self._num_dispatchers

    def output_is_reduced(self) -> bool:
        return True

    def supports_async(self) -> bool:
        return True

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
    ) -> Pending[Prepared]:
        a1 = vllm.weighted_input(a1, topk_weights, topk_ids, apply_router_weight_on_input)
        return self._send(
            Step(a1, topk_weights, topk_ids, num_experts, quant_config, defer_input_quant)
        )

    def finalize_async(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> Pending[None]:
        handle = self._handles[vllm.dbo_current_ubatch_id()]
        if handle is None:
            raise ArgumentError("finalize", None, "comes after prepare")
        given = ExpertOutput(
            output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input,
            weight_and_reduce_impl,
        )  # fmt: skip
        return self._send_back(given, handle)

    prepare = _finished(prepare_async)
    finalize = _finished(finalize_async)
