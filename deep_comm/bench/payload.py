"""Rows as bytes: torch cannot compare or index every dtype, but it can bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def row_bytes(rows: Tensor) -> Tensor:
    """uint8 [n, bytes of a row] of rows in the last dimension."""
    num_bytes = rows.shape[-1] * rows.element_size()
    flat = rows.reshape(-1).contiguous().view(torch.uint8)
    return flat.view(len(flat) // num_bytes, num_bytes)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal in shape, dtype and every bit; on whichever device they are."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.numel() == 0:
        return True
    as_bytes = (part.contiguous().view(torch.uint8) for part in (one, other))
    return bool(torch.equal(*as_bytes))


def generator(device: torch.device, seed: int) -> torch.Generator:
    """Gives every rank the same numbers."""
    return torch.Generator(device).manual_seed(seed)
