"""Rows that say where they came from: every element is a hash of its row's key and its column.

Keys are made of source rank, token, slot (which of the rotating inputs) and salt, so that any rank
can compute any other's rows on its own device and compare bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Rows hashed at a time: 64-bit intermediates are several times the size of the result.
_CHUNK_ELEMENTS = 1 << 23
_MASK = (1 << 31) - 1


def _mix(value: Tensor) -> Tensor:
    """31-bit hash; products stay below 2^62."""
    value = ((value & _MASK) * 0x45D9F3B) & _MASK
    value = value ^ (value >> 15)
    value = (value * 0x2C1B3C6D) & _MASK
    return value ^ (value >> 13)


def row_keys(rank: Tensor | int, token: Tensor, slot: int, salt: Tensor | int = 0) -> Tensor:
    """int64 keys of rows, like ``token`` in shape."""
    token = token.to(torch.int64)
    source = torch.as_tensor(rank, dtype=torch.int64, device=token.device)
    return _mix(_mix(source * 8191 + slot * 1021 + salt * 131 + 1) + token)


def _hash_rows(
    keys: Tensor, num_columns: int, dtype: torch.dtype, finish: Callable[[Tensor], Tensor]
) -> Tensor:
    out = torch.empty(len(keys), num_columns, dtype=dtype, device=keys.device)
    columns = torch.arange(num_columns, device=keys.device) * 40503
    step = max(1, _CHUNK_ELEMENTS // max(num_columns, 1))
    for start in range(0, len(keys), step):
        part = keys[start : start + step]
        out[start : start + step] = finish(_mix(part[:, None] + columns))
    return out


def bf16_rows(keys: Tensor, num_columns: int) -> Tensor:
    """bf16 [n, num_columns]: finite, of both signs, magnitudes 2^-7 to 2, every mantissa."""

    def finish(hashed: Tensor) -> Tensor:
        magnitude = (120 + (hashed >> 1 & 7) << 7) | (hashed >> 4 & 127)
        return torch.where(hashed & 1 == 1, magnitude - (1 << 15), magnitude).to(torch.int16)

    return _hash_rows(keys, num_columns, torch.int16, finish).view(torch.bfloat16)


def byte_rows(keys: Tensor, num_columns: int) -> Tensor:
    """uint8 [n, num_columns]: anything."""
    return _hash_rows(
        keys, num_columns, torch.uint8, lambda hashed: (hashed >> 5 & 255).to(torch.uint8)
    )


def scale_rows(keys: Tensor, num_columns: int) -> Tensor:
    """float32 [n, num_columns]: exact, in (0, 1]."""
    keys = _mix(keys + 77)
    return _hash_rows(
        keys, num_columns, torch.float32, lambda hashed: ((hashed & 0xFFFF) + 1).float() / 65536
    )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal in shape, dtype and every bit; on whichever device they are."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.numel() == 0:
        return True
    as_bytes = (part.contiguous().view(torch.uint8) for part in (one, other))
    return bool(torch.equal(*as_bytes))
