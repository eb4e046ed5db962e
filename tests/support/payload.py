"""Payloads that say where they came from, and comparisons that read them.

A dispatched row is made of 8-byte words, each a reversible scramble of (source rank, token, column,
call). A misplaced, stale or torn row therefore differs from the expected one, and its words name
the row they belong to. Rows that combine sums are floats whose sum depends on the order of the
additions.

All are made on torch's default device, and are the same on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BYTES = 8

# Field widths of a word; together 64 bits.
_COLUMN_BITS, _TOKEN_BITS, _CALL_BITS, _RANK_BITS = 20, 20, 16, 8

# Odd, hence invertible modulo 2**64; all bytes of a word depend on the low fields.
_MULTIPLIER = 0x9E3779B97F4A7C15
_INVERSE = pow(_MULTIPLIER, -1, 1 << 64)

POISON_BYTE = 0xA5


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def rows(
    source_rank: int, num_tokens: int, hidden: int, dtype: torch.dtype, call: int = 0
) -> Tensor:
    """The payload [num_tokens, hidden] of one rank in one call."""
    row_bytes = hidden * dtype.itemsize
    assert row_bytes % WORD_BYTES == 0
    tokens = torch.arange(num_tokens, dtype=torch.int64).unsqueeze(1)
    columns = torch.arange(row_bytes // WORD_BYTES, dtype=torch.int64).unsqueeze(0)
    word = columns | (tokens << _COLUMN_BITS)
    word = word | _signed(call << (_COLUMN_BITS + _TOKEN_BITS))
    # Rank 255 would be the sign bit's; ranks are few.
    word = word | _signed((source_rank + 1) << (_COLUMN_BITS + _TOKEN_BITS + _CALL_BITS))
    scrambled = word * _signed(_MULTIPLIER)
    return scrambled.view(dtype).reshape(num_tokens, hidden)


def decode(word: int) -> str:
    """Where an 8-byte word of a payload came from, in words."""
    if word & ((1 << 64) - 1) == int.from_bytes(bytes([POISON_BYTE]) * WORD_BYTES, "little"):
        return "poison: never written"
    if word == 0:
        return "zeros"
    plain = (word * _INVERSE) & ((1 << 64) - 1)
    column = plain & ((1 << _COLUMN_BITS) - 1)
    token = (plain >> _COLUMN_BITS) & ((1 << _TOKEN_BITS) - 1)
    call = (plain >> (_COLUMN_BITS + _TOKEN_BITS)) & ((1 << _CALL_BITS) - 1)
    rank = (plain >> (_COLUMN_BITS + _TOKEN_BITS + _CALL_BITS)) - 1
    if rank not in range(64) or token > 1 << 18 or call > 1 << 12:
        return f"no payload word (0x{word & ((1 << 64) - 1):016x})"
    return f"rank {rank} token {token} bytes {column * WORD_BYTES}.. call {call}"


def summands(
    source_rank: Tensor,
    source_token: Tensor,
    expert_rank: int,
    hidden: int,
    dtype: torch.dtype,
    call: int = 0,
) -> Tensor:
    """What rank ``expert_rank`` gives to combine for the rows it received: [num_rows, hidden].

    In every fourth column one of three consecutive expert ranks gives a large value, one a small
    one, one what cancels the large one. A small one is lost if it is added in between, so that
    another order of addition gives other bits.
    """
    columns = torch.arange(hidden, dtype=torch.int64).unsqueeze(0)
    key = source_rank.long().unsqueeze(1) * 1_000_003 + source_token.long().unsqueeze(1) * 7_919
    key = (key + columns * 104_729 + expert_rank * 15_485_863 + call * 32_452_843) & 0x7FFFFFFF
    key = ((key ^ (key >> 13)) * 1_274_126_177) & 0x7FFFFFFF
    # float16: sixteen large ones of one sign (a token's experts on one rank) stay finite.
    small_scale, large = (2.0**-13, 2.0**11) if dtype == torch.float16 else (1.0, 2.0**24)
    small = ((key % 4093).float() / 2048 - 1) * small_scale  # exact
    turn = (columns // 4 + expert_rank) % 3
    cancelling = torch.where(turn == 0, large, -large)
    return torch.where((columns % 4 == 0) & (turn != 1), cancelling, small).to(dtype)


def noise(
    seed: int, source_rank: int, num_tokens: int, hidden: int, dtype: torch.dtype, call: int = 0
) -> Tensor:
    """[num_tokens, hidden] from -1 to 1, 24 bits each."""
    tokens = torch.arange(num_tokens, dtype=torch.int64).unsqueeze(1)
    columns = torch.arange(hidden, dtype=torch.int64).unsqueeze(0)
    key = ((seed * 64 + source_rank) * 1024 + call) * 15_485_863 & 0x7FFFFFFF
    key = (tokens * 1_000_003 + columns * 104_729 + key) & 0x7FFFFFFF
    key = ((key ^ (key >> 13)) * 1_274_126_177) & 0x7FFFFFFF
    key = ((key ^ (key >> 15)) * 1_103_515_245) & 0x7FFFFFFF
    return ((key >> 7).float() / 2**23 - 1).to(dtype)


def as_words(tensor: Tensor) -> Tensor:
    """A 2-D tensor's bytes: as int64 words [rows, words] when they divide, else as bytes."""
    flat = tensor.contiguous()
    width = flat.shape[1] * flat.element_size()
    unit = torch.int64 if width % WORD_BYTES == 0 else torch.uint8
    if flat.numel() == 0:
        return torch.zeros(flat.shape[0], 0, dtype=unit)
    # Flat first: a dimension of one element may have any stride, which view() of another size
    # refuses.
    return flat.view(-1).view(torch.uint8).view(flat.shape[0], width).view(unit)


def assert_same_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    """Bitwise equality; a failure shows the first mismatch and its decoded origin."""
    assert actual.dtype == expected.dtype, (
        f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    )
    shapes = f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.shape == expected.shape, shapes
    if actual.dim() != 2:
        width = actual.shape[-1] if actual.dim() > 1 else 1
        actual, expected = actual.reshape(-1, width), expected.reshape(-1, width)
    left, right = as_words(actual), as_words(expected)
    if torch.equal(left, right):
        return
    wrong = (left != right).nonzero()
    row, column = wrong[0].tolist()
    got, want = int(left[row, column]), int(right[row, column])
    text = f"{what}: {len(wrong)} of {left.numel()} words differ, first in row {row}, word {column}"
    if left.dtype == torch.int64:
        text += f"\n  got      {decode(got)}\n  expected {decode(want)}"
    element = column * actual.shape[1] // left.shape[1]
    text += f"\n  values {actual[row, element].item()} and {expected[row, element].item()}"
    raise AssertionError(text)
