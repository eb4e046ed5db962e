"""Tensors over memory that torch does not own: the heaps."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from deep_comm import _core

_DEVICE_TYPES = {"cpu": 1, "cuda": 2}  # DLPack's


def bytes_at(address: int, num_bytes: int, device: torch.device, owner: object) -> Tensor:
    """uint8 [num_bytes]; ``owner`` lives as long as the last tensor over the memory."""
    capsule = _core.bytes_capsule(
        address, num_bytes, _DEVICE_TYPES[device.type], device.index or 0, owner
    )
    return from_dlpack(capsule)
