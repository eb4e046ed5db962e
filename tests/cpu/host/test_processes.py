"""Ranks as real processes over shared memory: results, killed ranks, ranks that disagree."""

import multiprocessing
import os
import signal
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import torch
import torch.distributed as dist
from cases import Case, Scales
from disagreeing import build_alone
from interrupted import silent_then_reset
from roundtrip import run_case, verify

import deep_comm
from deep_comm import _core, errors, processes
from deep_comm.backends.cpu import CpuBackend
from deep_comm.ranks import rendezvous

# One worker runs these one after the other: they measure time and look at /dev/shm.
TIMEOUT_S = 3.0
# What a busy machine may add to a time-out before a test calls it late.
SLACK_S = 60.0


def segments_of(pids: list[int]) -> list[str]:
    """Segments in /dev/shm made by these processes; their names hold the maker's pid."""
    names = [path.name for path in Path("/dev/shm").glob("deep_comm.*")]
    return [name for name in names if any(f".{pid}." in name for pid in pids)]


@pytest.mark.parametrize(
    "case",
    [
        Case((40, 0, 33, 17), experts=13, topk=4, hidden=1024, calls=3, biases=2),
        Case((9, 14), experts=6, topk=2, num_sms=2, slots=1, send_chunk=1, calls=4),
        Case((5,) * 8, experts=32, topk=8, hidden=64, dtype=torch.int8, scales=Scales(3)),
        Case(
            (12, 7, 9), experts=4, topk=2, worst=5, dtype=torch.float32, combine_dtype=torch.float32
        ),
    ],
    ids=str,
)
def test_processes_get_their_rows_and_sums(case: Case) -> None:
    results = forked.run(run_case, case.num_ranks, case, variables={"DEEP_COMM_POISON": "1"})
    verify(case, results)


def test_spawned_processes_work_too() -> None:
    case = Case((8, 5), experts=4)
    verify(case, processes.run(run_case, 2, case, timeout_s=120))


def _over_subgroups(group, case):
    """Two Buffers at once: one over the world, one over each half."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = halves[group.rank() // 2]
    with deep_comm.Buffer(group, 8 << 20, device="cpu"):
        return run_case(half, case)


def test_buffers_over_subgroups_of_the_world() -> None:
    case = Case((11, 6), experts=5)
    results = forked.run(_over_subgroups, 4, case)
    verify(case, results[:2])
    verify(case, results[2:])


def _dispatch_all_to_all(buffer: deep_comm.Buffer, num_tokens: int):
    ranks = buffer.group_size
    x = torch.ones(num_tokens, 512, dtype=torch.bfloat16)
    topk_idx = torch.arange(ranks).expand(num_tokens, ranks).contiguous()
    weights = torch.ones(num_tokens, ranks)
    return buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, num_experts=ranks)


def _killed_between_calls(group, victim: int):
    buffer = deep_comm.Buffer(group, 8 << 20, device="cpu", timeout_s=TIMEOUT_S)
    recv_x, _, _, _, handle, _ = _dispatch_all_to_all(buffer, 8)
    if group.rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        buffer.combine(recv_x, handle)
    except errors.PeerTimeout as error:
        return {"pid": os.getpid(), "peer": error.peer, "kernel": error.kernel, "text": str(error)}
    return {"pid": os.getpid(), "peer": None}


def _killed_in_the_middle(group, victim: int):
    buffer = deep_comm.Buffer(group, 8 << 20, device="cpu", timeout_s=TIMEOUT_S)
    _dispatch_all_to_all(buffer, 4)
    if group.rank() == victim:
        # From another thread, since this one is inside the kernels then.
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    started = time.monotonic()
    try:
        while time.monotonic() - started < 60:
            _dispatch_all_to_all(buffer, 200)
    except errors.PeerTimeout as error:
        return {"pid": os.getpid(), "peer": error.peer, "kernel": error.kernel, "text": str(error)}
    return {"pid": os.getpid(), "peer": None}


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("fn", [_killed_between_calls, _killed_in_the_middle])
def test_survivors_of_a_killed_rank_name_it_within_the_timeout(fn, victim: int) -> None:
    started = time.monotonic()
    ended = forked.outcomes(fn, 4, victim)
    took = time.monotonic() - started
    assert isinstance(ended[victim].error, processes.RankFailed)
    assert "signal 9" in str(ended[victim].error)
    survivors = [outcome for outcome in ended if outcome.rank != victim]
    for outcome in survivors:
        assert outcome.error is None, outcome.traceback
        assert outcome.value["peer"] is not None, f"rank {outcome.rank} noticed nothing"
    named = [outcome.value["peer"] for outcome in survivors]
    # A survivor may wait for another survivor that waits for the victim; the first to expire, and
    # so at least one, waits for the victim itself.
    assert victim in named, named
    assert f"rank {victim}" in next(o.value["text"] for o in survivors if o.value["peer"] == victim)
    assert took < TIMEOUT_S * 2 + SLACK_S
    pids = [outcome.value["pid"] for outcome in survivors]
    assert segments_of(pids) == []


def _killed_with_a_segment(group):
    segment = _core.Segment.create(1 << 20)
    os.kill(os.getpid(), signal.SIGKILL)
    segment.close()  # never reached; keeps the segment alive until the kill


def test_segments_of_a_crashed_run_are_removed_by_the_next() -> None:
    ended = forked.outcomes(_killed_with_a_segment, 1)
    assert isinstance(ended[0].error, processes.RankFailed)
    # Other tests have segments, too, while they run.
    there = Path("/dev/shm").glob("deep_comm.*")
    left = {path for path in there if not Path("/proc", path.name.split(".")[2]).exists()}
    case = Case((3, 4), experts=2)
    verify(case, forked.run(run_case, 2, case))
    still = {path for path in left if path.exists()}
    assert not still, f"stale segments survived the next run: {still}"


def _disagree(group, field: str):
    rank = group.rank()
    num_nvl_bytes = (4 << 20) * (1 + (field == "num_nvl_bytes" and rank == 1))
    with deep_comm.Buffer(group, num_nvl_bytes, device="cpu", timeout_s=10) as buffer:
        num_experts = 6 + 2 * (field == "num_experts" and rank == 1)
        hidden = 64 * (1 + (field == "hidden" and rank == 1))
        x = torch.ones(3, hidden, dtype=torch.bfloat16)
        buffer.dispatch(
            x,
            topk_idx=torch.zeros(3, 1, dtype=torch.int64),
            topk_weights=torch.ones(3, 1),
            num_experts=num_experts,
        )


@pytest.mark.parametrize("field", ["num_nvl_bytes", "num_experts", "hidden"])
def test_ranks_that_disagree_are_told_so(field: str) -> None:
    ended = forked.outcomes(_disagree, 2, field)
    assert all(isinstance(outcome.error, errors.ConfigMismatch) for outcome in ended), [
        repr(outcome.error) for outcome in ended
    ]


def test_a_silent_rank_is_named_and_the_buffer_goes_on_after_reset() -> None:
    results = forked.run(silent_then_reset, 3, "cpu", 1, TIMEOUT_S)
    assert results[1] is None
    for rank in (0, 2):
        peer, stage, word = results[rank]
        assert peer == 1 and stage and word


def test_a_rank_that_builds_no_buffer_is_named_within_the_deadline() -> None:
    for seconds in forked.run(build_alone, 3):
        assert max(seconds) < 2.4


def _dies_before_it_builds(group, victim: int):
    rendezvous.LEAST_MEETING_S = 1.0
    if group.rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(errors.PeerLost, match=f"rank {victim} did not come"):
        deep_comm.Buffer(group, 1 << 20, device="cpu", timeout_s=0.5)


def test_a_rank_that_has_died_is_a_lost_peer() -> None:
    ended = forked.outcomes(_dies_before_it_builds, 3, 1)
    for rank in (0, 2):
        assert ended[rank].error is None, ended[rank].traceback


def _shares(group):
    CpuBackend.unique_device = ("GPU-a", "GPU-b", "GPU-a")[group.rank()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        deep_comm.Buffer(group, 1 << 20, device="cpu").destroy()
    return [str(each.message) for each in caught]


def test_processes_that_share_a_gpu_are_warned() -> None:
    for rank, texts in enumerate(forked.run(_shares, 3)):
        if rank == 1:
            assert texts == []
        else:
            assert len(texts) == 1 and "ranks 0, 2 of this Buffer share" in texts[0]
            assert "set_device(local_rank)" in texts[0]


def _pid_and_variable(group, failing: int | None = None, dying: int | None = None):
    if group.rank() == failing:
        raise ValueError("on purpose")
    if group.rank() == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid(), os.environ.get("DEEP_COMM_POISON"), group.size()


def test_a_pool_keeps_its_processes_until_one_dies() -> None:
    with processes.Pool(2, start_method="forkserver") as pool:
        options = dict(timeout_s=60)
        first = pool.run(_pid_and_variable, 2, variables={"DEEP_COMM_POISON": "1"}, **options)
        wider = pool.run(_pid_and_variable, 3, **options)
        assert [pid for pid, _, _ in wider[:2]] == [pid for pid, _, _ in first]
        assert {(variable, size) for _, variable, size in first} == {("1", 2)}
        assert {(variable, size) for _, variable, size in wider} == {(None, 3)}

        ended = pool.outcomes(_pid_and_variable, 3, 1, **options)
        assert isinstance(ended[1].error, ValueError)
        assert [ended[0].value, ended[2].value] == [wider[0], wider[2]]
        assert pool.run(_pid_and_variable, 3, **options) == wider

        ended = pool.outcomes(_pid_and_variable, 3, None, 2, **options)
        assert isinstance(ended[2].error, processes.RankFailed)
        fresh = pool.run(_pid_and_variable, 3, **options)
        assert not {pid for pid, _, _ in fresh} & {pid for pid, _, _ in wider}
        pool.restart()
        again = pool.run(_pid_and_variable, 2, **options)
        assert not {pid for pid, _, _ in again} & {pid for pid, _, _ in fresh}


def test_a_pool_that_keeps_survivors_replaces_the_dead_alone() -> None:
    with processes.Pool(3, start_method="forkserver") as pool:
        options = dict(timeout_s=60)
        first = [pid for pid, _, _ in pool.run(_pid_and_variable, 3, **options)]
        for spares in (1, 0):  # the second time nobody is idle
            num_ranks = 3 - spares
            ended = pool.outcomes(
                _pid_and_variable, num_ranks, None, 1, keep_survivors=True, **options
            )
            assert isinstance(ended[1].error, processes.RankFailed)
            then = [pid for pid, _, _ in pool.run(_pid_and_variable, 3, **options)]
            assert then[0] == first[0] and then[1] not in first[:2]
            assert (then[1] == first[2]) == bool(spares)
            assert len(set(then)) == 3
            first = then
        # One that raises may have left anything behind in the others.
        ended = pool.outcomes(_pid_and_variable, 3, 2, 1, keep_survivors=True, **options)
        assert isinstance(ended[2].error, ValueError)
        fresh = [pid for pid, _, _ in pool.run(_pid_and_variable, 3, **options)]
        assert not set(fresh) & set(first)


def _sleep(group) -> None:
    time.sleep(60)


def test_a_pool_replaces_processes_that_hang() -> None:
    with processes.Pool(start_method="forkserver") as pool:
        hung = pool.outcomes(_sleep, 2, timeout_s=1.0)
        assert all("did not end" in str(outcome.error) for outcome in hung)
        assert len(pool.run(_pid_and_variable, 2, timeout_s=60)) == 2


def _waits_for_one_that_raises(group, culprit: int) -> None:
    if group.rank() == culprit:
        raise ValueError("the cause")
    group.barrier().wait()


@pytest.mark.parametrize("culprit", [0, 1])
def test_the_rank_that_raised_is_named_not_one_that_lost_its_connection(culprit: int) -> None:
    with pytest.raises(processes.RankFailed, match=f"rank {culprit} raised ValueError: the cause"):
        forked.run(_waits_for_one_that_raises, 2, culprit)


def _waits_in_a_kernel(group, culprit: int) -> None:
    with deep_comm.Buffer(group, 1 << 20, device="cpu", timeout_s=1.0) as buffer:
        if group.rank() == culprit:
            raise ValueError("the cause")
        buffer.barrier()


@pytest.mark.parametrize("culprit", [0, 1])
def test_the_rank_that_raised_is_named_not_one_whose_kernel_waited_for_it(culprit: int) -> None:
    with pytest.raises(processes.RankFailed, match=f"rank {culprit} raised ValueError: the cause"):
        forked.run(_waits_in_a_kernel, 2, culprit)


class Unreadable:
    """Of which pickle makes something that it cannot read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def _errors(group, how: str) -> Any:
    error = deep_comm.ArgumentError("x", 3, "must be a tensor")
    if how == "returned":
        return error
    if how == "foreign":
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    return Unreadable()


def test_errors_come_as_they_were() -> None:
    (returned,) = forked.run(_errors, 1, "returned")
    assert (returned.argument, returned.value, returned.rule) == ("x", 3, "must be a tensor")
    for how, text in (("foreign", "invalid start byte"), ("unreadable", "cannot be unpickled")):
        with pytest.raises(processes.RankFailed, match=text):
            forked.run(_errors, 1, how)


def test_a_run_needs_a_rank() -> None:
    with pytest.raises(deep_comm.ArgumentError, match="num_ranks"):
        processes.run(_all_raise, 0)


def _all_raise(group) -> None:
    raise ValueError(f"of {group.rank()}")


def test_what_became_of_the_others_that_failed_is_told_too() -> None:
    with pytest.raises(processes.RankFailed, match=r"^rank 0 raised ValueError: of 0") as raised:
        forked.run(_all_raise, 3)
    told = str(raised.value)
    for rank in (1, 2):
        assert f"and rank {rank} raised ValueError: of {rank}, after " in told


def test_a_rank_that_dies_before_it_reads_its_job_has_failed() -> None:
    """Its pipe ends by a reset then, as it has something unread in it."""
    ours, theirs = multiprocessing.Pipe()
    ours.send("job")
    theirs.close()
    dead = SimpleNamespace(join=lambda timeout: None, exitcode=1)
    outcome = processes._receive(3, dead, ours, 0.5)
    assert isinstance(outcome.error, processes.RankFailed)
    assert "rank 3 exited with 1" in str(outcome.error)
