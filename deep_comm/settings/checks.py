"""Checks of what callers pass, each naming the argument, the value and the rule."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from deep_comm.errors import ArgumentError
from deep_comm.settings import integers

MAX_EXPERTS = 56 << 10  # counters of 4 bytes, and a little more, in 227 KiB of shared memory
SCALE_BLOCK = 128  # columns of a row that share a scale when the engine quantises
MAX_EXPERT_ALIGNMENT = 1 << 16  # so that sums of padded counts stay below 2**31


def _names(values: Sequence[Any]) -> str:
    return " or ".join(str(value) for value in values)


def tensor(
    name: str,
    value: Any,
    device: torch.device,
    *,
    shape: Sequence[int | None],
    dtypes: Container[torch.dtype] | None = None,
    contiguous: bool = True,
) -> Tensor:
    """``value`` if it is a tensor of this shape (None: any extent), dtype and device."""
    if (
        isinstance(value, Tensor)
        and value.device == device
        and (dtypes is None or value.dtype in dtypes)
        and (not contiguous or value.is_contiguous())
    ):
        extents = value.shape
        if len(extents) == len(shape):
            for extent, wanted in zip(extents, shape, strict=True):
                if wanted is not None and extent != wanted:
                    break
            else:
                return value
    raise _refusal(name, value, device, shape, dtypes)


def _refusal(
    name: str,
    value: Any,
    device: torch.device,
    shape: Sequence[int | None],
    dtypes: Container[torch.dtype] | None,
) -> ArgumentError:
    """Which rule of tensor() ``value`` breaks; the first of several."""
    if not isinstance(value, Tensor):
        return ArgumentError(name, type(value).__name__, "must be a tensor")
    if value.device != device:
        return ArgumentError(name, value.device, f"must be on this Buffer's device {device}")
    if dtypes is not None and value.dtype not in dtypes:
        assert isinstance(dtypes, Iterable)
        return ArgumentError(name, value.dtype, f"must have dtype {_names(tuple(dtypes))}")
    fits = value.dim() == len(shape) and all(
        wanted is None or extent == wanted
        for extent, wanted in zip(value.shape, shape, strict=True)
    )
    if not fits:
        wanted_shape = ["any" if extent is None else extent for extent in shape]
        rule = f"must have shape [{', '.join(map(str, wanted_shape))}]"
        return ArgumentError(name, list(value.shape), rule)
    return ArgumentError(name, f"strides {value.stride()}", "must be contiguous")


def max_experts(name: str, value: Any) -> int:
    note = " (a block of a kernel has a counter for each in its shared memory)"
    return integers.require(name, value, 1, MAX_EXPERTS, note=note)


def num_experts(value: Any, num_max_experts: int) -> int:
    note = " (num_max_experts of the Buffer)"
    return integers.require("num_experts", value, 1, num_max_experts, note=note)


def timeout_s(name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or not 0 < value < 1e9:
        raise ArgumentError(name, value, "must be a number of seconds above 0 and below 1e9")
    return float(value)


def expert_alignment(value: Any) -> int:
    return integers.require("expert_alignment", value, 1, MAX_EXPERT_ALIGNMENT)
