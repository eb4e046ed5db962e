"""deep_comm.tp: products beside collectives have the bits of the reference."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import schedules
import torch
from collectives import together
from products import FLOATS, OPS, Product, ProductCase, random_case, run_case, verify

from deep_comm import errors, local, processes, tp
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
    on_threads(ProductCase(num_ranks, products, staging_bytes=1 << 16))


@pytest.mark.parametrize("op", OPS)
def test_tensors_without_elements_are_fine(op: str) -> None:
    shapes = ((0, 4, 4), (2, 4, 0))
    products = tuple(Product(op, method, *shape) for shape in shapes for method in METHODS)
    on_threads(ProductCase(2, products))


def test_ranks_may_be_processes() -> None:
    case = random_case(2, 2)
    verify(case, processes.run(run_case, 2, case))


@pytest.mark.parametrize("policy", schedules.POLICIES)
def test_every_policy_gives_the_same_bits(policy: str) -> None:
    schedules.run_policy(policy, random_case(3), run_case, verify)


def test_every_schedule_gives_the_same_bits() -> None:
    schedules.run_seeds(range(60), random_case, run_case, verify)


@pytest.mark.parametrize("fault", ["weaken_release", "skip_entry_barrier"])
def test_a_left_out_step_is_noticed(fault: str) -> None:
    products = tuple(
        Product(op, "decomposed", 4, 8, 8, torch.float32) for op in OPS[:2] for _ in range(3)
    )
    case = ProductCase(2, products)
    schedules.pass_without_fault(case, run_case, verify, 4)
    schedules.find_fault(fault, case, run_case, verify)


def must_pass(results: list[Any]) -> None:
    assert results == [None] * len(results), results


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("method", ["auto", "decomposed"])
def test_rows_are_gathered_and_scattered_along_any_dimension(dim: int, method: Any) -> None:
    def fn(memory: SymmetricMemory) -> None:
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

    must_pass(together(fn))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("form", ["tensor", "row", "block"])
def test_fp8_with_scales(form: str, method: Any) -> None:
    def fn(memory: SymmetricMemory) -> None:
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

    must_pass(together(fn))


DIFFERENT = {
    "another operation": lambda memory: tp.all_reduce(torch.ones(4), memory),
    "another size": lambda memory: gather(memory, torch.ones(3, 4)),
    "another method": lambda memory: gather(memory, method="unfused"),
    "the other product": lambda memory: tp.matmul_reduce_scatter(
        torch.ones(4, 4), torch.ones(4, 4), memory, method="decomposed"
    ),
}


def gather(memory: SymmetricMemory, x: Any = None, method: Any = "decomposed") -> torch.Tensor:
    rows = torch.full((2, 4), memory.rank + 1.0) if x is None else x
    return tp.all_gather_matmul(rows, torch.eye(4), memory, method=method)[1][0]


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_disagree_are_named(name: str) -> None:
    def fn(memory: SymmetricMemory) -> None:
        if memory.rank == 1:
            DIFFERENT[name](memory)
        else:
            gather(memory)

    for error in together(fn):
        assert isinstance(error, errors.ConfigMismatch), error


def test_a_rank_that_never_comes_is_named_and_reset_takes_it_back() -> None:
    is_over = threading.Event()

    def fn(memory: SymmetricMemory) -> torch.Tensor:
        gather(memory)
        try:
            if memory.rank == 1:
                is_over.wait(30)
            else:
                with pytest.raises(errors.PeerTimeout) as raised:
                    gather(memory)
                assert raised.value.peer == 1
        finally:
            is_over.set()
        memory.reset()
        return gather(memory)

    for result in together(fn, 3, timeout_s=0.5):
        wanted = torch.tensor([1.0, 1, 2, 2, 3, 3])[:, None].expand(6, 4)
        assert isinstance(result, torch.Tensor) and torch.equal(result, wanted), result


ones = torch.ones
REFUSED = {
    "must be a tensor": lambda m: tp.matmul_reduce_scatter([1.0], ones(4, 4), m),
    "must have 2 dimensions or more": lambda m: tp.matmul_all_reduce(ones(4), ones(4, 4), m),
    "must have 4 rows": lambda m: tp.all_gather_matmul(ones(2, 4), ones(5, 4), m),
    "must have 2 dimensions; got": lambda m: tp.all_gather_matmul(ones(2, 4), ones(4), m),
    "must have dtype": lambda m: tp.all_gather_matmul(ones(2, 4).double(), ones(4, 4), m),
    "FP8 needs scales": lambda m: tp.all_gather_matmul(
        ones(2, 4).to(torch.float8_e4m3fn), ones(4, 4), m
    ),
    "must have x's dtype": lambda m: tp.all_gather_matmul(ones(2, 4), ones(4, 4).half(), m),
    "must be x's dtype": lambda m: tp.all_gather_matmul(
        ones(2, 4), ones(4, 4), m, out_dtype=torch.float16
    ),
    "that the 2 ranks divide": lambda m: tp.matmul_reduce_scatter(ones(3, 4), ones(4, 4), m),
    "must divide the rows": lambda m: tp.matmul_all_reduce(
        ones(3, 4), ones(4, 4), m, method="decomposed"
    ),
    "must not need gradients": lambda m: gather(m, ones(2, 4).requires_grad_()),
    "must be sum or avg": lambda m: tp.matmul_reduce_scatter(
        ones(2, 4), ones(4, 4), m, reduce_op="max"
    ),
    "must be one of auto": lambda m: gather(m, method="nccl"),
    "must not be fused except on GPUs": lambda m: gather(m, method="fused"),
    "must be an integer of -2 to 1": lambda m: tp.all_gather_matmul(
        ones(2, 4), ones(4, 4), m, gather_dim=2
    ),
    "must not gather columns so": lambda m: tp.all_gather_matmul(
        ones(2, 4), ones(8, 4), m, gather_dim=1, method="decomposed"
    ),
    "must be a deep_comm.symmetric.SymmetricMemory": lambda m: tp.all_gather_matmul(
        ones(2, 4), ones(4, 4), None
    ),
    "one number, or a row": lambda m: tp.all_gather_matmul(
        ones(2, 4).to(torch.float8_e4m3fn),
        ones(4, 4).to(torch.float8_e4m3fn),
        m,
        scales=(ones(3), ones(())),
    ),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_bad_arguments_are_refused_by_rule(rule: str) -> None:
    def fn(memory: SymmetricMemory) -> None:
        with pytest.raises(errors.ArgumentError, match=rule):
            REFUSED[rule](memory)
        gather(memory)  # it stays usable

    must_pass(together(fn))


def test_a_product_without_room_says_how_much_it_needs() -> None:
    def fn(memory: SymmetricMemory) -> int:
        with pytest.raises(errors.BufferTooSmall, match="staging_bytes") as raised:
            gather(memory, ones(100, 4))
        return raised.value.needed_bytes

    assert together(fn, staging_bytes=1 << 10) == [1600, 1600]
    for result in together(lambda memory: gather(memory, ones(100, 4)), staging_bytes=1600):
        assert isinstance(result, torch.Tensor) and result.shape == (200, 4), result
