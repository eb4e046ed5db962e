"""tests/cpu/test_end_to_end.py on one GPU: its ranks are threads, each with streams of its own.

All ranks' kernels must be on the device at once, since they wait for each other; few SMs each leave
room.
"""

import dataclasses

import matrix
import pytest
import torch
from cases import Case
from roundtrip import call_once, verify

import deep_comm
from deep_comm import local


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_POISON", "1")


def reserve_memory() -> None:
    """Give torch's allocator memory for the current stream, so that no call has to ask the driver for more:
    that would wait for the other ranks' kernels, which wait for this rank."""
    small = [torch.empty(1 << 19, dtype=torch.uint8, device="cuda:0") for _ in range(64)]
    large = [torch.empty(size << 20, dtype=torch.uint8, device="cuda:0") for size in [2, 8, 15] * 4 + [64, 256]]
    del small, large


def check(case: Case, options: dict | None = None) -> None:
    if case.num_sms is None:
        case = dataclasses.replace(case, num_sms=4, send_chunk=4, slots=16)
    case = dataclasses.replace(case, nvl_bytes=64 << 20)

    def rank_main(group):
        # One stream a rank, for everything: where ranks share a stream, or two streams share a hardware queue,
        # kernels of two ranks that wait for each other queue up behind one another.
        with (
            deep_comm.Buffer(group, case.nvl_bytes, device="cuda:0", timeout_s=10) as buffer,
            torch.cuda.stream(buffer.get_comm_stream()),
        ):
            reserve_memory()
            group.barrier()
            return [
                call_once(buffer, case, call, buffer.device, options) for call in range(case.calls)
            ]

    verify(case, local.run(rank_main, case.num_ranks, timeout_s=200))


@pytest.mark.parametrize("case", matrix.sample(48, seed=3, ranks=[1, 2, 3, 4]), ids=str)
def test_every_rank_gets_its_rows_and_sums(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", matrix.sample(6, seed=4, ranks=[2, 4]), ids=str)
def test_asynchronous_calls_give_the_same(case: Case) -> None:
    check(case, {"async_finish": True})


def test_many_calls_in_a_row() -> None:
    check(
        Case((13, 5, 29), experts=7, topk=3, hidden=64, num_sms=4, slots=3, send_chunk=2, calls=40)
    )
