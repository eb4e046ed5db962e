"""deep_comm.tp: products beside collectives have the bits of the reference."""

from __future__ import annotations

from typing import Any

import pytest
import schedules
import torch
from collectives import FLOATS, together, verify
from products import OPS, Product, ProductCase, run_case
from run_by import run_by

from deep_comm import local, tp
from deep_comm.symmetric import SymmetricMemory

pytestmark = pytest.mark.usefixtures("poison")

METHODS = ("unfused", "decomposed")


def on_threads(case: ProductCase) -> None:
    verify(case, local.run(lambda group: run_case(group, case), case.num_ranks, timeout_s=60))


@pytest.mark.parametrize("num_ranks", (1, 2, 3, 8))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("op", OPS)
def test_results_have_the_bits_of_the_reference(op: str, method: str, num_ranks: int) -> None:
    products = tuple(
        Product(op, method, *shape, dtype, is_n_major)
        for shape in ((1, 1, 1), (3, 17, 5), (150, 8, 3))
        for dtype, is_n_major in zip(FLOATS, (True, False, True), strict=True)
    )
    on_threads(ProductCase(num_ranks, products, staging_bytes=1 << 17))


@pytest.mark.parametrize("op", OPS)
def test_tensors_without_elements_are_fine(op: str) -> None:
    shapes = ((0, 4, 4), (2, 4, 0))
    products = tuple(Product(op, method, *shape) for shape in shapes for method in METHODS)
    on_threads(ProductCase(2, products))


@pytest.mark.parametrize("fault", ["weaken_release", "skip_entry_barrier"])
def test_a_left_out_step_is_noticed(fault: str) -> None:
    products = tuple(
        Product(op, "decomposed", 4, 8, 8, torch.float32) for op in OPS[:2] for _ in range(3)
    )
    case = ProductCase(2, products)
    schedules.pass_without_fault(case, run_case, verify, 4)
    schedules.find_fault(fault, case, run_case, verify)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("method", ["auto", "decomposed"])
@run_by(together)
def test_rows_are_gathered_and_scattered_along_any_dimension(
    memory: SymmetricMemory, /, dim: int, method: Any
) -> None:
    if dim in (2, -1) and method != "auto":
        return
    x = torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(memory.rank)).round()
    weight = torch.arange(48.0).view(6, 8) % 5
    wide = torch.cat([weight] * 2) if dim in (2, -1) else weight
    all_x = [
        torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(rank)).round()
        for rank in range(2)
    ]
    gathered, (out,) = tp.all_gather_matmul(
        x, wide, memory, gather_dim=dim, return_gathered=True, method=method
    )
    whole = torch.cat(all_x, dim=dim)
    assert gathered is not None and torch.equal(gathered, whole)
    assert torch.equal(out, whole @ wide)
    for reduce_op, factor in (("sum", 1.0), ("avg", 0.5)):
        part = tp.matmul_reduce_scatter(
            x, weight, memory, scatter_dim=dim, reduce_op=reduce_op, method=method
        )
        total = sum((each @ weight for each in all_x), torch.zeros(())) * factor
        assert torch.equal(part, total.chunk(2, dim=dim)[memory.rank])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("form", ["tensor", "row", "block"])
@run_by(together)
def test_fp8_with_scales(memory: SymmetricMemory, /, form: str, method: Any) -> None:
    rows, depth, columns = 4, 256, 128
    shapes = {
        "tensor": ((), ()),
        "row": ((rows, 1), (1, columns)),
        "block": ((rows, depth // 128), (depth // 128, columns // 128)),
    }[form]

    def of(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        x = torch.randint(-4, 5, (rows, depth), generator=generator).float()
        weight = torch.randint(-4, 5, (depth, columns), generator=generator).float()
        scales = [
            2.0 ** torch.randint(-2, 3, shape, generator=generator).float() for shape in shapes
        ]
        if form == "tensor":  # one number for all ranks
            scales = [torch.tensor(0.5), torch.tensor(2.0)]
        return x, weight, scales[0], scales[1]

    def scaled(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if form == "block":
            for dim in (0, 1):
                repeats = values.shape[dim] // scale.shape[dim]
                scale = scale.repeat_interleave(repeats, dim)
        return values * scale

    x, weight, x_scale, weight_scale = of(memory.rank)
    fp8 = lambda values: values.to(torch.float8_e4m3fn)
    everything = torch.cat([scaled(of(rank)[0], of(rank)[2]) for rank in range(2)])
    wanted = everything @ scaled(weight, weight_scale)
    _, (out,) = tp.all_gather_matmul(
        fp8(x),
        fp8(weight),
        memory,
        scales=(x_scale, weight_scale),
        out_dtype=torch.float32,
        method=method,
    )
    assert torch.equal(out, wanted)
    parts = [
        (scaled(of(rank)[0], of(rank)[2]) @ scaled(of(rank)[1], of(rank)[3])).bfloat16()
        for rank in range(2)
    ]
    total = (parts[0].float() + parts[1].float()).bfloat16().chunk(2)[memory.rank]
    part = tp.matmul_reduce_scatter(
        fp8(x), fp8(weight), memory, scales=(x_scale, weight_scale), method=method
    )
    assert torch.equal(part, total)
