"""The readable truth of ``deep_comm.tp``: inputs and results are lists by rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "all_reduce_norm",
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


def all_reduce_norm(
    x: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float
) -> list[tuple[Tensor, Tensor]]:
    """x: [M, N] each; residual: [M, N]; weight: [N]. Returns (normed, residual) each.

    The squares of a row are added in float32 in this order: lane l of 32 those of vectors of 16
    bytes l, l + 32, …, element by element; then the lanes in pairs 16, 8, 4, 2, 1 apart.
    """
    dtype = x[0].dtype
    total = (all_reduce(x)[0].float() + residual.float()).to(dtype)
    rows, columns = total.shape
    values = total.float()
    vectors = values.view(rows, -1, 16 // dtype.itemsize)
    lanes = torch.zeros((rows, 32), dtype=torch.float32)
    for first in range(0, vectors.shape[1], 32):
        group = vectors[:, first : first + 32]
        for element in range(group.shape[2]):
            lanes[:, : group.shape[1]] += group[:, :, element] * group[:, :, element]
    for distance in (16, 8, 4, 2, 1):
        lanes = lanes + lanes[:, torch.arange(32) ^ distance]
    mean = lanes[:, :1] / columns + torch.tensor(eps, dtype=torch.float32)
    root = torch.sqrt(mean.double()).float()  # in float32 torch rounds some wrongly
    scale = torch.ones_like(root) / root
    normed = ((values * scale) * (0.0 + weight.float())).to(dtype)  # a weight's zero has no sign
    return [(normed, total)] * len(x)


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
