"""Tensors over memory that torch does not own: the heaps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from deep_comm import _core

_DEVICE_TYPES = {"cpu": 1, "cuda": 2}  # DLPack's


def tensor_at(
    address: int,
    shape: Sequence[int],
    device: torch.device,
    owner: object,
    dtype: torch.dtype = torch.uint8,
) -> Tensor:
    """``owner`` lives as long as the last tensor over the memory."""
    num_bytes = math.prod(shape) * dtype.itemsize
    capsule = _core.bytes_capsule(
        address, num_bytes, _DEVICE_TYPES[device.type], device.index or 0, owner
    )
    with torch.inference_mode(False):  # or nobody could write to it outside of that
        return from_dlpack(capsule).view(dtype).view(shape)
