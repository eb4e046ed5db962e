"""The one check of numbers that callers pass, and how sizes are rounded up."""

from __future__ import annotations

from typing import Any

from deep_comm.errors import ArgumentError

LARGEST = 2**31 - 1
"""What kernels count in."""

MOST_BYTES = 2**60
"""Of a Buffer: sums of a few such still fit into 64 bits."""


LINE = 128
"""Bytes: parts of a heap begin at multiples."""


def round_up(value: int, multiple: int = LINE) -> int:
    return -(-value // multiple) * multiple


def require(
    name: str, value: Any, smallest: int, largest: int | None = None, *, note: str = ""
) -> int:
    """``value`` if it is an int of ``smallest`` to ``largest``.

    Numbers of numpy are refused: addresses and bytes are reckoned from these, where numpy's wrap.

    Args:
        note: appended to the rule.

    Raises:
        ArgumentError: naming ``name``, the value and the rule.
    """
    is_int = isinstance(value, int)
    if is_int and value >= smallest and (largest is None or value <= largest):
        return int(value)
    if largest is None or (largest == LARGEST and (not is_int or value < smallest)):
        rule = f"must be an integer of at least {smallest}"
    else:
        rule = f"must be an integer of {smallest} to {largest}"
    # "4" looks as if it kept the rule.
    given = value if is_int else f"{value!r} of type {type(value).__name__}"
    raise ArgumentError(name, given, rule + note)
