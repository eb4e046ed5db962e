"""An example kernel on two simulated ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from deep_comm import _core, simulate

_LINE_WORDS = 16  # as in csrc/device/examples
_CONTROL_LINES = 3
_WORD_BYTES = 8


def wrong_words(name: str, seed: int, *, faults: Sequence[str] = (), **shape: int) -> int:
    """How many words rank 1 did not see as rank 0 wrote them."""
    num_words = _CONTROL_LINES * _LINE_WORDS + shape["num_words"] * shape.get("num_slots", 1)
    memory = _core.allocate(_WORD_BYTES * num_words)
    try:

        def rank_main(group: Any) -> None:
            _core.run_example(
                group.simulation, name=name, rank=group.rank(), memory=memory, **shape
            )

        simulate.run(rank_main, 2, seed, faults=faults)
        return ctypes.c_uint64.from_address(memory + _WORD_BYTES * _LINE_WORDS).value
    finally:
        _core.free(memory)
