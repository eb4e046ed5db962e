"""Tensors over memory that torch does not own: the heaps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deep_comm import _core

# DLPack's (code, bits). Other types travel as bytes and are viewed afterwards.
_TYPES: dict[torch.dtype, tuple[int, int]] = {
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.bfloat16: (4, 16),
}
_DEVICE_TYPES = {"cpu": 1, "cuda": 2}

# What torch.from_dlpack calls for a capsule, after checks that cost more than the call;
# four times in a dispatch.
from_dlpack: Callable[[object], Tensor] = getattr(torch._C, "_from_dlpack", torch.from_dlpack)  # type: ignore[attr-defined]
_matrix = _core.matrix


_OTHER_TYPES = {torch.float8_e4m3fn: (10, 8)}  # of newer versions of DLPack


def code_of(dtype: torch.dtype) -> tuple[int, int] | None:
    """DLPack's (code, bits) of a dtype whose matrices torch takes; else None."""
    code = _TYPES.get(dtype)
    if code is not None or dtype not in _OTHER_TYPES:
        return code
    code = _OTHER_TYPES[dtype]
    memory = torch.zeros(16, device="cpu")
    capsule = _matrix(memory.data_ptr(), 1, 16, *code, _DEVICE_TYPES["cpu"], 0, memory)
    try:
        return code if from_dlpack(capsule).dtype == dtype else None
    except (RuntimeError, BufferError):
        return None


class Place:
    """Makes tensors over memory of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device_type = _DEVICE_TYPES[device.type]
        self._device_index = device.index or 0

    def matrix(
        self, address: int, num_rows: int, num_columns: int, dtype: torch.dtype, owner: object
    ) -> Tensor:
        """[num_rows, num_columns], contiguous; ``owner`` lives as long
        as the last tensor over it.
        """
        known = _TYPES.get(dtype)
        if known is None:
            return self.matrix(
                address, num_rows, num_columns * dtype.itemsize, torch.uint8, owner
            ).view(dtype)
        return from_dlpack(
            _matrix(
                address,
                num_rows,
                num_columns,
                known[0],
                known[1],
                self._device_type,
                self._device_index,
                owner,
            )
        )
