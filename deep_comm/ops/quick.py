"""What native code needs of torch to make whole calls, where torch has it.

See csrc/bind/torch_tensors.hpp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
