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

if TYPE_CHECKING:
    from deep_comm import _core
    from deep_comm.checks import PayloadForm
    from deep_comm.context import Context
    from deep_comm.handle import KnownHandle
    from deep_comm.ops.plans import CombinePlan, DispatchPlan

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


def normal_of(ctx: Context) -> _core.QuickNormal | None:
    """What calls along a known routing have in common; None: they go step by step."""
    found = torch_of(ctx.device)
    if found is None or env.POISON.get():
        return None
    from deep_comm import _core  # native: loaded no earlier than the backend's module

    streams, current_stream, is_ready, record = ctx.backend.quick_streams()
    return _core.QuickNormal(
        *found,
        heap_base=ctx.heap.base,
        memory=ctx.heap.memory(),
        take=ctx.take,
        streams=streams,
        current_stream=current_stream,
        is_ready=is_ready,
        record=record,
    )


def layout_of(ctx: Context) -> Callable[[object, object], Any]:
    """get_dispatch_layout of a Buffer inside a node; needs no call before."""
    if ctx.quick is None:
        return never
    return ctx.quick.layout(
        launch=ctx.count_layout,
        num_ranks=ctx.num_ranks,
        num_max_experts=ctx.num_max_experts,
        num_max_topk=checks.MAX_TOPK,
        int32=torch.int32,
        boolean=torch.bool,
    )


@functools.cache
def _code(dtype: torch.dtype) -> tuple[int, int] | None:
    """DLPack's (code, bits), if torch makes tensors of it."""
    return foreign.code_of(dtype)


def remember_dispatch(
    ctx: Context, key: object, known: KnownHandle, plan: DispatchPlan, form: PayloadForm
) -> None:
    """After a plain cached dispatch: the next of its form is one step."""
    if ctx.quick is None or known.expansion is not None or form.quantises:
        return
    if key in known.quick_dispatches:
        return  # another width: making it anew each time would cost more than it saves
    dtype = _code(form.dtype)
    scale_dtype = dtype if form.scale_dtype is None else _code(form.scale_dtype)
    layout = known.output_layouts.get(form)
    if dtype is None or scale_dtype is None or layout is None:
        return
    _, scales_offset, num_bytes = layout
    known.quick_dispatches[key] = ctx.quick.dispatch(
        launch=plan.launch,
        home_stream=known.home_stream,
        routing=known.routing,
        dtype=dtype,
        scale_dtype=scale_dtype,
        num_tokens=known.num_tokens,
        hidden=form.hidden,
        num_scales=form.num_scales,
        num_rows=known.num_output_rows,
        scales_offset=scales_offset,
        num_bytes=num_bytes,
    )


def remember_combine(
    ctx: Context,
    key: object,
    known: KnownHandle,
    plan: CombinePlan,
    dtype: torch.dtype,
    hidden: int,
    num_staging_rows: int,
) -> None:
    """After a plain combine, likewise."""
    if key in known.quick_combines:
        return
    code = _code(dtype)
    if ctx.quick is None or known.expansion is not None or code is None:
        return
    known.quick_combines[key] = ctx.quick.combine(
        launch=plan.launch,
        home_stream=known.home_stream,
        way_back=known.way_back,
        dtype=code,
        torch_dtype=dtype,
        num_tokens=known.num_tokens,
        hidden=hidden,
        num_rows=known.num_output_rows,
        num_staging_bytes=num_staging_rows * plan.staging_row_bytes,
        num_staging_rows=num_staging_rows,
    )
