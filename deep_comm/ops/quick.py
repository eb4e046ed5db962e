"""What native code needs of torch to make whole calls, where torch has it.

See csrc/bind/torch_tensors.hpp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from deep_comm import checks, env
from deep_comm.backends import foreign
from deep_comm.events import EventOverlap
from deep_comm.handle_parts import SlabLayout, slab_layout
from deep_comm.topology import num_local_experts

if TYPE_CHECKING:
    from deep_comm import _core
    from deep_comm.checks import PayloadForm
    from deep_comm.config import Config
    from deep_comm.context import Context
    from deep_comm.handle import KnownHandle
    from deep_comm.ops.call import CallOptions
    from deep_comm.ops.plans import CombinePlan, DispatchPlan
    from deep_comm.tuning import DefaultConfig

TensorForm = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides, dtype."""

_DEVICE_TYPES = {"cpu": 1, "cuda": 2}


class Torch(NamedTuple):
    """Attributes: ``exchange_api``: DLPack's. ``empty(shape, strides, dtype)``: a tensor on the
    current device. ``part(tensor, shape, strides, offset)``: a tensor over elements of another."""

    tensor_type: type
    exchange_api: object
    empty: Callable[..., Tensor]
    part: Callable[..., Tensor]
    device_type: int
    device_index: int


def torch_of(device: torch.device) -> Torch | None:
    """None: this torch lacks something, and calls go step by step in Python."""
    exchange_api: Any = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    # What torch's compiler emits calls of: the tensors of torch.empty and as_strided, in half the
    # time.
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    empty = getattr(guards, f"_empty_strided_{device.type}", None)
    part = getattr(guards, "_reinterpret_tensor", None)
    if exchange_api is None or empty is None or part is None or device.type not in _DEVICE_TYPES:
        return None
    return Torch(Tensor, exchange_api, empty, part, _DEVICE_TYPES[device.type], device.index or 0)


def empty_of(device: torch.device) -> Callable[[Sequence[int], torch.dtype], Tensor]:
    """torch.empty of a shape and a dtype on the device, which must be current."""
    found = torch_of(device)
    if found is None:
        return lambda shape, dtype: torch.empty(*shape, dtype=dtype, device=device)
    empty = found.empty

    def quick_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        shape = tuple(shape)
        return empty(shape, contiguous_strides(shape), dtype)

    return quick_empty


@functools.lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * max(1, extent))
    return tuple(reversed(strides))


def never(*arguments: object) -> None:
    """In the place of a native call that there is not."""


class NormalCalls:
    """Whole calls of normal mode of one Buffer, each a native function that returns None, and has
    done nothing, for whatever is not a plain call of a form that ``remember_*`` was told of
    (csrc/bind/bind_quick_normal.cpp). Without ``native`` all of them do.
    """

    def __init__(
        self,
        native: _core.QuickNormal | None,
        is_internode: bool = False,
        is_synchronous: bool = False,
    ) -> None:
        """``is_synchronous``: Backend.is_synchronous."""
        self.native = native
        self.is_internode = is_internode
        self.dispatch: Callable[..., Any] = never
        self.new_dispatch: Callable[..., Any] = never
        self.combine: Callable[..., Any] = never
        self.dispatch_along: Callable[..., Any] = never
        self.combine_along: Callable[..., Any] = never
        if native is None:
            return
        calls = native.tier_calls() if is_internode else native.calls()
        self.dispatch, self.new_dispatch, self.combine = calls
        self.dispatch_along, self.combine_along = native.handled_calls(
            is_internode=is_internode, event_type=EventOverlap, is_synchronous=is_synchronous
        )


def normal_of(ctx: Context) -> NormalCalls:
    found = torch_of(ctx.device)
    if found is None or env.POISON.get():
        return NormalCalls(None)
    from deep_comm import _core  # native: loaded no earlier than the backend's module

    native = _core.QuickNormal(
        *found,
        num_ranks=ctx.num_ranks,
        ranks_per_node=ctx.topology.ranks_per_node,
        heap_base=ctx.heap.base,
        memory=ctx.heap.memory(),
        take=ctx.take,
        count_layout=ctx.count_layout,
        streams=ctx.backend.quick_streams(),
        likely_rows=ctx.expected.choices,
        expected=ctx.expected,
        likely_forwarded=ctx.expected.forwarded,
        wait_counts=ctx.wait_counts,
        wait_tier_counts=ctx.wait_tier_counts,
        expand_calls=ctx.engine.expand_calls(),
        float32=torch.float32,
        int32=torch.int32,
        uint8=torch.uint8,
    )
    return NormalCalls(native, ctx.topology.num_nodes > 1, ctx.backend.is_synchronous)


def layout_of(ctx: Context) -> Callable[[Context, object, object, object], Any]:
    """get_dispatch_layout; needs no call before."""
    if ctx.quick.native is None:
        return never
    return ctx.quick.native.layout(
        num_ranks=ctx.num_ranks,
        num_nodes=ctx.topology.num_nodes,
        num_max_experts=ctx.num_max_experts,
        num_max_topk=checks.MAX_TOPK,
        int32=torch.int32,
        boolean=torch.bool,
        event_type=EventOverlap,
        is_synchronous=ctx.backend.is_synchronous,
    )


@functools.cache
def code_of(dtype: torch.dtype) -> tuple[int, int] | None:
    """DLPack's (code, bits), if torch makes tensors of it."""
    return foreign.code_of(dtype)


def _codes(form: PayloadForm) -> dict[str, Any] | None:
    """Of rows and scales, by the names of the native calls."""
    dtype = code_of(form.dtype)
    scale_dtype = dtype if form.scale_dtype is None else code_of(form.scale_dtype)
    if dtype is None or scale_dtype is None:
        return None
    return dict(
        dtype=dtype, scale_dtype=scale_dtype, hidden=form.hidden, num_scales=form.num_scales
    )


def remember_dispatch(
    ctx: Context,
    config: Config | None,
    default: Config | DefaultConfig | None,
    known: KnownHandle,
    plan: DispatchPlan,
    form: PayloadForm,
) -> None:
    """After a plain cached dispatch, likewise."""
    native = ctx.quick.native
    if native is None or known.numbers is None:
        return
    codes = _codes(form)
    if codes is not None:
        native.add_dispatch(
            config=config,
            default=default,
            **codes,
            num_channels=known.num_channels,
            num_local_blocks=plan.rings.num_local_blocks,
            is_expanded=known.expansion is not None,
            cast=form.cast,
            launch=plan.launch,
        )


def remember_new_dispatch(
    ctx: Context,
    config: Config | None,
    default: Config | DefaultConfig | None,
    plan: DispatchPlan,
    form: PayloadForm,
    idx: Tensor,
    *,
    num_experts: int,
    alignment: int,
    has_layout: bool,
    is_expanded: bool,
) -> None:
    """After a plain dispatch with new routing, likewise; of any number of tokens."""
    native = ctx.quick.native
    if native is None:
        return
    codes = _codes(form)
    if codes is None:
        return
    num_local = num_local_experts(ctx.rank, num_experts, ctx.num_ranks)
    sizes = ctx.num_ranks, plan.rings.num_channels, num_local

    def slab_of(num_tokens: int) -> SlabLayout:
        return slab_layout(*sizes, num_tokens, not has_layout)

    native.add_new_dispatch(
        config=config,
        default=default,
        **codes,
        num_topk=idx.shape[1],
        num_experts=num_experts,
        alignment=alignment,
        idx_bytes=idx.element_size(),
        has_layout=has_layout,
        is_expanded=is_expanded,
        num_local_experts=num_local,
        num_local_blocks=plan.rings.num_local_blocks,
        cast=form.cast,
        notify=plan.notify,
        launch=plan.launch,
        slab_of=slab_of,
    )


def remember_combine(
    ctx: Context,
    config: Config | None,
    default: Config | DefaultConfig | None,
    known: KnownHandle,
    plan: CombinePlan,
    dtype: torch.dtype,
    hidden: int,
    num_topk: int,
) -> None:
    """After a plain combine, likewise. ``num_topk``: 0 without weights."""
    native, code = ctx.quick.native, code_of(dtype)
    if native is None or known.numbers is None or code is None:
        return
    native.add_combine(
        config=config,
        default=default,
        dtype=code,
        torch_dtype=dtype,
        hidden=hidden,
        num_topk=num_topk,
        num_channels=known.num_channels,
        num_local_blocks=plan.rings.num_local_blocks,
        has_default_sms=known.has_default_sms,
        staging_row_bytes=plan.staging_row_bytes,
        launch=plan.launch,
    )


def remember_tier_dispatch(
    ctx: Context,
    options: CallOptions,
    form: PayloadForm,
    num_channels: int,
    launch: Callable[..., None],
) -> None:
    """After a plain cached dispatch between nodes, likewise."""
    native = ctx.quick.native
    codes = None if native is None or form.quantises else _codes(form)
    if native is not None and codes is not None:
        native.add_tier_dispatch(
            config=options.config,
            default=options.default_config,
            **codes,
            num_channels=num_channels,
            launch=launch,
        )


def remember_new_tier_dispatch(
    ctx: Context,
    options: CallOptions,
    form: PayloadForm,
    idx: Tensor,
    *,
    num_experts: int,
    **others: Any,
) -> None:
    """After a plain dispatch with new routing between nodes, likewise; of any number of tokens.
    ``others``: as QuickNormal.add_new_tier_dispatch has them."""
    native = ctx.quick.native
    codes = None if native is None or form.quantises else _codes(form)
    if native is not None and codes is not None:
        native.add_new_tier_dispatch(
            config=options.config,
            default=options.default_config,
            **codes,
            num_topk=idx.shape[1],
            num_experts=num_experts,
            idx_bytes=idx.element_size(),
            num_local_experts=num_local_experts(ctx.rank, num_experts, ctx.num_ranks),
            **others,
        )


def remember_tier_combine(
    ctx: Context,
    options: CallOptions,
    num_channels: int,
    dtype: torch.dtype,
    hidden: int,
    num_topk: int,
    staging_row_bytes: int,
    launch: Callable[..., None],
) -> None:
    """After a plain combine between nodes, likewise. ``num_topk``: 0 without weights."""
    native, code = ctx.quick.native, code_of(dtype)
    if native is not None and code is not None:
        native.add_tier_combine(
            config=options.config,
            default=options.default_config,
            dtype=code,
            torch_dtype=dtype,
            hidden=hidden,
            num_topk=num_topk,
            num_channels=num_channels,
            staging_row_bytes=staging_row_bytes,
            launch=launch,
        )
