"""The readable truth of ``deep_comm.tp``: inputs and results are lists by rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "reduce_scatter",
]


def all_gather(x: Sequence[Tensor]) -> list[Tensor]:
    """x: [N, ...] each. Returns [R * N, ...] each."""
    return [torch.cat(list(x))] * len(x)


def all_reduce(x: Sequence[Tensor]) -> list[Tensor]:
    """The sum in float32 in rank order, rounded once."""
    total = torch.zeros(x[0].shape, dtype=torch.float32)
    for of_rank in x:
        total += of_rank.float()
    return [total.to(x[0].dtype)] * len(x)


def reduce_scatter(x: Sequence[Tensor]) -> list[Tensor]:
    """x: [R * N, ...] each. Returns [N, ...] each."""
    return list(all_reduce(x)[0].chunk(len(x)))


def all_gather_matmul(x: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """x: [N, K] each; weights: [K, M], of each rank. Returns [R * N, M] each."""
    return [torch.cat(list(x)) @ weight for weight in weights]


def matmul_all_reduce(x: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """Every rank's product is rounded before it is added."""
    return all_reduce([rows @ weight for rows, weight in zip(x, weights, strict=True)])


def matmul_reduce_scatter(x: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """x: [R * N, K] each; weights: [K, M], of each rank. Returns [N, M] each."""
    return reduce_scatter([rows @ weight for rows, weight in zip(x, weights, strict=True)])
