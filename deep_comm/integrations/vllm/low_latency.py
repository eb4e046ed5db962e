"""Prepare and finalize with rows by expert and fixed shapes: vLLM's BatchedExperts format."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import deep_comm
from deep_comm.compat.nvfp4 import experts_last
from deep_comm.errors import ArgumentError, UnsupportedError
from deep_comm.integrations.vllm import interface as vllm
from deep_comm.integrations.vllm.normal import is_fp8_in_blocks
from deep_comm.integrations.vllm.prepare_finalize import (
    ExpertOutput,
    Hook,
    Prepared,
    PrepareFinalize,
    Step,
)
from deep_comm.settings import integers

_SCALE_BLOCK = 128


class LowLatencyPrepareFinalize(PrepareFinalize):
    """Low-latency dispatch and combine, in two phases each; nothing waits on the host.

    With vLLM's Triton experts each expert has room for the rows that can come in this step, not for
    those of the largest step: the kernels choose their tiles by the room, start blocks for all of
    it, and set all of it to zero. Other experts keep the full room. DeepGEMM's, for one, store
    whole tiles, which may reach into the next expert's rows if the room is no multiple of a tile.
    """

    def __init__(
        self,
        buffer: deep_comm.Buffer,
        max_tokens_per_rank: int,
        num_dispatchers: int,
        use_fp8_dispatch: bool = False,
        global_to_physical: Tensor | None = None,
        physical_to_global: Tensor | None = None,
        local_expert_global_ids: Tensor | None = None,
        use_nvfp4_dispatch: bool | None = None,
        tokens_of_ranks: Callable[[], list[int] | None] = vllm.tokens_of_ranks,
    ) -> None:
        """
        Args:
            buffer: in low_latency_mode.
            max_tokens_per_rank: equal on all ranks; any number.
            use_fp8_dispatch: rows travel as e4m3 with a scale for 128 columns.
            use_nvfp4_dispatch: rows for experts that take NVFP4 travel so, with quant_config's
                a1_gscale of one element. Default: VLLM_DEEPEPLL_NVFP4_DISPATCH, as for vLLM's own.
            global_to_physical: int64 [experts], where experts were moved by load balancing.
            tokens_of_ranks: tells the numbers of tokens of all ranks, alike on all ranks.
        """
        super().__init__(num_dispatchers)
        if use_nvfp4_dispatch is None:
            use_nvfp4_dispatch = os.environ.get("VLLM_DEEPEPLL_NVFP4_DISPATCH", "0") == "1"
        self.buffer = buffer
        self.max_tokens_per_rank = max_tokens_per_rank
        self.use_fp8_dispatch = use_fp8_dispatch
        self.use_ue8m0_dispatch = False
        self.use_nvfp4_dispatch = use_nvfp4_dispatch
        self._tokens_of_ranks = tokens_of_ranks
        self._experts: Any = None  # those that are told their room
        self._has_begun = False

        def cast(table: Tensor | None) -> Tensor | None:
            return None if table is None else table.to(torch.int64)

        self.global_to_physical = cast(global_to_physical)
        self.physical_to_global = cast(physical_to_global)
        self.local_expert_global_ids = cast(local_expert_global_ids)
        table = self.global_to_physical
        # The last entry is where an index of -1 leads: no expert.
        self._table = None if table is None else torch.cat([table, table.new_full((1,), -1)])

    @staticmethod
    def maybe_roundup_layer_hidden_size(hidden_size: int) -> int:
        """Whole blocks of 128 columns, of any number."""
        return integers.round_up(hidden_size, _SCALE_BLOCK)

    def post_init_setup(self, fused_experts: Any) -> None:
        """Scales as packed exponents, if the experts take them."""
        if self.use_fp8_dispatch and fused_experts.supports_packed_ue8m0_act_scales():
            self.use_ue8m0_dispatch = True
        if vllm.are_triton_experts_by_expert(fused_experts):
            self._experts = fused_experts

    @property
    def activation_format(self) -> Any:
        return vllm.FusedMoEActivationFormat.BatchedExperts

    def max_num_tokens_per_rank(self) -> int | None:
        return self.max_tokens_per_rank

    def _physical(self, topk_ids: Tensor) -> Tensor:
        return topk_ids if self._table is None else self._table[topk_ids]

    # ---- prepare -------------------------------------------------------------------------------

    def _set_room(self) -> int:
        """Tell the experts how many tokens of a rank they have room for in this step; return it.

        A power of two, so that kernels are compiled for few shapes, and at most the full room. The
        full room in the first step, in which vLLM finds out how much memory it needs; where it does
        not tell how many tokens the ranks have; and with two micro-batches: they share the experts.
        """
        room, counts = self.max_tokens_per_rank, self._tokens_of_ranks()
        if self._experts is None:
            return room
        if self._has_begun and counts is not None and not vllm.dbo_enabled():
            room = min(room, 1 << (max(1, *counts) - 1).bit_length())
        self._has_begun = True
        self._experts.max_num_tokens = room  # the shapes of workspaces and output follow from it
        return room

    def _send(self, step: Step) -> tuple[Hook, Callable[[], Prepared]]:
        if step.defer_input_quant:
            raise UnsupportedError("defer_input_quant: experts of this format take quantised rows")
        use_nvfp4 = self.use_nvfp4_dispatch and step.quant_config.quant_dtype == "nvfp4"
        recv, recv_count, handle, _, hook = self.buffer.low_latency_dispatch(
            step.a1,
            self._physical(step.topk_ids),
            self._set_room(),
            step.num_experts,
            use_fp8=self.use_fp8_dispatch and not use_nvfp4,
            round_scale=self.use_ue8m0_dispatch and not use_nvfp4,
            use_ue8m0=self.use_ue8m0_dispatch and not use_nvfp4,
            return_recv_hook=True,
            use_nvfp4=use_nvfp4,
            x_global_scale=step.quant_config.a1_gscale if use_nvfp4 else None,
        )
        assert hook is not None
        self._keep(handle)

        def receive() -> Prepared:
            rows: Tensor
            scales: Tensor | None
            if use_nvfp4:
                rows, scales = recv[0], experts_last(*recv)[1]  # as hybrid-ep's callers unpack them
            else:
                rows, scales = self._quantised(recv, step.a1.dtype, step.quant_config)
            metadata = vllm.ExpertTokensMetadata(
                expert_num_tokens=recv_count, expert_num_tokens_cpu=None
            )
            return rows, scales, metadata, None, None

        return hook, receive

    def _quantised(
        self, recv: Any, dtype: torch.dtype, quant_config: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Rows in the format the experts want: as they came, or quantised again."""
        if self.use_fp8_dispatch:
            rows, scales = recv
            if is_fp8_in_blocks(quant_config):
                return rows, scales
            blocks = rows.to(torch.float32).unflatten(-1, (-1, _SCALE_BLOCK))
            recv = (blocks * scales.unsqueeze(-1)).flatten(-2).to(dtype)
        quant_dtype = quant_config.quant_dtype
        if quant_dtype == "nvfp4":
            quant_dtype = None  # its experts quantise themselves
        num_experts, _, hidden = recv.shape
        rows, scales = vllm.moe_kernel_quantize_input(
            recv.view(-1, hidden),
            quant_config.a1_scale,
            quant_dtype,
            quant_config.per_act_token_quant,
            quant_config.block_shape,
        )
        rows = rows.view(num_experts, -1, rows.shape[-1])
        if quant_dtype is not None:
            scales = vllm.normalize_batched_scales_shape(scales, num_experts)
        return rows, scales

    # ---- finalize ------------------------------------------------------------------------------

    def _send_back(
        self, expert_output: ExpertOutput, handle: Any
    ) -> tuple[Hook, Callable[[], None]]:
        rows, weights = expert_output.rows, expert_output.topk_weights
        weight_and_reduce_impl = expert_output.weight_and_reduce_impl
        if not isinstance(weight_and_reduce_impl, vllm.TopKWeightAndReduceDelegate):
            raise ArgumentError(
                "weight_and_reduce_impl",
                type(weight_and_reduce_impl).__name__,
                "must be TopKWeightAndReduceDelegate: combine applies the weights",
            )
        if expert_output.apply_router_weight_on_input:
            weights = torch.ones_like(weights)
        vllm.dbo_maybe_run_recv_hook()
        _, _, hook = self.buffer.low_latency_combine(
            rows,
            self._physical(expert_output.topk_ids),
            weights,
            handle,
            return_recv_hook=True,
            out=expert_output.output,
        )
        assert hook is not None
        return hook, lambda: None
