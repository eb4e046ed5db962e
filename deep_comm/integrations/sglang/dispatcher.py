"""SGLang's dispatcher of expert parallelism, over deep_comm.

The stages are SGLang's: ``dispatch_a`` sends, ``dispatch_b`` receives, ``combine_a`` sends back,
``combine_b`` receives; between an ``a`` and its ``b`` the other micro-batch computes.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

import deep_comm
from deep_comm import log
from deep_comm.compat.elastic_sizes import ring_bytes, topology_of
from deep_comm.compat.nvfp4 import experts_last
from deep_comm.errors import ArgumentError, UnsupportedError
from deep_comm.integrations.sglang import interface as sglang


class Stage(enum.Enum):
    """What was called last."""

    READY = "combine_b"
    DISPATCH_SENT = "dispatch_a"
    DISPATCHED = "dispatch_b"
    COMBINE_SENT = "combine_a"


class DeepCommDispatcher(sglang.BaseDispatcher):  # type: ignore[misc]
    """Emits DeepEPNormalDispatchOutput and DeepEPLLDispatchOutput, so that every runner that SGLang
    has for them works. Both modes share one Buffer, and nothing is cleaned between them.

    In mode AUTO a step goes as SGLang's ``is_extend_in_batch`` says, which it
    exchanges before the step.
    """

    def __init__(
        self,
        group: Any,
        router_topk: int,
        permute_fusion: bool = False,
        num_experts: int | None = None,
        num_local_experts: int | None = None,
        hidden_size: int | None = None,
        params_dtype: torch.dtype | None = None,
        deepep_mode: Any = sglang.DeepEPMode.AUTO,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        runner_backend: Any = None,
        *,
        formats: sglang.Formats | None = None,
        is_extend_in_batch: Callable[[], bool] = sglang.is_extend_in_batch,
        quantise: sglang.Quantise = sglang.quantise,
    ) -> None:
        """The arguments of SGLang's own; by keyword, what is otherwise asked of SGLang."""
        super().__init__()
        if num_experts is None or hidden_size is None:
            raise ArgumentError("num_experts", num_experts, "and hidden_size must be given")
        self.group = group
        self.router_topk = router_topk
        self.permute_fusion = permute_fusion
        self.num_experts = num_experts
        self.num_local_experts = num_local_experts
        self.hidden_size = hidden_size
        self.params_dtype = params_dtype
        self.deepep_mode = deepep_mode
        self.async_finish = async_finish
        self.return_recv_hook = return_recv_hook
        self.runner_backend = runner_backend
        self.expert_mask_gpu = None  # of a runner for other devices; SGLang's wrapper reads it
        self._are_formats_given = formats is not None
        self.formats = sglang.formats(None, runner_backend) if formats is None else formats
        self._is_extend_in_batch = is_extend_in_batch
        self._quantise = quantise
        self._stage = Stage.READY
        self._is_low_latency = False
        self._pending: tuple[Any, ...] = ()
        self._handle: Any = None
        self._hooks: OrderedDict[int, Callable[[Any], object]] = OrderedDict()
        self._buffer: deep_comm.Buffer | None = None

    @property
    def num_max_dispatch_tokens_per_rank(self) -> int:
        return self.formats.max_tokens

    @property
    def buffer(self) -> deep_comm.Buffer:
        """Shared by all layers of these sizes. Collective when it is made: on the first call."""
        if self._buffer is None:
            self._buffer = shared_buffer(
                self.group, self.hidden_size, self.num_experts, self.formats.max_tokens,
                self.deepep_mode,
            )  # fmt: skip
        return self._buffer

    # ---- SGLang's interface --------------------------------------------------------------------

    def dispatch(self, hidden_states: Tensor, topk_output: Any) -> Any:
        self.dispatch_a(hidden_states, topk_output)
        for hook in list(self._hooks.values()):
            hook(self)
        return self.dispatch_b()

    def dispatch_a(self, hidden_states: Tensor, topk_output: Any) -> None:
        self._require(Stage.READY, Stage.DISPATCH_SENT)
        topk_ids = topk_output.topk_ids.to(torch.int64)
        topk_weights = topk_output.topk_weights
        mode = self.deepep_mode.resolve(self._is_extend_in_batch())
        self._is_low_latency = mode == sglang.DeepEPMode.LOW_LATENCY
        if self._is_low_latency:
            self._pending = self._send_low_latency(hidden_states, topk_ids, topk_weights)
        else:
            self._pending = self._send_normal(hidden_states, topk_ids, topk_weights)
        self._stage = Stage.DISPATCH_SENT

    def dispatch_b(self) -> Any:
        self._require(Stage.DISPATCH_SENT, Stage.DISPATCHED)
        pending, self._pending = self._pending, ()
        receive = self._receive_low_latency if self._is_low_latency else self._receive_normal
        try:
            received = receive(*pending)
        except BaseException:
            self._handle, self._stage = None, Stage.READY  # for the next dispatch
            raise
        self._stage = Stage.DISPATCHED
        return received

    def combine(self, combine_input: Any) -> Tensor:
        self.combine_a(combine_input)
        return self.combine_b()

    def combine_a(self, combine_input: Any) -> None:
        self._require(Stage.DISPATCHED, Stage.COMBINE_SENT)
        hidden_states, topk_ids, topk_weights = combine_input[:3]
        if self._is_low_latency:
            if self.overlap_args is not None:
                raise UnsupportedError(
                    "single-batch overlap by signals (set_overlap_args) is not offered: combine "
                    "starts when it is called; start the server without "
                    "--enable-single-batch-overlap"
                )
            self._pending = self.buffer.low_latency_combine(
                hidden_states, topk_ids, topk_weights, self._handle,
                async_finish=not self.return_recv_hook, return_recv_hook=self.return_recv_hook,
            )  # fmt: skip
        else:
            combined, _, event = self.buffer.combine(
                hidden_states, self._handle, async_finish=self.async_finish,
            )  # fmt: skip
            self._pending = (combined, event, None)
        self._handle, self._stage = None, Stage.COMBINE_SENT

    def combine_b(self) -> Tensor:
        self._require(Stage.COMBINE_SENT, Stage.READY)
        self._stage = Stage.READY
        (combined, event, hook), self._pending = self._pending, ()
        _finish(event, hook)
        assert isinstance(combined, Tensor)
        return combined

    def set_quant_config(self, quant_config: dict[str, Any]) -> None:
        """Of the layer's weights, which may say what travels: SGLang calls this once they are
        loaded."""
        super().set_quant_config(quant_config)
        if not self._are_formats_given:
            self.formats = sglang.formats(quant_config, self.runner_backend)

    def register_deepep_dispatch_hook(self, hook: Callable[[Any], object]) -> RemovableHandle:
        """``hook(self)`` runs between dispatch_a and dispatch_b of ``dispatch``."""
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def _require(self, wanted: Stage, following: Stage) -> None:
        """A call that is refused changes no stage."""
        if self._stage is not wanted:
            raise ArgumentError(
                following.value, None, f"must follow {wanted.value}, not {self._stage.value}"
            )

    # ---- normal mode ---------------------------------------------------------------------------

    def _send_normal(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> tuple[Any, ...]:
        x: Any = hidden_states
        if self.formats.normal_fp8:
            x = self._quantise(hidden_states, self.formats.normal_ue8m0)
        return x, topk_ids, topk_weights, (
            deep_comm.Buffer.capture() if self.async_finish else None
        )  # fmt: skip

    def _receive_normal(
        self, x: Any, topk_ids: Tensor, topk_weights: Tensor, previous_event: Any
    ) -> Any:
        # Here, not in dispatch_a: the host waits for the counts, while it could queue other work.
        recv, recv_ids, recv_weights, counts, handle, event = self.buffer.dispatch(
            x, topk_idx=topk_ids, topk_weights=topk_weights, num_experts=self.num_experts,
            expert_alignment=self.formats.alignment, previous_event=previous_event,
            async_finish=self.async_finish,
            allocate_on_comm_stream=previous_event is not None and self.async_finish,
        )  # fmt: skip
        self._handle = handle
        _finish(event, None)
        recorder = sglang.recorder()
        if recorder is not None:
            layout = self.buffer.get_dispatch_layout(topk_ids, self.num_experts)
            recorder.on_deepep_dispatch_normal(
                counts, num_tokens_per_rank=layout[0], num_tokens_per_rdma_rank=layout[1],
                num_tokens_per_expert=layout[2],
            )  # fmt: skip
        rows, scales = recv if isinstance(recv, tuple) else (recv, None)
        return sglang.DeepEPNormalDispatchOutput(rows, scales, recv_ids, recv_weights, counts)

    # ---- low-latency mode ----------------------------------------------------------------------

    def _send_low_latency(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> tuple[Any, ...]:
        global_scale = (self.quant_config or {}).get("input_global_scale")
        use_nvfp4 = global_scale is not None or self.formats.low_latency_nvfp4
        use_fp8 = self.formats.low_latency_fp8 and not use_nvfp4
        ue8m0 = use_fp8 and self.formats.ue8m0
        recv, masked_m, self._handle, event, hook = self.buffer.low_latency_dispatch(
            hidden_states, topk_ids, self.formats.max_tokens, self.num_experts, use_fp8=use_fp8,
            round_scale=ue8m0, use_ue8m0=ue8m0, async_finish=not self.return_recv_hook,
            return_recv_hook=self.return_recv_hook, use_nvfp4=use_nvfp4,
            x_global_scale=global_scale,
        )  # fmt: skip
        if use_nvfp4:
            recv = experts_last(*recv)
        # What a balanced router gives an expert, rounded up: matrix products
        # choose their tiles by it.
        num_selections = hidden_states.shape[0] * self.buffer.group_size * topk_ids.shape[1]
        expected_m = (num_selections + self.num_experts) // self.num_experts
        return recv, topk_ids, topk_weights, masked_m, expected_m, event, hook

    def _receive_low_latency(
        self,
        recv: Any,
        topk_ids: Tensor,
        topk_weights: Tensor,
        masked_m: Tensor,
        expected_m: int,
        event: Any,
        hook: Any,
    ) -> Any:
        _finish(event, hook)
        recorder = sglang.recorder()
        if recorder is not None:
            recorder.on_deepep_dispatch_low_latency(masked_m)
        rows, scales = recv if isinstance(recv, tuple) else (recv, None)
        return sglang.DeepEPLLDispatchOutput(
            rows, scales, topk_ids, topk_weights, masked_m, expected_m
        )


def _finish(event: Any, hook: Callable[[], None] | None) -> None:
    if hook is not None:
        hook()
    elif event.event is not None:
        event.current_stream_wait()


_buffers: weakref.WeakValueDictionary[Any, deep_comm.Buffer] = weakref.WeakValueDictionary()
_lock = threading.RLock()


def shared_buffer(
    group: Any, hidden: int, num_experts: int, max_tokens: int, mode: Any
) -> deep_comm.Buffer:
    """The Buffer for these sizes, as long as a dispatcher holds it. Collective when it is made."""
    key = (id(group), hidden, num_experts, max_tokens, mode)
    with _lock:
        buffer = _buffers.get(key)
    if buffer is not None and buffer._context.is_open:
        return buffer
    topology = topology_of(group)
    num_nvl_bytes = num_rdma_bytes = 0
    if mode.enable_normal():
        num_nvl_bytes, num_rdma_bytes = ring_bytes(topology, 2 * hidden)
    if mode.enable_low_latency():
        for_decode = deep_comm.Buffer.get_low_latency_rdma_size_hint(
            max_tokens, hidden, topology.num_ranks, num_experts,
            ranks_per_node=topology.ranks_per_node,
        )  # fmt: skip
        num_rdma_bytes = max(num_rdma_bytes, for_decode)
    with log.used_by("SGLang's native adapter"):
        buffer = deep_comm.Buffer(
            group, num_nvl_bytes, num_rdma_bytes, low_latency_mode=mode.enable_low_latency()
        )
    with _lock:
        _buffers[key] = buffer
    return buffer
