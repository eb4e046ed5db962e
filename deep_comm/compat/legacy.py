"""V1 of DeepEP's surface: Buffer, as both of its releases are called.

A thin class over deep_comm.Buffer. What differs from it: handles are tuples, the low-latency size
hint is DeepEP's number, keywords of forks are taken or refused by name, and flags that other flags
make meaningless are ignored, as there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import deep_comm
from deep_comm import log
from deep_comm.compat import extensions as extended
from deep_comm.compat import hints
from deep_comm.compat.nvfp4 import experts_last
from deep_comm.compat.runtime import Runtime
from deep_comm.config import Config
from deep_comm.errors import ArgumentError
from deep_comm.events import EventHandle, EventOverlap
from deep_comm.results import CombineResult, DispatchLayout, LowLatencyCombineResult
from deep_comm.tuning import DEFAULT_NUM_SMS

topk_idx_t: torch.dtype = torch.int64


class HandleTuple(tuple[Any, ...]):
    """A handle as DeepEP's callers know it: a tuple, by position.

    ``native`` is the deep_comm handle behind it, with names for everything. A tuple that callers
    build from its items serves dispatch and combine too, more slowly; low-latency combine needs
    this one.
    """

    native: Any

    @classmethod
    def of(cls, native: Any) -> HandleTuple | None:
        """Of a native handle; None of none."""
        if native is None:
            return None
        handle = cls(native.as_tuple())
        handle.native = native
        return handle


_INTERNODE_DISPATCH = inspect.signature(deep_comm.Buffer.internode_dispatch)
_INTERNODE_COMBINE = inspect.signature(deep_comm.Buffer.internode_combine)
_NUM_WORST_TOKENS = list(_INTERNODE_DISPATCH.parameters).index("num_worst_tokens") - 1  # no self

# Keyword-only arguments of deep_comm.Buffer.
_OWN_OPTIONS = tuple(
    name
    for name, parameter in inspect.signature(deep_comm.Buffer.__init__).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
)

DispatchResult = tuple[
    Tensor | tuple[Tensor, Tensor],
    Tensor | None,
    Tensor | None,
    list[int] | None,
    HandleTuple | None,
    EventOverlap,
]


def _with_native_arguments(
    signature: inspect.Signature, buffer: Any, arguments: Sequence[Any], options: dict[str, Any]
) -> inspect.BoundArguments:
    """handle and previous_event as deep_comm.Buffer takes them."""
    bound = signature.bind(buffer, *arguments, **options)
    for name, convert in (("handle", _native), ("previous_event", _event)):
        if name in bound.arguments:
            bound.arguments[name] = convert(bound.arguments[name])
    return bound


def _native(handle: Any) -> Any:
    return handle.native if type(handle) is HandleTuple else handle


NOT_OFFERED = {
    "low_latency_dispatch_fp4": "low_latency_dispatch with use_nvfp4 casts rows to four bits",
    "low_latency_combine_low_precision": "low_latency_combine with use_logfmt sends fewer bits",
}
"""Methods of TensorRT-LLM's copy, and what does something alike here."""


class Buffer(deep_comm.Buffer):
    """DeepEP's Buffer over deep_comm. See deep_comm.Buffer for shapes, dtypes and errors.

    ``destroy()`` may be called whatever ``explicitly_destroy`` says, and neither it nor the
    destructor waits for a peer.
    """

    num_sms: int = DEFAULT_NUM_SMS  # 20, until it is set the engine's own choice: docs/guide/sms.md

    def __init__(
        self,
        group: Any = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: Any = False,
        comm: Any = None,
        **others: Any,
    ) -> None:
        """The arguments of DeepEP 1.2.1; by keyword deep_comm.Buffer's own, and those of forks.

        Later releases have no ``use_fabric``. By keyword both are served. By position, ten
        arguments are told apart by their last: None or a communicator means that it is ``comm``.
        ``use_fabric`` and ``explicitly_destroy`` change nothing here, so that fewer arguments mean
        the same in both, except that the ninth is ``explicitly_destroy``: pass ``enable_shrink`` by
        keyword.
        """
        own = {name: others.pop(name) for name in _OWN_OPTIONS if name in others}
        extended.check("Buffer", extended.CONSTRUCTOR, others)
        is_later_form = enable_shrink is None or hasattr(enable_shrink, "Get_rank")
        if is_later_form and comm is None:
            enable_shrink, comm = bool(explicitly_destroy), enable_shrink
            explicitly_destroy = use_fabric
        allocated_bytes = num_rdma_bytes
        if low_latency_mode:
            allocated_bytes = hints.bytes_to_allocate(
                group, comm, num_rdma_bytes, bool(enable_shrink), own.get("timeout_s")
            )
        with log.used_by("deep_ep.Buffer"):
            super().__init__(
                group,
                num_nvl_bytes,
                allocated_bytes,
                low_latency_mode=low_latency_mode,
                num_qps_per_rank=num_qps_per_rank,
                allow_nvlink_for_low_latency_mode=allow_nvlink_for_low_latency_mode,
                allow_mnnvl=allow_mnnvl,
                use_fabric=use_fabric,
                explicitly_destroy=explicitly_destroy,
                enable_shrink=enable_shrink,
                comm=comm,
                **own,
            )
        self.num_rdma_bytes = num_rdma_bytes  # what callers compare with their next size hint

    @property
    def runtime(self) -> Runtime | None:  # type: ignore[override]
        """The few things that callers ask the native object; None after destroy()."""
        return Runtime(self) if self._context.is_open else None

    # ---- statics -------------------------------------------------------------------------------

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """SMs of the recommended configs from now on: even, at least 2."""
        if new_num_sms < 2 or new_num_sms % 2 != 0:
            raise ArgumentError("new_num_sms", new_num_sms, "must be even and at least 2")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_low_latency_rdma_size_hint(  # type: ignore[override]
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """DeepEP's number. A Buffer built with it allocates what deep_comm needs for this shape."""
        return hints.low_latency_bytes(
            num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts
        )

    @staticmethod
    def _unpack_bias(
        bias: Tensor | tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        if bias is None or isinstance(bias, Tensor):
            return bias, None
        if len(bias) != 2:
            raise ArgumentError(
                "bias", f"{len(bias)} items", "must be a tensor or a pair of tensors"
            )
        return bias[0], bias[1]

    # ---- normal mode ---------------------------------------------------------------------------

    def dispatch(  # type: ignore[override]
        self,
        x: Tensor | tuple[Tensor, Tensor],
        handle: Sequence[Tensor] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        **extensions: Any,
    ) -> DispatchResult:
        if extensions:
            extended.check("Buffer.dispatch", extended.DISPATCH, extensions)
        *received, native, event = super().dispatch(
            x,
            _native(handle),
            num_tokens_per_rank,
            num_tokens_per_rdma_rank,
            is_token_in_rank,
            num_tokens_per_expert,
            topk_idx,
            topk_weights,
            expert_alignment,
            num_worst_tokens,
            config,
            _event(previous_event),
            async_finish,
            allocate_on_comm_stream,
        )
        return (*received, HandleTuple.of(native), event)  # type: ignore[return-value]

    def combine(
        self,
        x: Tensor,
        handle: Sequence[Tensor],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        **extensions: Any,
    ) -> CombineResult:
        if extensions:
            extended.check("Buffer.combine", {}, extensions)
        return super().combine(
            x,
            _native(handle),
            topk_weights,
            bias,
            config,
            _event(previous_event),
            async_finish,
            allocate_on_comm_stream,
        )

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> DispatchLayout:
        return super().get_dispatch_layout(
            topk_idx, num_experts, _event(previous_event), async_finish, allocate_on_comm_stream
        )

    # ---- normal mode over several nodes --------------------------------------------------------

    def internode_dispatch(  # type: ignore[override]
        self, *arguments: Any, **options: Any
    ) -> DispatchResult:
        """What dispatch does over several nodes. By position the arguments are 1.2.1's; later
        releases have no ``num_worst_tokens``, so that a Config in its place has everything move up
        by one."""
        if len(arguments) > _NUM_WORST_TOKENS and isinstance(arguments[_NUM_WORST_TOKENS], Config):
            arguments = (*arguments[:_NUM_WORST_TOKENS], 0, *arguments[_NUM_WORST_TOKENS:])
        bound = _with_native_arguments(_INTERNODE_DISPATCH, self, arguments, options)
        *received, native, event = super().internode_dispatch(*bound.args[1:], **bound.kwargs)
        return (*received, HandleTuple.of(native), event)  # type: ignore[return-value]

    def internode_combine(self, *arguments: Any, **options: Any) -> CombineResult:
        """What combine does over several nodes."""
        bound = _with_native_arguments(_INTERNODE_COMBINE, self, arguments, options)
        return super().internode_combine(*bound.args[1:], **bound.kwargs)

    internode_dispatch.__signature__ = _INTERNODE_DISPATCH  # type: ignore[attr-defined]
    internode_combine.__signature__ = _INTERNODE_COMBINE  # type: ignore[attr-defined]

    # ---- low-latency mode ----------------------------------------------------------------------

    def low_latency_dispatch(  # type: ignore[override]
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        use_nvfp4: bool = False,
        x_global_scale: Tensor | None = None,
        **extensions: Any,
    ) -> tuple[
        Tensor | tuple[Tensor, Tensor],
        Tensor,
        HandleTuple | None,
        EventOverlap,
        Callable[[], None] | None,
    ]:
        """``round_scale`` and ``use_ue8m0`` are ignored without ``use_fp8``: servers pass them
        always.

        ``use_nvfp4``, hybrid-ep's, comes instead of ``use_fp8``: rows are uint8 of shape
        [R * M, H / 2, L], scales e4m3 of shape [32, 4, ceil(R * M / 128), 4, H / 64, L], both as
        views of memory in the opposite order of experts, rows and columns; see deep_comm.Buffer.
        ``x_global_scale`` is ignored without it.
        """
        if extensions:
            extended.check("Buffer.low_latency_dispatch", extended.LOW_LATENCY_DISPATCH, extensions)
        recv_x, recv_count, native, event, hook = super().low_latency_dispatch(
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            cumulative_local_expert_recv_stats,
            dispatch_wait_recv_cost_stats,
            use_fp8,
            bool(use_fp8 and round_scale and not use_nvfp4),
            bool(use_fp8 and use_ue8m0 and not use_nvfp4),
            async_finish,
            return_recv_hook,
            use_nvfp4=use_nvfp4,
            x_global_scale=x_global_scale if use_nvfp4 else None,
        )
        if use_nvfp4:
            recv_x = experts_last(*recv_x)
        return recv_x, recv_count, HandleTuple.of(native), event, hook

    def low_latency_combine(  # type: ignore[override]
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
        **extensions: Any,
    ) -> LowLatencyCombineResult:
        if extensions:
            extended.check("Buffer.low_latency_combine", extended.LOW_LATENCY_COMBINE, extensions)
        return super().low_latency_combine(
            x,
            topk_idx,
            topk_weights,
            _native(handle),
            use_logfmt,
            zero_copy,
            async_finish,
            return_recv_hook,
            out,
            combine_wait_recv_cost_stats,
        )

    def get_next_low_latency_combine_buffer(self, handle: tuple[Any, ...]) -> Tensor:  # type: ignore[override]
        return super().get_next_low_latency_combine_buffer(_native(handle))

    def __getattr__(self, name: str) -> Any:
        """Called for what is missing; methods that a fork has are named."""
        if name in NOT_OFFERED:
            raise AttributeError(
                f"{name} belongs to TensorRT-LLM's copy of DeepEP; here {NOT_OFFERED[name]}",
                name=name,
                obj=self,
            )
        raise AttributeError(
            f"'{type(self).__name__}' object has no attribute '{name}'", name=name, obj=self
        )


def _event(previous_event: Any) -> Any:
    """Anything with an ``event`` will do, as there; without one there is nothing to wait for."""
    if previous_event is None or isinstance(previous_event, (EventHandle, EventOverlap)):
        return previous_event
    return getattr(previous_event, "event", previous_event)
