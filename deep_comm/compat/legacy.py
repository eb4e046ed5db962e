"""V1 of DeepEP's surface: Buffer, as both of its releases are called.

A thin class over deep_comm.Buffer. What differs from it: handles are tuples, the low-latency size
hint is DeepEP's number, keywords of forks are taken or refused by name, and flags that other flags
make meaningless are ignored, as there.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
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


# Keyword-only arguments of deep_comm.Buffer.
_OWN_OPTIONS = tuple(
    name
    for name, parameter in inspect.signature(deep_comm.Buffer.__init__).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
)


# What becomes of an argument in a call with ``handle``, if it has one.


def _native(given: Any, handle: Any) -> Any:
    """One that a caller has built in this class has nothing behind it."""
    return getattr(handle, "native", handle) if type(handle) is HandleTuple else handle


def _event(previous_event: Any, handle: Any) -> Any:
    """Anything with an ``event`` will do, as there; without one there is nothing to wait for."""
    if previous_event is None or isinstance(previous_event, (EventHandle, EventOverlap)):
        return previous_event
    return getattr(previous_event, "event", previous_event)


_SMS_OF_CHANNEL = {6: 1, 10: 2}  # by the items of a handle: inside a node, between nodes


def _with_sms_of(config: Any, handle: Any) -> Any:
    """``config`` with as many SMs as the dispatch of ``handle`` had.

    There a dispatch without a Config has as many as the recommended ones, so that its combine may
    be given one of them; here the engine chooses.
    """
    is_handle = isinstance(handle, (tuple, list)) and len(handle) in _SMS_OF_CHANNEL
    if not (is_handle and isinstance(handle[1], Tensor) and isinstance(config, Config)):
        return config  # what is wrong is refused by the call
    if handle[1].dim() != 2 or handle[1].shape[1] == 0:
        return config  # likewise
    num_channels, num_sms = handle[1].shape[1], _SMS_OF_CHANNEL[len(handle)]
    if config.num_sms // num_sms == num_channels:
        return config
    return dataclasses.replace(config, num_sms=num_channels * num_sms)


def _adapted(
    method: Callable[..., Any], extensions: Mapping[str, extended.Extension]
) -> Callable[..., Any]:
    """A method of deep_comm.Buffer with DeepEP's arguments: those that it takes by position.

    ``extensions``: keywords of forks that it takes as well.
    """
    known = [
        parameter
        for parameter in inspect.signature(method).parameters.values()
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    places = {parameter.name: place for place, parameter in enumerate(known)}
    converters = {"handle": _native, "config": _with_sms_of, "previous_event": _event}
    converted = [
        (places[name] - 1, name, convert)  # without self
        for name, convert in converters.items()
        if name in places
    ]
    place_of_handle = places.get("handle", len(known) + 1) - 1

    @functools.wraps(method)
    def call(self: Buffer, *arguments: Any, **options: Any) -> Any:
        others = {name: value for name, value in options.items() if name not in places}
        if others:
            extended.check(f"Buffer.{method.__name__}", extensions, others)
            options = {name: value for name, value in options.items() if name in places}
        given = [*arguments]
        is_given = place_of_handle < len(given)
        handle = given[place_of_handle] if is_given else options.get("handle")
        for place, name, convert in converted:
            if place < len(given):
                given[place] = convert(given[place], handle)
            elif name in options:
                options[name] = convert(options[name], handle)
        return method(self, *given, **options)

    own = inspect.Parameter("extensions", inspect.Parameter.VAR_KEYWORD)
    call.__signature__ = inspect.Signature([*known, own])  # type: ignore[attr-defined]
    return call


def _with_tuple(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """A dispatch whose handle comes back as a tuple."""

    @functools.wraps(dispatch)
    def call(self: Buffer, *arguments: Any, **options: Any) -> Any:
        *received, native, event = dispatch(self, *arguments, **options)
        return (*received, HandleTuple.of(native), event)

    return call


NOT_OFFERED = {
    "low_latency_dispatch_fp4": "low_latency_dispatch with use_nvfp4 casts rows to four bits",
    "low_latency_combine_low_precision": "low_latency_combine with use_logfmt sends fewer bits",
}
"""Methods of TensorRT-LLM's copy, and what does something alike here."""


_NUM_WORST_TOKENS = list(inspect.signature(deep_comm.Buffer.dispatch).parameters).index(
    "num_worst_tokens"
)


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
        # What is no number of bytes is refused below; another rank's hint must not stand for it.
        if low_latency_mode and isinstance(num_rdma_bytes, int) and num_rdma_bytes > 0:
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
        if not isinstance(new_num_sms, int) or new_num_sms < 2 or new_num_sms % 2 != 0:
            raise ArgumentError("new_num_sms", repr(new_num_sms), "must be even and at least 2")
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

    dispatch = _with_tuple(_adapted(deep_comm.Buffer.dispatch, extended.DISPATCH))
    combine = _adapted(deep_comm.Buffer.combine, {})
    get_dispatch_layout = _adapted(deep_comm.Buffer.get_dispatch_layout, {})
    internode_combine = _adapted(deep_comm.Buffer.internode_combine, {})
    _internode_dispatch = _with_tuple(_adapted(deep_comm.Buffer.internode_dispatch, {}))

    @functools.wraps(_internode_dispatch)
    def internode_dispatch(self, *arguments: Any, **options: Any) -> Any:  # type: ignore[override]
        """What dispatch does over several nodes. By position the arguments are 1.2.1's; later
        releases have no ``num_worst_tokens``, so that a Config in its place has everything move up
        by one."""
        before, rest = arguments[: _NUM_WORST_TOKENS - 1], arguments[_NUM_WORST_TOKENS - 1 :]
        if rest and isinstance(rest[0], Config):
            arguments = (*before, 0, *rest)
        return self._internode_dispatch(*arguments, **options)

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

    low_latency_combine = _adapted(
        deep_comm.Buffer.low_latency_combine, extended.LOW_LATENCY_COMBINE
    )
    get_next_low_latency_combine_buffer = _adapted(
        deep_comm.Buffer.get_next_low_latency_combine_buffer, {}
    )

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
