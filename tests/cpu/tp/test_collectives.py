"""deep_comm.tp: all_gather, reduce_scatter and all_reduce have the bits of the reference."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import schedules
import torch
from collectives import (
    FLOATS,
    NORM,
    OPS,
    Call,
    CollectiveCase,
    make,
    random_case,
    run_case,
    together,
    verify,
    verify_near,
    x_of,
)
from run_by import run_by

from deep_comm import errors, local, tp
from deep_comm.symmetric import SymmetricMemory

pytestmark = pytest.mark.usefixtures("poison")

RANKS = (1, 2, 3, 4, 8)
by_switch_or_not = pytest.mark.parametrize("multicast", [False, True])


def on_threads(case: CollectiveCase, **options: Any) -> None:
    run = lambda group: run_case(group, case, **options)
    verify(case, local.run(run, case.num_ranks, timeout_s=60))


@by_switch_or_not
@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("op", OPS)
def test_results_have_the_bits_of_the_reference(op: str, num_ranks: int, multicast: bool) -> None:
    shapes = ((num_ranks, 64), (3 * num_ranks, 40), (num_ranks,), (5 * num_ranks, 7, 3))
    calls = tuple(
        Call(op, shape, dtype, num_sms)
        for shape in shapes
        for dtype, num_sms in zip(FLOATS, (1, 2, 9), strict=True)
    )
    on_threads(CollectiveCase(num_ranks, calls, multicast=multicast))


@by_switch_or_not
@pytest.mark.parametrize("num_ranks", RANKS)
def test_sums_with_a_residual_are_normalised(num_ranks: int, multicast: bool) -> None:
    shapes = ((1, 8), (2, 8 * 33), (7, 24), (3 * num_ranks, 520), (40, 16))
    calls = tuple(
        Call(NORM, shape, dtype, num_sms)
        for shape in shapes
        for dtype, num_sms in zip(FLOATS, (1, 2, 9), strict=True)
    )
    on_threads(CollectiveCase(num_ranks, calls, staging_bytes=1 << 17, multicast=multicast))


@by_switch_or_not
@pytest.mark.parametrize("op", OPS)
def test_tensors_may_begin_and_end_anywhere(op: str, multicast: bool) -> None:
    calls = tuple(
        Call(op, (3, elements), dtype, 2, offset)
        for elements in (1, 5, 8, 17)
        for offset in (0, 1, 3)
        for dtype in (torch.bfloat16, torch.float32)
    )
    on_threads(CollectiveCase(3, calls, multicast=multicast))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64, torch.complex64])
def test_an_all_gather_moves_any_dtype(dtype: torch.dtype) -> None:
    def fn(group: Any) -> torch.Tensor:
        with SymmetricMemory(group, 0, staging_bytes=1 << 13, device="cpu") as memory:
            return tp.all_gather(torch.full((3, 5), memory.rank).to(dtype), memory)

    wanted = torch.arange(3).repeat_interleave(3)[:, None].expand(9, 5).to(dtype)
    assert all(torch.equal(result, wanted) for result in local.run(fn, 3, timeout_s=60))


@run_by(together, 3)
def test_copy_engines_gather_into_symmetric_memory(memory: SymmetricMemory, /) -> None:
    out = memory.empty((6, 5), torch.float32)
    for number in range(3):
        x = torch.full((2, 5), 10.0 * memory.rank + number)
        gathered = tp.all_gather(x, memory, out=out)
        assert gathered.data_ptr() == out.local.data_ptr()
        wanted = (10.0 * torch.arange(3) + number).repeat_interleave(2)
        assert torch.equal(gathered, wanted[:, None].expand(6, 5))
    own = out.local[2 * memory.rank : 2 * memory.rank + 2]
    for number in range(3):
        own.fill_(memory.rank + 0.5 * number)
        tp.all_gather(own, memory, out=out)
        wanted = torch.arange(3).repeat_interleave(2) + 0.5 * number
        assert torch.equal(out.local, wanted[:, None].expand(6, 5))
    # What it was asked for once must not live as long as out.
    x = torch.ones(2, 5, requires_grad=True)
    asked = weakref.ref(x)
    with pytest.warns(UserWarning, match="no gradient"):
        tp.all_gather(x, memory, out=out)
    del x
    assert asked() is None and not out.local.requires_grad
    for x, name in ((torch.ones(3, 5), "out"), (torch.ones(2, 5).bfloat16(), "x")):
        with pytest.raises(errors.ArgumentError, match=name):
            tp.all_gather(x, memory, out=out)


def test_tensors_without_elements_have_empty_results() -> None:
    calls = tuple(Call(op, (0, 5), torch.float32) for op in OPS)
    on_threads(CollectiveCase(2, (*calls, Call("auto", (4,), torch.float32))))


def test_ranks_must_agree_that_a_tensor_has_no_elements() -> None:
    def fn(memory: SymmetricMemory) -> None:
        tp.all_reduce(torch.ones(4 * memory.rank), memory)

    for error in together(fn, 2, return_errors=True):
        assert isinstance(error, errors.ConfigMismatch), error


def test_a_number_is_reduced_as_a_tensor_without_dimensions() -> None:
    on_threads(CollectiveCase(3, (Call("auto", (), torch.float32),)))


def test_generations_wrap_around() -> None:
    case = random_case(11)

    def fn(group: Any) -> Any:
        with SymmetricMemory(group, 0, staging_bytes=1 << 15, device="cpu") as memory:
            memory._context.rendezvous.barrier()
            memory._context.engine.set_generation(0xFFFFFFFE)
            memory._context.rendezvous.barrier()
            for number in range(4):
                x = torch.full((3,), float(memory.rank + number))
                total = tp.all_reduce(x, memory)
                assert (total == sum(rank + number for rank in range(case.num_ranks))).all()

    local.run(fn, case.num_ranks, timeout_s=60)


FAULTS = (
    "weaken_release",
    "ignore_generation",
    "skip_entry_barrier",  # a staging is pushed into while its rank still reads the one before
    "skip_bulk_wait",  # parts are told of before they have landed
    "skip_bulk_wait_read",  # a piece is overwritten before it has left
    "weaken_fence",  # words are not behind the parts
)


@by_switch_or_not
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("op", (*OPS[:4], NORM))
def test_a_left_out_step_is_noticed(fault: str, op: str, multicast: bool) -> None:
    call = Call(op, (6, 24), torch.float32, 1 if "bulk" in fault else 2)
    # Two shots end when the peers have read what the next two shots overwrite.
    between = replace(call, op="one_shot") if fault == "skip_entry_barrier" else call
    case = CollectiveCase(2, (call, between, call), multicast=multicast)
    schedules.pass_without_fault(case, run_case, verify, 4)
    schedules.find_fault(fault, case, run_case, verify)


@pytest.mark.parametrize("op", (*OPS[1:], NORM))
def test_nothing_depends_on_the_order_in_which_a_switch_adds(op: str) -> None:
    calls = tuple(Call(op, (8, 24), dtype) for dtype in FLOATS)
    ascending = CollectiveCase(4, calls, multicast=True)
    case = replace(ascending, descending=True)
    results = schedules.simulated(case, run_case, 3, faults=("reverse_sums",))
    verify(case, results)
    with pytest.raises(AssertionError, match="expected"):
        verify(ascending, results)
    verify_near(ascending, results)  # as tests/gpu does
    results[1][0].add_(1000)
    with pytest.raises(AssertionError, match="rank"):
        verify_near(ascending, results)


def test_one_shot_is_chosen_where_no_order_shows() -> None:
    """In one shot every rank asks the switch for its own sums. test_ranks_that_disagree_are_named
    shows that ranks must take the same number of shots."""

    for num_ranks, multicast, chosen in (
        (2, True, "one_shot"), (3, True, "two_shot"), (3, False, "one_shot"),
    ):  # fmt: skip
        method = lambda memory: "auto" if memory.rank else chosen
        add = lambda memory: tp.all_reduce(torch.ones(4), memory, method=method(memory))
        for total in together(add, num_ranks, multicast=multicast):
            assert (total == num_ranks).all()


def after_products(group: Any, case: CollectiveCase) -> list[torch.Tensor]:
    """Sums right after products, whose rows the same staging has held, and the other way round."""
    results = []
    options = {"staging_bytes": case.staging_bytes, "multicast": case.multicast}
    with SymmetricMemory(group, 0, device="cpu", **options) as memory:
        for number, call in enumerate(case.calls):
            rows = torch.full((3, 4), 10.0 * memory.rank + number)
            (gathered,) = tp.all_gather_matmul(rows, torch.eye(4), memory, method="decomposed")[1]
            wanted = 10.0 * torch.arange(case.num_ranks).repeat_interleave(3) + number
            assert torch.equal(gathered, wanted[:, None].expand_as(gathered))
            results.append(make(call, x_of(call, memory.rank, number), memory, number))
    return results


@by_switch_or_not
@pytest.mark.parametrize("op", [*OPS[:4], NORM])
def test_nothing_is_pushed_over_the_rows_of_a_product(op: str, multicast: bool) -> None:
    calls = (Call(op, (6, 24), torch.float32),) * 2
    case = CollectiveCase(3, calls, 1 << 12, multicast=multicast)
    schedules.pass_without_fault(case, after_products, verify, 20)
    schedules.find_fault("skip_entry_barrier", case, after_products, verify)


def test_pieces_fit_into_little_shared_memory() -> None:
    """Into 500 bytes pieces of one vector, not of two; into 300 none, and the error says so."""
    calls = tuple(
        Call(op, (6, 264), dtype, num_sms)
        for op in (*OPS, NORM)
        for dtype, num_sms in zip(FLOATS, (1, 2, 9), strict=True)
    )
    case = CollectiveCase(3, calls, staging_bytes=1 << 17)

    def run(group: Any, smem_bytes: int) -> list[torch.Tensor]:
        results = []
        with SymmetricMemory(group, 0, staging_bytes=1 << 17, device="cpu") as memory:
            memory._context.engine.smem_bytes_limit = smem_bytes
            for number, call in enumerate(calls):
                results.append(make(call, x_of(call, memory.rank, number), memory, number))
        return results

    verify(case, local.run(lambda group: run(group, 500), 3, timeout_s=60))
    for error in local.run(lambda group: run(group, 300), 3, timeout_s=60, return_errors=True):
        assert "bytes of shared memory, of which a block has 300" in str(error)


def slots(op: str, num_ranks: int, multicast: bool) -> int:
    if op in ("two_shot", NORM):
        return num_ranks * (1 if multicast else 2)
    return 1 if op == "one_shot" and multicast else num_ranks


@by_switch_or_not
@pytest.mark.parametrize("op", (*OPS[:4], NORM))
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_a_staging_of_just_what_is_pushed_is_enough(
    op: str, num_ranks: int, multicast: bool
) -> None:
    call = Call(op, (num_ranks, 64), torch.float32)  # 256 bytes for each rank
    whole = op in ("all_gather", "one_shot")
    shard_bytes = 256 * (num_ranks if whole else 1)
    needed = slots(op, num_ranks, multicast) * shard_bytes
    on_threads(CollectiveCase(num_ranks, (call,), needed, multicast))
    for error in together(
        lambda memory: make(call, x_of(call, memory.rank, 0), memory),
        num_ranks, return_errors=True, staging_bytes=needed - 128, multicast=multicast,
    ):  # fmt: skip
        assert isinstance(error, errors.BufferTooSmall) and error.needed_bytes == needed, error
