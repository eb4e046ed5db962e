"""Ctrl-C in the middle of a call is seen at once, not after the wait's time limit."""

from __future__ import annotations

import forked
import pytest
import torch
from interrupted import (
    INTERNODE,
    LOW_LATENCY,
    NORMAL,
    handled_in_the_call,
    interrupted_then_closed,
    interrupted_then_reset,
    raised_between_launches,
)

from deep_comm.layer.pending import Pending

CPU = torch.device("cpu")


@pytest.mark.parametrize("combines", [False, True], ids=["dispatch", "combine"])
@pytest.mark.parametrize("mode", [NORMAL, INTERNODE, LOW_LATENCY])
def test_a_signal_ends_a_call_and_the_buffer_goes_on_after_reset(mode: str, combines: bool) -> None:
    forked.run(interrupted_then_reset, 3, CPU, mode, 1, combines, timeout_s=90)


@pytest.mark.parametrize("mode", [NORMAL, INTERNODE])
def test_a_rank_without_memory_between_two_launches_is_out_of_step(mode: str) -> None:
    forked.run(raised_between_launches, 3, CPU, mode, 1, timeout_s=90)


def test_a_program_that_was_interrupted_ends_without_its_peers() -> None:
    forked.run(interrupted_then_closed, 2, CPU, 1, timeout_s=90)


def test_a_handler_that_raises_nothing_runs_during_the_call() -> None:
    forked.run(handled_in_the_call, 2, CPU, 1, timeout_s=90)


def test_a_block_in_which_receiving_was_interrupted_ends_with_that() -> None:
    """Not with what its end, which receives as well, makes of nothing received."""

    def finish() -> None:
        raise KeyboardInterrupt

    pending = Pending(finish)
    with pytest.raises(KeyboardInterrupt), pending:
        pending.result()
    with pytest.raises(KeyboardInterrupt):
        pending.result()
