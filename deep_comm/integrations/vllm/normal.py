"""Prepare and finalize with rows that come once a rank: vLLM's Standard activation format."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import deep_comm
from deep_comm import log
from deep_comm.context.shape import DEFAULT_DECODE_TOKENS
from deep_comm.errors import ArgumentError, UnsupportedError
from deep_comm.integrations.vllm import interface as vllm
from deep_comm.integrations.vllm.prepare_finalize import (
    ExpertOutput,
    Pending,
    Prepared,
    PrepareFinalize,
    Step,
)
from deep_comm.ranks.topology import first_expert
from deep_comm.settings import env, integers

_ROW_BYTES = 16
_MOST_UNCOUNTED = 512  # tokens of a rank: larger steps hide the wait behind what the GPU has to do


class NormalPrepareFinalize(PrepareFinalize):
    """Dispatch and combine in normal mode, and of steps of at most ``decode_tokens`` in low-latency
    mode, whose compact rows have the same format.

    The mode of a step depends on the largest number of tokens of a rank. vLLM exchanges the numbers
    before every step, so that ranks agree without an exchange of ours. Where vLLM does not tell
    them, with dual-batch overlap, and of rows of another dtype than bfloat16, the mode is normal.
    In normal mode the host waits for the number of rows that came, but in steps that CUDA graphs
    may hold, and in small steps of which most tokens come. Their experts get as many rows as all
    ranks have tokens, as in decoding steps.
    """

    def __init__(
        self,
        buffer: deep_comm.Buffer,
        num_dispatchers: int,
        dp_size: int,
        rank_expert_offset: int,
        decode_tokens: int | None = None,
        tokens_of_ranks: Callable[[], list[int] | None] = vllm.tokens_of_ranks,
    ) -> None:
        """
        Args:
            buffer: serves decoding too if it is in low_latency_mode; else decoding makes one of its
                own, for the hidden size of its first step, which all layers share.
            num_dispatchers: ranks of the group.
            dp_size, rank_expert_offset: vLLM gives them; not used, since Buffer knows its experts.
            decode_tokens: a step in which no rank has more tokens is a decoding step; 0: none is.
                Default: DEEP_COMM_DECODE_TOKENS, else 128. Equal on all ranks.
            tokens_of_ranks: tells the numbers of tokens of all ranks, alike on all ranks.
        """
        super().__init__(num_dispatchers)
        if decode_tokens is None:
            preset = env.DECODE_TOKENS.get()
            decode_tokens = DEFAULT_DECODE_TOKENS if preset is None else preset
        if decode_tokens < 0:
            raise ArgumentError("decode_tokens", decode_tokens, "must not be negative")
        self.buffer = buffer
        self.decode_buffer = buffer if buffer.low_latency_mode else None
        self.decode_tokens = decode_tokens
        self._tokens_of_ranks = tokens_of_ranks
        self._ids: dict[tuple[int, torch.dtype], Tensor] = {}
        self._captured_tokens = vllm.most_captured_tokens()

    @staticmethod
    def maybe_roundup_layer_hidden_size(hidden_size: int, dtype: torch.dtype) -> int:
        """Rows of any multiple of 16 bytes will do."""
        step = _ROW_BYTES // dtype.itemsize
        return integers.round_up(hidden_size, step)

    @property
    def activation_format(self) -> Any:
        return vllm.FusedMoEActivationFormat.Standard

    def max_num_tokens_per_rank(self) -> int | None:
        return None

    # ---- prepare -------------------------------------------------------------------------------

    def _send(self, step: Step) -> Pending[Prepared]:
        tokens_of_ranks = self._tokens_of_ranks()
        most_tokens = self._tokens_of_decoding(tokens_of_ranks, step.a1.dtype)
        if most_tokens is not None:
            return self._decode(step, most_tokens)
        quant_config = step.quant_config
        tokens: Any = step.a1
        quantises_before = quant_config.is_block_quantized and not step.defer_input_quant
        if quantises_before:
            values, scales = vllm.moe_kernel_quantize_input(
                step.a1,
                quant_config.a1_scale,
                quant_dtype=quant_config.quant_dtype,
                per_act_token_quant=quant_config.per_act_token_quant,
                block_shape=quant_config.block_shape,
            )
            tokens = values if scales is None else (values, scales)
        # Before the yield: the event must not cover what the other micro-batch queues meanwhile.
        previous_event = vllm.dbo_get_previous_event(self.buffer.capture)
        vllm.dbo_yield_and_switch_from_compute_to_comm()
        x, x_scales = tokens if isinstance(tokens, tuple) else (tokens, None)
        vllm.used_on_this_stream(x, x_scales, step.topk_ids, step.topk_weights)
        recv, recv_ids, recv_weights, counts, handle, event = self.buffer.dispatch(
            tokens,
            topk_idx=step.topk_ids,
            topk_weights=step.topk_weights,
            num_experts=step.num_experts,
            num_worst_tokens=self._num_rows(tokens_of_ranks, step.topk_ids.shape[1]),
            zero_tail=has_one_scale(quant_config),
            previous_event=previous_event,
            async_finish=not vllm.dbo_enabled(),
        )
        self._keep((handle, None))
        vllm.dbo_switch_to_compute_sync()

        def receive() -> Prepared:
            if event.event is not None:
                event.current_stream_wait()
            rows, scales = recv if isinstance(recv, tuple) else (recv, None)
            assert recv_ids is not None and handle is not None
            vllm.used_on_this_stream(rows, scales, recv_ids, recv_weights)
            rows_of_experts = handle.num_recv_tokens_per_expert
            assert rows_of_experts is not None
            metadata = vllm.ExpertTokensMetadata(
                expert_num_tokens=rows_of_experts,
                expert_num_tokens_cpu=torch.tensor(counts, dtype=torch.int32) if counts else None,
            )
            if not quantises_before:
                rows, scales = self._quantised(rows, step)
            ids = self._table_of_ids(step.num_experts, recv_ids)[recv_ids]
            return rows, scales, metadata, ids, recv_weights

        return receive

    def _tokens_of_decoding(
        self, tokens_of_ranks: list[int] | None, dtype: torch.dtype
    ) -> int | None:
        """The most that a rank may have in this step; None: it is no decoding step.

        Low-latency mode has rows of bfloat16 alone. With dual-batch overlap it would not let the
        other half compute meanwhile.
        """
        if not self.decode_tokens or tokens_of_ranks is None or dtype != torch.bfloat16:
            return None
        if vllm.dbo_enabled():
            return None
        most = max(tokens_of_ranks)
        return max(1, most) if most <= self.decode_tokens else None

    def _num_rows(self, tokens_of_ranks: list[int] | None, num_topk: int) -> int:
        """Rows for the tokens of all ranks, so that the host need not wait; 0: it waits.

        It depends on the size of the step alone, since vLLM runs a step once before it captures it,
        and must find the memory then. With as many selections as ranks 1 - 1/e of the tokens come,
        if routing is even. With fewer, and in large steps, the memory of the experts, which goes by
        the rows, would cost more than the wait.
        """
        num_ranks = self.buffer.group_size
        if tokens_of_ranks is None:
            if vllm.is_capturing():
                raise UnsupportedError(
                    "vLLM does not say how many tokens each rank has, so that a CUDA graph cannot "
                    "hold this step: --enforce-eager"
                )
            return 0
        bound = max(self._captured_tokens, _MOST_UNCOUNTED if num_topk >= num_ranks else 0)
        if max(tokens_of_ranks) > bound:
            return 0
        return max(1, sum(tokens_of_ranks) * num_ranks // len(tokens_of_ranks))

    def _decode(self, step: Step, most_tokens: int) -> Callable[[], Prepared]:
        """The experts get as many rows as can come in this step, and take their tiles from that. A
        captured step has the captured number on all ranks."""
        a1, topk_ids, num_experts = step.a1, step.topk_ids, step.num_experts
        use_fp8 = not step.defer_input_quant and is_fp8_in_blocks(step.quant_config)
        if self.decode_buffer is None:
            self.decode_buffer = decode_buffer(
                self.buffer, self.decode_tokens, a1.shape[1], num_experts
            )
        recv, recv_count, handle, _, hook = self.decode_buffer.low_latency_dispatch(
            a1,
            topk_ids,
            most_tokens,
            num_experts,
            use_fp8=use_fp8,
            round_scale=use_fp8 and vllm.rounds_scales(),
            return_recv_hook=True,
            topk_weights=step.topk_weights,
            compact=True,
            global_topk_idx=True,
        )
        self._keep((handle, topk_ids))  # the ids say that this step is a decoding step

        def receive() -> Prepared:
            assert hook is not None
            assert handle.recv_topk_idx is not None and handle.recv_topk_weights is not None
            assert handle.num_recv_tokens is not None
            hook()
            rows, scales = recv if isinstance(recv, tuple) else (recv, None)
            if not use_fp8:
                if has_one_scale(step.quant_config):
                    places = torch.arange(rows.shape[0], device=rows.device).unsqueeze(1)
                    rows = torch.where(places < handle.num_recv_tokens, rows, 0)
                rows, scales = self._quantised(rows, step)
            metadata = vllm.ExpertTokensMetadata(
                expert_num_tokens=recv_count, expert_num_tokens_cpu=None
            )
            # Ids of int32, without a cast: a kernel between dispatch and the experts costs as much
            # of a small step as a part of dispatch.
            return rows, scales, metadata, handle.recv_topk_idx, handle.recv_topk_weights

        return receive

    def _quantised(self, rows: Tensor, step: Step) -> tuple[Tensor, Tensor | None]:
        """Rows that travelled as they were, in the format the experts want."""
        quant_config = step.quant_config
        if step.defer_input_quant or rows.numel() == 0:
            return rows, None
        scale = quant_config.a1_scale
        if quant_config.quant_dtype == "nvfp4":
            scale = quant_config.a1_gscale
        return vllm.moe_kernel_quantize_input(
            rows,
            scale,
            quant_dtype=quant_config.quant_dtype,
            per_act_token_quant=False,
            block_shape=quant_config.block_shape,
            is_scale_swizzled=quant_config.is_scale_swizzled,
        )

    def _table_of_ids(self, num_experts: int, like: Tensor) -> Tensor:
        """vLLM's experts take global indices, all of them valid. The table's last entry, where an
        index of -1 leads, is an expert elsewhere."""
        key = (num_experts, like.dtype)
        if key not in self._ids:
            rank, num_ranks = self.buffer.rank, self.buffer.group_size
            first, end = (first_expert(one, num_experts, num_ranks) for one in (rank, rank + 1))
            ids = [*range(first, end), num_experts - 1 if first == 0 else 0]
            self._ids[key] = torch.tensor(ids, dtype=like.dtype, device=like.device)
        return self._ids[key]

    # ---- finalize ------------------------------------------------------------------------------

    def _send_back(self, expert_output: ExpertOutput, handle: Any) -> Pending[None]:
        handle, decoded_ids = handle
        rows, output = expert_output.rows, expert_output.output
        weight_and_reduce_impl = expert_output.weight_and_reduce_impl
        if rows.numel() != 0:
            if isinstance(weight_and_reduce_impl, vllm.TopKWeightAndReduceDelegate):
                weight_and_reduce_impl = vllm.TopKWeightAndReduceContiguous()
            rows = weight_and_reduce_impl.apply(
                output=None,
                fused_expert_output=rows,
                topk_weights=expert_output.topk_weights,
                topk_ids=expert_output.topk_ids,
                apply_router_weight_on_input=expert_output.apply_router_weight_on_input,
            )
        if decoded_ids is not None:
            assert self.decode_buffer is not None
            _, _, hook = self.decode_buffer.low_latency_combine(
                rows, decoded_ids, None, handle, return_recv_hook=True, out=output
            )
            assert hook is not None
            return hook
        previous_event = vllm.dbo_get_previous_event(self.buffer.capture)
        vllm.dbo_yield_and_switch_from_compute_to_comm()
        vllm.used_on_this_stream(rows)
        combined_x, _, event = self.buffer.combine(
            rows, handle, previous_event=previous_event, async_finish=not vllm.dbo_enabled()
        )
        vllm.dbo_switch_to_compute()

        def receive() -> None:
            if event.event is not None:
                event.current_stream_wait()
            vllm.dbo_switch_to_comm()
            output.copy_(combined_x, non_blocking=True)
            vllm.dbo_yield_and_switch_from_comm_to_compute()

        return receive


# By the Buffer beside them. They are held by the layers that use them.
_decode_buffers: weakref.WeakKeyDictionary[
    deep_comm.Buffer, weakref.WeakValueDictionary[tuple[int, int], deep_comm.Buffer]
] = weakref.WeakKeyDictionary()


def decode_buffer(
    beside: deep_comm.Buffer, num_tokens: int, hidden: int, num_experts: int
) -> deep_comm.Buffer:
    """A Buffer of the same ranks for decoding steps of these sizes. Collective when it is made."""
    made = _decode_buffers.setdefault(beside, weakref.WeakValueDictionary())
    key = (num_tokens, hidden)
    buffer = made.get(key)
    if buffer is None:
        num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(
            num_tokens, hidden, beside.group_size, num_experts,
            ranks_per_node=beside._context.topology.ranks_per_node,
        )  # fmt: skip
        with log.used_by("vLLM's native adapter"):
            buffer = deep_comm.Buffer(
                beside.group, 0, num_bytes, low_latency_mode=True, device=beside.device
            )
        made[key] = buffer
    return buffer


def destroy_decode_buffers(beside: deep_comm.Buffer) -> None:
    """Of the layers over this Buffer. Waits for no peer."""
    for buffer in list(_decode_buffers.pop(beside, {}).values()):
        buffer.destroy()


def has_one_scale(quant_config: Any) -> bool:
    """Are rows quantised by the largest element of all? Then none may hold just anything."""
    return (
        quant_config.quant_dtype is not None
        and quant_config.block_shape is None
        and quant_config.a1_scale is None
        and quant_config.quant_dtype != "nvfp4"
    )


def is_fp8_in_blocks(quant_config: Any) -> bool:
    """Do the experts take e4m3 rows with a scale for 128 columns, as dispatch can make them?"""
    shape = quant_config.block_shape
    return quant_config.quant_dtype == torch.float8_e4m3fn and shape is not None and shape[1] == 128
