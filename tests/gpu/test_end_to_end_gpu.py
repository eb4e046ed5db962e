"""tests/cpu/test_end_to_end.py on GPUs: the same cases; every rank is a process."""

import dataclasses

import matrix
import pytest
import torch
from cases import Case
from roundtrip import call_once, verify

import deep_comm
from deep_comm import processes

NUM_CASES = 64
POISON = {"DEEP_COMM_POISON": "1"}


def run(fn, num_ranks: int, *args: object, backend: str = "gloo") -> list:
    return processes.run(
        fn,
        num_ranks,
        *args,
        backend=backend,
        devices=range(num_ranks),
        variables=POISON,
        timeout_s=280,
    )


def run_cases(group, cases: list[Case], options: dict) -> list:
    """Many cases in one set of processes, since starting one costs more than a case."""
    device = torch.device("cuda", group.rank())
    results = []
    for case in cases:
        with deep_comm.Buffer(group, case.nvl_bytes, device=device, timeout_s=60) as buffer:
            results.append(
                [call_once(buffer, case, call, device, options) for call in range(case.calls)]
            )
    return results


def verify_all(cases: list[Case], results: list) -> None:
    failures = []
    for number, case in enumerate(cases):
        try:
            verify(case, [ranks[number] for ranks in results])
        except AssertionError as error:
            failures.append(f"{case}: {error}")
    assert not failures, "\n".join(failures)


def matrix_for(num_ranks: int, seed: int, num_cases: int = NUM_CASES) -> list[Case]:
    cases = matrix.sample(num_cases, seed, ranks=[num_ranks])
    # A default config on a GPU takes more room than one on the host.
    return [dataclasses.replace(case, nvl_bytes=128 << 20) for case in cases]


@pytest.mark.parametrize("num_ranks_wanted", [2, 3, 4, 5, 6, 7, 8])
def test_every_rank_gets_its_rows_and_sums(num_ranks_wanted: int) -> None:
    if torch.cuda.device_count() < num_ranks_wanted:
        pytest.skip(f"needs {num_ranks_wanted} CUDA devices, has {torch.cuda.device_count()}")
    cases = matrix_for(num_ranks_wanted, seed=num_ranks_wanted)
    verify_all(cases, run(run_cases, num_ranks_wanted, cases, {}))


def test_special_cases(num_ranks: int) -> None:
    cases = [
        dataclasses.replace(case, nvl_bytes=256 << 20)
        for case in matrix.SPECIAL.values()
        if case.num_ranks <= num_ranks
    ]
    for size in sorted({case.num_ranks for case in cases}):
        same_size = [case for case in cases if case.num_ranks == size]
        verify_all(same_size, run(run_cases, size, same_size, {}))


def test_nccl_group_serves_as_well(num_ranks: int) -> None:
    cases = matrix_for(num_ranks, seed=90, num_cases=6)
    verify_all(cases, run(run_cases, num_ranks, cases, {}, backend="nccl"))


def test_many_tokens_at_a_model_shape(num_ranks: int) -> None:
    case = Case(
        tuple(1024 + 97 * rank for rank in range(num_ranks)), hidden=7168, experts=256, topk=8,
        biases=1, calls=3, nvl_bytes=512 << 20,
    )  # fmt: skip
    verify_all([case], run(run_cases, num_ranks, [case], {}))


def test_hundred_calls_in_a_row(num_ranks: int) -> None:
    case = Case(
        tuple(40 + 7 * rank for rank in range(num_ranks)), hidden=512, experts=32, topk=4,
        num_sms=4, send_chunk=2, slots=3, calls=100,
    )  # fmt: skip
    verify_all([case], run(run_cases, num_ranks, [case], {}))


def test_asynchronous_calls_give_the_same(num_ranks: int) -> None:
    cases = matrix_for(num_ranks, seed=91, num_cases=12)
    verify_all(cases, run(run_cases, num_ranks, cases, {"async_finish": True}))
