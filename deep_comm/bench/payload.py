"""Random integers that are alike everywhere, and rows as bytes, whatever their dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def _flat_bytes(values: Tensor) -> Tensor:
    flat = values.reshape(-1)
    # A tensor of one element counts as contiguous with any stride, which view() then refuses.
    flat = flat.contiguous().as_strided((flat.numel(),), (1,))
    return flat.view(torch.uint8)


def row_bytes(rows: Tensor) -> Tensor:
    """uint8 [n, bytes of a row] of rows in the last dimension: torch cannot index every dtype."""
    flat = _flat_bytes(rows)
    num_bytes = rows.shape[-1] * rows.element_size()
    return flat.view(len(flat) // num_bytes, num_bytes)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal in shape, dtype and every bit; on whichever device they are."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.equal(_flat_bytes(one), _flat_bytes(other)))


def integers(
    low: int, high: int, sizes: Sequence[int], seed: int, device: torch.device,
    dtype: torch.dtype = torch.int32,
) -> Tensor:  # fmt: skip
    """Uniform in low..high - 1; the same on all ranks whose devices are of one kind."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(low, high, sizes, generator=generator, device=device, dtype=dtype)
