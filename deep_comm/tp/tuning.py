"""Which method a product takes: what was measured on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from deep_comm.symmetric import SymmetricMemory


def choice(
    memory: SymmetricMemory, op: str, rows: int, x: Tensor, weights: Sequence[Tensor]
) -> str:
    return "unfused"
