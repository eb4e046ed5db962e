"""What holds for every call of deep_comm.tp, a collective or a product: the same results in other
processes and under every schedule; ranks that disagree or are absent are named; bad arguments are
refused, and the SymmetricMemory stays usable.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import collectives
import products
import pytest
import schedules
import torch
from collectives import together
from torch import ones

from deep_comm import errors, processes, tp
from deep_comm.symmetric import SymmetricMemory

pytestmark = pytest.mark.usefixtures("poison")

of_both = pytest.mark.parametrize("cases", [collectives, products])


@pytest.mark.parametrize(("cases", "seed"), [(collectives, 5), (products, 2)])
def test_ranks_may_be_processes(cases: Any, seed: int) -> None:
    case = cases.random_case(seed, 2)
    collectives.verify(case, processes.run(cases.run_case, 2, case))


@pytest.mark.parametrize("policy", schedules.POLICIES)
@of_both
def test_every_policy_gives_the_same_bits(cases: Any, policy: str) -> None:
    schedules.run_policy(policy, cases.random_case(3), cases.run_case, collectives.verify)


@pytest.mark.parametrize(("cases", "num_seeds"), [(collectives, 120), (products, 60)])
def test_every_schedule_gives_the_same_bits(cases: Any, num_seeds: int) -> None:
    schedules.run_seeds(range(num_seeds), cases.random_case, cases.run_case, collectives.verify)


def add(memory: SymmetricMemory, x: Any = None, method: Any = "one_shot") -> torch.Tensor:
    return tp.all_reduce(ones(4) if x is None else x, memory, method=method)


def add_twice(memory: SymmetricMemory) -> torch.Tensor:
    return add(memory, method="two_shot")


def add_on_one_sm(memory: SymmetricMemory) -> torch.Tensor:
    return tp.all_reduce(ones(4), memory, num_sms=1)


def gather(memory: SymmetricMemory, x: Any = None, method: Any = "decomposed") -> torch.Tensor:
    rows = torch.full((2, 4), memory.rank + 1.0) if x is None else x
    return tp.all_gather_matmul(rows, torch.eye(4), memory, method=method)[1][0]


def norm(memory: SymmetricMemory, x: Any = None, **options: Any) -> Any:
    x = ones(2, 8) if x is None else x
    given = {"residual": torch.ones_like(x), "weight": ones(x.shape[-1]), **options}
    return tp.all_reduce_norm(x, memory=memory, **given)


# What all ranks but one call, and that one.
DIFFERENT: dict[str, tuple[Callable[..., Any], Callable[[SymmetricMemory], Any]]] = {
    "another operation": (add, lambda memory: tp.all_gather(ones(4), memory)),
    "a barrier": (add, lambda memory: memory.barrier()),
    "another size": (add, lambda memory: add(memory, ones(5))),
    "another dtype": (add, lambda memory: add(memory, ones(8).bfloat16())),
    "another method": (add, add_twice),
    "another number of SMs": (add, lambda memory: add_on_one_sm(memory)),
    "another eps": (norm, lambda memory: norm(memory, eps=0.5)),
    "other rows of a norm": (norm, lambda memory: norm(memory, ones(3, 8))),
    "a collective": (gather, add),
    "another size of a product": (gather, lambda memory: gather(memory, ones(3, 4))),
    "another method of a product": (gather, lambda memory: gather(memory, method="unfused")),
    "the other product": (
        gather,
        lambda memory: tp.matmul_reduce_scatter(
            ones(4, 4), ones(4, 4), memory, method="decomposed"
        ),
    ),
    # as many bytes
    "as many elements in other rows": (
        lambda memory: tp.all_gather(ones(2, 8), memory),
        lambda memory: tp.all_gather(ones(8, 2), memory),
    ),
    "as many elements to scatter": (
        lambda memory: tp.reduce_scatter(ones(2, 8), memory),
        lambda memory: tp.reduce_scatter(ones(8, 2), memory),
    ),
    "as many elements to add": (add, lambda memory: add(memory, ones(2, 4))),
    "more dimensions": (
        lambda memory: tp.all_gather(ones(2, 8), memory),
        lambda memory: tp.all_gather(ones(2, 2, 4), memory),
    ),
}


def _product(op: str, x: tuple[int, ...] = (4, 4, 8), **options: Any) -> Any:
    return lambda memory, method: getattr(tp, op)(
        ones(*x), ones(8, 4), memory, method=method, **options
    )


def _of_fp8(*shapes: tuple[int, ...]) -> Any:
    return lambda memory, method: tp.all_gather_matmul(
        ones(4, 256).to(fp8), ones(256, 8).to(fp8), memory, method=method,
        scales=tuple(ones(shape) for shape in shapes),
    )  # fmt: skip


# Products of as many rows and columns: what all ranks but one call, and that one.
DIFFERENT_PRODUCTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "gather_dim": (_product("all_gather_matmul"), _product("all_gather_matmul", gather_dim=1)),
    "rows of a gather": (
        _product("all_gather_matmul"), _product("all_gather_matmul", (2, 8, 8))
    ),
    "dimensions of a gather": (
        _product("all_gather_matmul"), _product("all_gather_matmul", (16, 8))
    ),
    "forms of scales": (_of_fp8((), ()), _of_fp8((4, 1), (1, 8))),
    "scatter_dim": (
        _product("matmul_reduce_scatter"), _product("matmul_reduce_scatter", scatter_dim=1)
    ),
    "reduce_op": (
        _product("matmul_reduce_scatter"), _product("matmul_reduce_scatter", reduce_op="avg")
    ),
    "rows of a scatter": (
        _product("matmul_reduce_scatter"), _product("matmul_reduce_scatter", (2, 8, 8))
    ),
    "rows of a sum": (_product("matmul_all_reduce"), _product("matmul_all_reduce", (16, 8))),
}  # fmt: skip


@pytest.mark.parametrize("method", ["unfused", "decomposed"])
@pytest.mark.parametrize("name", DIFFERENT_PRODUCTS)
def test_ranks_whose_products_differ_in_what_moves_as_many_bytes_are_named(
    name: str, method: str
) -> None:
    of_others, of_one = DIFFERENT_PRODUCTS[name]
    call = lambda memory: (of_one if memory.rank == 1 else of_others)(memory, method)
    for error in together(call, 2, return_errors=True):
        assert isinstance(error, errors.ConfigMismatch), error
    for alike in (of_others, of_one):
        together(lambda memory, alike=alike: alike(memory, method), 2)


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_disagree_are_named(name: str) -> None:
    of_others, of_one = DIFFERENT[name]
    call = lambda memory: (of_one if memory.rank == 1 else of_others)(memory)
    for error in together(call, 2, return_errors=True):
        assert isinstance(error, errors.ConfigMismatch), error


@pytest.mark.parametrize("calls_before", [0, 1])
@pytest.mark.parametrize(
    ("call", "multicast"),
    [
        (add, False), (add, True), (add_twice, False), (add_twice, True), (gather, False),
        (add_on_one_sm, False),
    ],
)  # fmt: skip
def test_a_rank_that_never_comes_is_named_and_reset_takes_it_back(
    call: Callable[[SymmetricMemory], torch.Tensor], multicast: bool, calls_before: int
) -> None:
    is_over = threading.Event()

    def fn(memory: SymmetricMemory) -> torch.Tensor:
        for _ in range(calls_before):
            call(memory)
        try:
            if memory.rank == 1:
                is_over.wait(30)
            else:
                with pytest.raises(errors.PeerTimeout) as raised:
                    call(memory)
                assert raised.value.peer == 1
        finally:
            is_over.set()
        memory.reset()
        return call(memory)

    rows = torch.tensor([1.0, 1, 2, 2, 3, 3])[:, None].expand(6, 4)
    wanted = rows if call is gather else torch.full((4,), 3.0)
    for result in together(fn, 3, timeout_s=0.5, multicast=multicast):
        assert torch.equal(result, wanted), result


fp8 = torch.float8_e4m3fn
# The call that is refused, by what the message says.
REFUSED: dict[str, Callable[[SymmetricMemory], Any]] = {
    "must be a tensor": lambda m: tp.all_gather([1.0], m),
    "must be contiguous": lambda m: tp.all_gather(ones(4, 4).t(), m),
    "must have 1 to 8 dimensions": lambda m: tp.all_gather(torch.tensor(1.0), m),
    "that the 2 ranks divide": lambda m: tp.reduce_scatter(ones(3, 2), m),
    "must have dtype": lambda m: tp.all_reduce(ones(4, dtype=torch.int64), m),
    "must be one of auto": lambda m: add(m, method="nccl"),
    "must be a deep_comm.symmetric.SymmetricMemory; got a Tensor": lambda m: tp.all_gather(
        ones(4), ones(4)
    ),
    "must be an integer of 1 to": lambda m: tp.all_gather(ones(4), m, num_sms=0),
    # sums with a residual
    "must have 2 dimensions": lambda m: norm(m, ones(2, 2, 8)),
    "rows of a multiple of 16 bytes": lambda m: norm(m, ones(2, 3)),
    "residual must be contiguous, with x's shape": lambda m: norm(m, residual=ones(3, 8)),
    "residual must be a tensor": lambda m: norm(m, residual=3),
    "weight must have x's dtype": lambda m: norm(m, weight=ones(8).half()),
    "weight must be contiguous, with x's last": lambda m: norm(m, weight=ones(16)),
    "must begin at a multiple of 16": lambda m: norm(m, ones(17)[1:].view(2, 8)),
    "must be a finite number": lambda m: norm(m, eps=float("nan")),
    # products
    "x must be a tensor": lambda m: tp.matmul_reduce_scatter([1.0], ones(4, 4), m),
    "must have 2 dimensions or more": lambda m: tp.matmul_all_reduce(ones(4), ones(4, 4), m),
    "must have 4 rows": lambda m: tp.all_gather_matmul(ones(2, 4), ones(5, 4), m),
    "must have 2 dimensions; got": lambda m: tp.all_gather_matmul(ones(2, 4), ones(4), m),
    "x must have dtype": lambda m: tp.all_gather_matmul(ones(2, 4).double(), ones(4, 4), m),
    "FP8 needs scales": lambda m: tp.all_gather_matmul(ones(2, 4).to(fp8), ones(4, 4), m),
    "must have x's dtype": lambda m: tp.all_gather_matmul(ones(2, 4), ones(4, 4).half(), m),
    "must be x's dtype": lambda m: tp.all_gather_matmul(
        ones(2, 4), ones(4, 4), m, out_dtype=torch.float16
    ),
    "an extent along scatter_dim that the 2 ranks divide": lambda m: tp.matmul_reduce_scatter(
        ones(3, 4), ones(4, 4), m
    ),
    "must divide the rows": lambda m: tp.matmul_all_reduce(
        ones(3, 4), ones(4, 4), m, method="decomposed"
    ),
    "must not need gradients": lambda m: gather(m, ones(2, 4).requires_grad_()),
    "must be sum or avg": lambda m: tp.matmul_reduce_scatter(
        ones(2, 4), ones(4, 4), m, reduce_op="max"
    ),
    "method must be one of auto": lambda m: gather(m, method="nccl"),
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
    "must be None with out": lambda m: tp.all_gather(
        ones(2, 4), m, out=m.empty((4, 4), torch.float32), num_sms=1
    ),
}


# [4, 256] times [256, 384]
SCALES_REFUSED = {
    "another number of rows": ((2, 1), (1, 384)),
    "no columns": ((4,), (384,)),
    "a number and columns": ((), (1, 384)),
    "rows and a number": ((4, 1), ()),
    "blocks and columns": ((4, 2), (1, 384)),
    "rows and blocks": ((4, 1), (2, 3)),
    "too many blocks of x": ((4, 3), (2, 3)),
    "too few blocks of a weight": ((4, 2), (2, 1)),
    "more blocks than 128 x 128": ((4, 2), (3, 3)),
    "rows of a weight": ((4, 1), (256, 1)),
    "nothing": ((0,), ()),
    "another number of elements": ((4, 256), (256, 384)),
}
SCALES_TAKEN = [((), ()), ((1,), (1, 1)), ((4, 1), (1, 384)), ((4, 2), (2, 3))]


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_scales_of_another_shape_or_dtype_are_refused(op: str) -> None:
    def call(memory: SymmetricMemory, shapes: Any, dtype: torch.dtype = torch.float32) -> Any:
        x, weight = ones(4, 256).to(fp8), ones(256, 384).to(fp8)
        scales = tuple(torch.full(shape, 0.5, dtype=dtype) for shape in shapes)
        return getattr(tp, op)(x, weight, memory, scales=scales)

    def fn(memory: SymmetricMemory) -> None:
        for shapes in SCALES_REFUSED.values():
            with pytest.raises(errors.ArgumentError, match="one for each row of x") as caught:
                call(memory, shapes)
            assert caught.value.argument == "scales"
            assert caught.value.value == [list(shape) for shape in shapes]
        for dtype in (torch.float64, torch.bfloat16, torch.int32):
            with pytest.raises(errors.ArgumentError, match=f"float32; got {dtype}"):
                call(memory, SCALES_TAKEN[0], dtype)
        for shapes in SCALES_TAKEN:
            out = call(memory, shapes)
            out = out[1][0] if op == "all_gather_matmul" else out
            assert (out == (64 if op == "all_gather_matmul" else 128)).all()

    together(fn, 2)


def test_scales_of_one_row_are_gathered_as_those_of_many() -> None:
    def fn(memory: SymmetricMemory) -> None:
        x, weight = ones(1, 16).to(fp8), ones(16, 2).to(fp8)
        scales = (torch.full((1, 1), 2.0**memory.rank), torch.ones(1, 2))
        for method in ("unfused", "decomposed"):
            _, (out,) = tp.all_gather_matmul(x, weight, memory, scales=scales, method=method)
            assert out.tolist() == [[16, 16], [32, 32], [64, 64]], (method, out)

    together(fn, 3)


def test_the_last_block_of_scales_may_be_smaller() -> None:
    def fn(memory: SymmetricMemory) -> None:
        x, weight = ones(2, 200).to(fp8), ones(200, 2).to(fp8)
        scales = (torch.tensor([[1.0, 2.0]] * 2), torch.tensor([[1.0], [1.0]]))
        _, (out,) = tp.all_gather_matmul(x, weight, memory, scales=scales, out_dtype=torch.float32)
        assert (out == 128 + 2 * 72).all(), out

    together(fn, 2)


@pytest.mark.parametrize("rule", REFUSED)
def test_bad_arguments_are_refused_by_rule(rule: str) -> None:
    def fn(memory: SymmetricMemory) -> torch.Tensor:
        with pytest.raises(errors.ArgumentError, match=rule):
            REFUSED[rule](memory)
        gather(memory)  # it stays usable
        return add(memory)

    for result in together(fn, 2):
        assert (result == 2).all(), result


@pytest.mark.parametrize(
    ("call", "needed_bytes", "shape"),
    [
        (lambda memory: tp.reduce_scatter(ones(2, 1000), memory), 8000, (1, 1000)),
        (lambda memory: gather(memory, ones(100, 4)), 3200, (200, 4)),
    ],
    ids=["reduce_scatter", "all_gather_matmul"],
)
def test_an_x_without_room_says_how_much_it_needs(
    call: Callable[[SymmetricMemory], torch.Tensor], needed_bytes: int, shape: tuple[int, int]
) -> None:
    def fn(memory: SymmetricMemory) -> int:
        with pytest.raises(errors.BufferTooSmall, match="staging_bytes") as raised:
            call(memory)
        return raised.value.needed_bytes

    assert together(fn, 2, staging_bytes=1 << 11) == [needed_bytes] * 2
    for result in together(call, 2, staging_bytes=needed_bytes):
        assert torch.equal(result, torch.full(shape, 2.0 if shape[0] == 1 else 1.0)), result


@pytest.mark.parametrize(
    ("named", "call"),
    [
        ("weights", lambda m, x: tp.all_gather_matmul(x, 3, m)),
        ("gather_dim", lambda m, x: tp.all_gather_matmul(x, [x.t()], m, gather_dim="0")),
        ("scatter_dim", lambda m, x: tp.matmul_reduce_scatter(x, x.t(), m, scatter_dim=1.0)),
        ("method", lambda m, x: tp.all_reduce(x, m, method=["auto"])),
        ("out", lambda m, x: tp.all_gather(x, m, out=x)),
        ("num_sms", lambda m, x: tp.all_gather(x, m, num_sms="2")),
        ("group", lambda m, x: tp.register(5, m)),
        ("group", lambda m, x: tp.register(None, m)),
        ("group", lambda m, x: tp.install(5, m)),
        ("group", lambda m, x: tp.install("unknown", m)),
        ("memory", lambda m, x: tp.register("group", None)),
        ("multicast", lambda m, x: SymmetricMemory(None, 0, multicast=1, device="cpu")),
        ("scales", lambda m, x: _scaled(m, x, 1.0)),
        ("scales", lambda m, x: _scaled(m, x, (None, ones(())))),
        ("scales", lambda m, x: _scaled(m, x, (ones(()), None))),
    ],
)
def test_arguments_of_a_wrong_type_are_named(named: str, call: Any) -> None:
    def fn(memory: SymmetricMemory) -> None:
        with pytest.raises(errors.ArgumentError) as caught:
            call(memory, ones(2, 16))
        assert caught.value.argument == named

    together(fn, 1)


def _scaled(memory: SymmetricMemory, x: torch.Tensor, scales: Any) -> Any:
    x = x.to(torch.float8_e4m3fn)
    return tp.all_gather_matmul(x, x.t(), memory, scales=scales)


def test_an_x_in_out_lies_where_it_goes() -> None:
    def fn(memory: SymmetricMemory) -> None:
        out = memory.empty((6, 4), torch.float32)
        rows = torch.full((2, 4), float(memory.rank))
        for first in range(5):
            x = out.local[first : first + 2]
            if first != 2 * memory.rank:
                with pytest.raises(errors.ArgumentError, match="x must not lie in out"):
                    tp.all_gather(x, memory, out=out)
        x = out.local[2 * memory.rank :][:2]
        x.copy_(rows)
        for given in (x, rows):
            whole = tp.all_gather(given, memory, out=out)
            assert whole[:, 0].tolist() == [0, 0, 1, 1, 2, 2]

    together(fn, 3)


def test_ranks_that_gather_into_different_tensors_are_told() -> None:
    def fn(memory: SymmetricMemory) -> None:
        outs = [memory.empty((4, 4), torch.float32) for _ in range(2)]
        for one in outs:  # the same one on all ranks, also if it is not the last one's
            tp.all_gather(ones(2, 4), memory, out=one)
        with pytest.raises(errors.ConfigMismatch):
            tp.all_gather(ones(2, 4), memory, out=outs[memory.rank])

    together(fn, 2)


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce", "all_reduce_norm"])
def test_a_gradient_that_ends_is_warned_of(op: str) -> None:
    def fn(memory: SymmetricMemory) -> None:
        call = (lambda x, m: norm(m, x)) if op == "all_reduce_norm" else getattr(tp, op)
        x = ones(2, 8).requires_grad_()
        with pytest.warns(UserWarning, match=f"tp.{op} has no gradient.*fused_"):
            call(x, memory)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call(ones(2, 8), memory)
            with torch.no_grad():
                call(x, memory)

    together(fn, 1)


def test_conjugates_and_signs_that_torch_only_noted_are_data() -> None:
    def fn(memory: SymmetricMemory) -> None:
        x = torch.tensor([1 + 2j, 3j])
        assert torch.equal(tp.all_gather(x.conj(), memory), x.conj().resolve_conj())
        out = memory.empty((2,), torch.complex64)
        out.local.copy_(x)
        assert torch.equal(tp.all_gather(out.local.conj(), memory, out=out), x.conj())
        assert torch.equal(tp.all_reduce(torch._neg_view(ones(2)), memory), -ones(2))
        x, residual = ones(2, 8), torch._neg_view(ones(2, 8))
        assert torch.equal(tp.all_reduce_norm(x, residual, ones(8), memory)[1], x - ones(2, 8))

    together(fn, 1)
