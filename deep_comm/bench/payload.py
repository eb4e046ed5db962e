"""Random integers that are alike everywhere, and rows as bytes, whatever their dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def row_bytes(rows: Tensor) -> Tensor:
    """uint8 [n, bytes of a row] of rows in the last dimension: torch cannot index every dtype."""
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


def integers(
    low: int, high: int, sizes: Sequence[int], seed: int, device: torch.device,
    dtype: torch.dtype = torch.int32,
) -> Tensor:  # fmt: skip
    """Uniform in low..high - 1; the same on all ranks whose devices are of one kind."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(low, high, sizes, generator=generator, device=device, dtype=dtype)
