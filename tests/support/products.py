"""Cases of the products of deep_comm.tp: calls of one SymmetricMemory, and what the reference says.

Values are small integers, so that sums of products are exact in every order, but for a factor of
each rank, by which sums of ranks are rounded.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deep_comm import tp
from deep_comm.reference import tp as reference
from deep_comm.symmetric import SymmetricMemory

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Product:
    op: str
    method: str
    rows: int  # of a rank
    depth: int
    columns: int
    dtype: torch.dtype = torch.bfloat16
    is_n_major: bool = True  # the weight is contiguous, not its transpose


@dataclass(frozen=True)
class ProductCase:
    num_ranks: int
    products: tuple[Product, ...]
    staging_bytes: int = 1 << 14


def operands(product: Product, num_ranks: int, rank: int, number: int) -> tuple[Tensor, Tensor]:
    """x and weight. No two calls or ranks have the same."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    rows = product.rows * (1 if product.op == "all_gather_matmul" else num_ranks)
    x = torch.randint(-3, 4, (rows, product.depth), generator=generator)
    weight = torch.randint(-3, 4, (product.depth, product.columns), generator=generator)
    # Sparse, so that what is summed stays exact in 8 bits of a significand.
    weight *= torch.rand(weight.shape, generator=generator) < min(1.0, 8 / product.depth)
    scale = 1.0 if product.op == "all_gather_matmul" else (1.0, 1 / 64, 37.0, 1 / 3)[rank % 4]
    weight = (weight * scale).to(product.dtype)
    return x.to(product.dtype), weight if product.is_n_major else weight.t().contiguous().t()


def make(product: Product, x: Tensor, weight: Tensor, memory: SymmetricMemory) -> Tensor:
    method: Any = product.method
    if product.op == "all_gather_matmul":
        gathered, (out,) = tp.all_gather_matmul(
            x, weight, memory, method=method, return_gathered=True
        )
        assert gathered is not None
        return torch.cat([gathered, out], dim=1)
    if product.op == "matmul_reduce_scatter":
        return tp.matmul_reduce_scatter(x, weight, memory, method=method)
    return tp.matmul_all_reduce(x, weight, memory, method=method)


def run_case(group: Any, case: ProductCase, **options: Any) -> list[Tensor]:
    """The results of this rank, on the host."""
    options = {"device": "cpu", **options}
    results = []
    with SymmetricMemory(group, 0, staging_bytes=case.staging_bytes, **options) as memory:
        for number, product in enumerate(case.products):
            given = operands(product, case.num_ranks, memory.rank, number)
            x, weight = (each.to(memory.device) for each in given)
            results.append(make(product, x, weight, memory))
            x.fill_(77)
        return [result.cpu() for result in results]


def expected(case: ProductCase) -> list[list[Tensor]]:
    """By call, then by rank."""
    found = []
    for number, product in enumerate(case.products):
        given = [operands(product, case.num_ranks, rank, number) for rank in range(case.num_ranks)]
        x, weights = [pair[0] for pair in given], [pair[1] for pair in given]
        outs = getattr(reference, product.op)(x, weights)
        if product.op == "all_gather_matmul":
            outs = [torch.cat([torch.cat(x), out], dim=1) for out in outs]
        found.append(outs)
    return found


def verify(case: ProductCase, results: Sequence[Sequence[Tensor]]) -> None:
    for number, by_rank in enumerate(expected(case)):
        for rank, wanted in enumerate(by_rank):
            got = results[rank][number]
            name = f"call {number}, {case.products[number]}, rank {rank}"
            assert got.shape == wanted.shape and got.dtype == wanted.dtype, name
            if not torch.equal(got, wanted):
                where = (got != wanted).nonzero()[0].tolist()
                at = got[tuple(where)].item(), wanted[tuple(where)].item()
                raise AssertionError(f"{name}: {where} is {at[0]}, expected {at[1]}")


def random_case(seed: int, max_ranks: int = 4) -> ProductCase:
    choose = random.Random(seed)
    num_ranks = choose.randint(2, max_ranks)
    products = tuple(
        Product(
            choose.choice(OPS),
            choose.choice(("decomposed", "decomposed", "unfused", "auto")),
            choose.choice((1, 2, 5)),
            choose.choice((1, 8, 17)),
            choose.choice((1, 3, 8)),
            choose.choice(FLOATS),
            choose.choice((True, False)),
        )
        for _ in range(choose.choice((1, 2, 4)))
    )
    return ProductCase(num_ranks, products)
