"""NVFP4 outputs of low-latency dispatch as callers of DeepEP's hybrid-ep branch know them."""

from __future__ import annotations

from torch import Tensor


def experts_last(rows: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Views of [L, N, H / 2] as [N, H / 2, L], and of [L, ceil(N / 128), H / 64, 32, 4, 4] as
    [32, 4, ceil(N / 128), 4, H / 64, L]."""
    return rows.permute(1, 2, 0), scales.permute(3, 4, 1, 5, 2, 0)
