"""test_end_to_end.py on GPUs: the same cases; every rank is a process."""

import dataclasses
import functools

import matrix
from cases import Case
from checked_runs import ROUNDTRIP, check
from gpu_cases import matrix_for, on_gpus, run


@on_gpus(2, 3, 4, 5, 6, 7, 8)
def test_every_rank_gets_its_rows_and_sums(num_ranks: int) -> None:
    cases = matrix_for(num_ranks, seed=num_ranks)
    check(run, ROUNDTRIP, cases)


def test_special_cases(num_ranks: int) -> None:
    cases = [
        dataclasses.replace(case, nvl_bytes=256 << 20)
        for case in matrix.SPECIAL.values()
        if case.num_ranks <= num_ranks
    ]
    for size in sorted({case.num_ranks for case in cases}):
        check(run, ROUNDTRIP, [case for case in cases if case.num_ranks == size])


def test_nccl_group_serves_as_well(num_ranks: int) -> None:
    over_nccl = functools.partial(run, backend="nccl")
    check(over_nccl, ROUNDTRIP, matrix_for(num_ranks, seed=90, num_cases=6))


def test_many_tokens_at_a_model_shape(num_ranks: int) -> None:
    case = Case(
        tuple(1024 + 97 * rank for rank in range(num_ranks)), hidden=7168, experts=256, topk=8,
        biases=1, calls=3, nvl_bytes=512 << 20,
    )  # fmt: skip
    check(run, ROUNDTRIP, [case])


def test_hundred_calls_in_a_row(num_ranks: int) -> None:
    case = Case(
        tuple(40 + 7 * rank for rank in range(num_ranks)), hidden=512, experts=32, topk=4,
        num_sms=2, send_chunk=2, slots=3, calls=100,
    )  # fmt: skip
    check(run, ROUNDTRIP, [case])


def test_asynchronous_calls_give_the_same(num_ranks: int) -> None:
    cases = matrix_for(num_ranks, seed=91, num_cases=12)
    check(run, ROUNDTRIP, cases, async_finish=True)


def test_chunks_of_many_rows(num_ranks: int) -> None:
    """Of combine: two, three and seven rows; the first for their number in all."""
    cases = [
        Case((tokens, *[9] * (num_ranks - 1)), hidden=512, experts=num_ranks, topk=2, num_sms=8,
             nvl_bytes=512 << 20)
        for tokens in (1500, 5000, 13000)
    ]  # fmt: skip
    check(run, ROUNDTRIP, cases)
