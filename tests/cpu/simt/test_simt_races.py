"""Accesses to shared memory that nothing orders are errors, in whichever order they run."""

from __future__ import annotations

import os
import re

import pytest
from simt_machine import Shape, native, simulate

from deep_comm.simulate.__main__ import main

SEEDS = range(4)
WARP, WARPS = Shape(1, 32, 256), Shape(1, 64, 256)
NO_ORDER = "nothing orders the two"
NO_FENCE = "no fence_proxy_async_shared stands in between"


def errors(kernel: str, *params: int, shape: Shape = WARP, **options: object) -> set[str]:
    """What the machine says under each seed; "": nothing."""
    said = set()
    for seed in SEEDS:
        run = simulate(kernel, params, seed=seed, shape=shape, find_races=True, **options)
        (error,) = run.errors
        assert error is None or isinstance(error, native.MachineError), error
        found = re.search(f"{NO_ORDER}|{NO_FENCE}", str(error or ""))
        assert error is None or found, error
        said.add(found[0] if found else "")
    return said


(
    NOTHING, SYNC_BLOCK, NAMED_BARRIER, ARRIVE_AND_SYNC, MBARRIER, MBARRIER_PHASE_LATE, WORD,
    WORD_OF_GLOBAL_MEMORY, WORD_AND_FENCES, ATOMICS, RELAXED_WORD, RELAXED_READ,
) = range(12)  # fmt: skip


@pytest.mark.parametrize("reads_first", [0, 1])
@pytest.mark.parametrize(
    "how",
    [
        SYNC_BLOCK, NAMED_BARRIER, ARRIVE_AND_SYNC, MBARRIER, WORD, WORD_OF_GLOBAL_MEMORY,
        WORD_AND_FENCES, ATOMICS,
    ],
)  # fmt: skip
def test_what_one_warp_hands_over_another_may_use(how: int, reads_first: int) -> None:
    assert errors("race_of_warps", how, reads_first, shape=WARPS) == {""}


@pytest.mark.parametrize("reads_first", [0, 1])
@pytest.mark.parametrize("how", [NOTHING, MBARRIER_PHASE_LATE, RELAXED_WORD, RELAXED_READ])
def test_what_nobody_hands_over_is_a_race(how: int, reads_first: int) -> None:
    assert errors("race_of_warps", how, reads_first, shape=WARPS) == {NO_ORDER}


ALONE, SYNC_WARP, SYNC_SOME, SYNC_OTHERS, SHUFFLE, VOTE = range(6)


def test_lanes_of_a_warp_need_a_barrier_that_names_both() -> None:
    assert errors("race_of_lanes", SYNC_WARP) == errors("race_of_lanes", SYNC_SOME) == {""}
    assert errors("race_of_lanes", ALONE) == errors("race_of_lanes", SYNC_OTHERS) == {NO_ORDER}


@pytest.mark.parametrize("how", [SHUFFLE, VOTE])
def test_shuffles_and_votes_order_shared_memory_on_gpus_but_not_in_ptx(how: int) -> None:
    assert errors("race_of_lanes", how) == {NO_ORDER}
    assert errors("race_of_lanes", how, collectives_order_memory=True) == {""}


def test_neighbouring_bytes_are_apart() -> None:
    assert errors("race_of_bytes", 0) == {""}
    assert errors("race_of_bytes", 1, shape=WARPS) == {NO_ORDER}


def test_lanes_may_write_one_place_by_one_instruction() -> None:
    """CUDA C++ Programming Guide, SIMT Architecture: one of the writes takes place."""
    assert errors("race_of_bytes", 1) == {""}


def test_a_bulk_store_sees_what_a_proxy_fence_has_passed_on() -> None:
    nothing, writer, issuer, global_only, before_write = range(5)
    for how in (writer, issuer):
        assert errors("race_of_bulk_store", how) == {""}
    for how in (nothing, global_only, before_write):
        assert errors("race_of_bulk_store", how) == {NO_FENCE}


def test_a_stage_is_free_when_its_storing_thread_has_waited_and_said_so() -> None:
    nothing, wait_read, wait_read_of_older, wait_only = range(4)
    assert errors("race_of_reuse", wait_read) == {""}
    for how in (nothing, wait_read_of_older, wait_only):
        assert errors("race_of_reuse", how) == {NO_ORDER}


def test_what_a_bulk_load_brings_is_read_behind_its_mbarrier() -> None:
    wait, nothing, other_waits, other_waits_and_meets = range(4)
    assert errors("race_of_bulk_load", wait) == {""}
    assert errors("race_of_bulk_load", other_waits_and_meets) == {""}
    assert errors("race_of_bulk_load", nothing) == {NO_ORDER}
    assert errors("race_of_bulk_load", other_waits) == {NO_ORDER}


def test_a_stage_that_was_read_is_loaded_again_behind_a_barrier_and_a_proxy_fence() -> None:
    assert errors("race_of_next_load", 1, 1) == {""}
    assert errors("race_of_next_load", 0, 1) == {NO_FENCE}
    assert errors("race_of_next_load", 1, 0) == {NO_ORDER}


def test_an_mbarrier_is_used_after_its_initialisation() -> None:
    assert errors("race_of_mbarrier", 1, shape=WARPS) == {""}
    assert errors("race_of_mbarrier", 0, shape=WARPS) == {NO_ORDER}


def test_a_report_names_the_threads_and_the_code() -> None:
    (error,) = simulate("race_of_lanes", [ALONE], shape=WARP, find_races=True).errors
    assert re.search(
        r"warp 0 lane [03]: (reads|writes) shared memory at offset 64, which warp 0 lane [03] has "
        r"(written|read), and nothing orders the two\n  addr2line -Cfpie \S+ 0x\w+ 0x\w+",
        str(error),
    )


def play(*options: str) -> int:
    return main(["--races", "--ranks", "4", "--tokens", "24", *options])


FINDS_RACES = os.environ.get("DEEP_COMM_FIND_RACES") == "ON"
needs_build = pytest.mark.skipif(not FINDS_RACES, reason="needs DEEP_COMM_FIND_RACES=ON tools/test")


@pytest.mark.skipif(FINDS_RACES, reason="this build finds races")
def test_a_build_that_finds_no_races_refuses_to_look_for_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        play()
    assert "build with DEEP_COMM_FIND_RACES=ON" in capsys.readouterr().err


@needs_build
def test_dispatch_and_combine_have_no_races() -> None:
    assert play("--runs", "2") == 0


@needs_build
def test_a_stage_that_is_loaded_again_too_early_is_a_race(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert play("--fault", "skip_bulk_wait_read") == 1
    assert re.search(rf"a bulk_load writes shared memory .*{NO_ORDER}", capsys.readouterr().out)
