"""deep_comm.triton and the products of deep_comm.tp, on one GPU."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

import tool_modules  # noqa: E402
from triton import language as tl  # noqa: E402

from deep_comm.triton import peer_pointer, signal_word, wait_word  # noqa: E402

time_matmul = tool_modules.load("time_matmul.py")
TIMEOUT_NS = 2_000_000_000


@pytest.mark.parametrize("number", range(len(time_matmul.tp.CONFIGS)))
def test_products_are_right_and_their_waits_bounded(number: int) -> None:
    config = time_matmul.tp.CONFIGS[number]
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    assert time_matmul.check(config, num_sms) == ""


@triton.jit(do_not_specialize=["rank", "after", "number", "timeout_ns"])
def _pass_on(box, words, bases, rank, after, number, fault, timeout_ns, SIZE: tl.constexpr):
    """Waits for this rank's word, adds one to its box into the next rank's, signals that."""
    zero = wait_word(words, number, fault, rank + 1, timeout_ns)
    at = tl.arange(0, SIZE) + zero
    values = tl.load(box + at)
    tl.store(peer_pointer(box, bases, rank, after) + at, values + 1)
    signal_word(peer_pointer(words, bases, rank, after), number + 1)


def _segments(num_ranks: int) -> list[torch.Tensor]:
    """A word, then a box, of each rank."""
    return [torch.zeros(256, dtype=torch.int64, device="cuda") for _ in range(num_ranks)]


def test_programs_pass_a_tensor_from_rank_to_rank() -> None:
    segments = _segments(3)
    bases = torch.tensor([each.data_ptr() for each in segments], device="cuda")
    fault = torch.zeros(1, dtype=torch.int64, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(6)]
    torch.cuda.synchronize()
    # In the first six no kernel has to wait. They load the kernel: while one waits, none can be
    # loaded. Of the last six the one that waits longest is launched first.
    for number in [*range(6), *reversed(range(6, 12))]:
        rank = number % 3
        with torch.cuda.stream(streams[number % 6]):
            _pass_on[(1,)](
                segments[rank][128:], segments[rank], bases, rank, (rank + 1) % 3, number, fault,
                TIMEOUT_NS, SIZE=128,
            )  # fmt: skip
        if number < 6:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    assert fault.item() == 0
    assert (segments[0][128:] == 12).all() and segments[0][0].item() == 12


def test_a_wait_for_nobody_ends_and_says_so() -> None:
    segments = _segments(1)
    bases = torch.tensor([segments[0].data_ptr()], device="cuda")
    fault = torch.zeros(1, dtype=torch.int64, device="cuda")
    _pass_on[(1,)](segments[0][128:], segments[0], bases, 0, 0, 5, fault, 100_000_000, SIZE=128)
    torch.cuda.synchronize()
    assert fault.item() == 1
