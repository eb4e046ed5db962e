"""Rank threads: exchanges, subgroups, and that a rank that fails takes nobody hostage."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref

import pytest
from run_by import run_by

from deep_comm import ArgumentError, DeepCommError, PeerLost, local


def test_results_come_by_rank() -> None:
    assert local.run(lambda group: (group.rank(), group.size()), 3) == [(0, 3), (1, 3), (2, 3)]


@run_by(local.run, 4)
def test_many_exchanges_in_a_row_stay_apart(group: local.ThreadGroup, /) -> None:
    for turn in range(200):
        gathered = group.all_gather_object((turn, group.rank()))
        assert gathered == [(turn, rank) for rank in range(group.size())]
    group.barrier()


def test_subgroups_exchange_among_themselves_in_their_own_order() -> None:
    def main(group: local.ThreadGroup) -> list[int]:
        ranks = [3, 1] if group.rank() % 2 else [0, 2]
        part = group.subgroup(ranks)
        assert part.size() == 2 and ranks[part.rank()] == group.rank()
        gathered = part.all_gather_object(group.rank())
        group.barrier()
        again = group.subgroup(ranks)  # the same members meet again
        assert again.all_gather_object("x") == ["x", "x"]
        return gathered

    assert local.run(main, 4) == [[0, 2], [3, 1], [0, 2], [3, 1]]


@run_by(local.run, 2)
def test_a_subgroup_without_the_caller_or_with_a_rank_twice_is_refused(
    group: local.ThreadGroup, /
) -> None:
    with pytest.raises(ArgumentError):
        group.subgroup([1 - group.rank()])
    with pytest.raises(ArgumentError):
        group.subgroup([0, 0, 1])
    for rank in (-1, 2):
        with pytest.raises(ArgumentError, match="ranks must be an integer of 0 to 1"):
            group.subgroup([group.rank(), rank])


def test_the_root_cause_is_raised_with_its_rank_and_nobody_hangs() -> None:
    def main(group: local.ThreadGroup) -> None:
        if group.rank() == 2:
            raise KeyError("cause")
        group.barrier()

    begin = time.monotonic()
    with pytest.raises(KeyError) as caught:
        local.run(main, 4)
    assert caught.value.failed_rank == 2
    assert time.monotonic() - begin < 100  # run's own limit is 300 s


def test_ranks_that_wait_for_one_that_returned_get_peer_lost() -> None:
    def main(group: local.ThreadGroup) -> str:
        if group.rank() == 0:
            return "gone"
        group.barrier()
        return "met"

    results = local.run(main, 3, return_errors=True)
    assert results[0] == "gone"
    assert all(isinstance(error, PeerLost) for error in results[1:])
    assert "rank 0" in str(results[1])


def test_what_a_rank_gave_before_it_ended_still_counts() -> None:
    def main(group: local.ThreadGroup) -> list[int]:
        if group.rank() == 1:
            time.sleep(0.05)
        return group.all_gather_object(group.rank())

    assert local.run(main, 2) == [[0, 1], [0, 1]]


def test_a_rank_that_never_ends_is_named_after_the_timeout() -> None:
    release = threading.Event()

    def main(group: local.ThreadGroup) -> None:
        if group.rank() == 1:
            release.wait(30)

    with pytest.raises(DeepCommError, match=r"ranks \[1\] are still running"):
        local.run(main, 2, timeout_s=0.2)
    release.set()


def test_a_run_needs_a_rank() -> None:
    with pytest.raises(ArgumentError):
        local.run(lambda group: None, 0)


def test_an_error_does_not_keep_what_its_rank_held() -> None:
    """Or a step's tensors would live until Python looks for cycles."""

    class Held:
        pass

    kept = []

    def main(group: local.ThreadGroup) -> None:
        held = Held()
        kept.append(weakref.ref(held))
        raise ValueError("after holding")

    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            local.run(main, 2)
        assert [ref() for ref in kept] == [None, None]
    finally:
        gc.enable()
