"""deep_comm.simulate: results, replay, errors of ranks, and the command that replays a seed."""

from __future__ import annotations

import json

import pytest
import torch

from deep_comm import ArgumentError, Buffer, PeerTimeout, simulate
from deep_comm.simulate.__main__ import main as command
from deep_comm.simulate.workload import Workload, make_case, rank_main

SMALL = ["--ranks", "3", "--tokens", "5", "--experts", "4", "--slots", "2"]


def test_results_come_by_rank_with_the_steps_taken() -> None:
    results = simulate.run(lambda group: (group.rank(), group.size()), 3, seed=5)
    assert list(results) == [(0, 3), (1, 3), (2, 3)]
    assert results.seed == 5 and results.num_steps >= 0


def test_exchanges_copy_what_they_carry() -> None:
    def main(group: simulate.SimulatedGroup) -> bool:
        own = {"rank": group.rank()}
        gathered = group.all_gather_object(own)
        assert [item["rank"] for item in gathered] == [0, 1, 2]
        group.barrier()
        return gathered[group.rank()] is not own

    assert all(simulate.run(main, 3, seed=0))


@pytest.mark.parametrize("policy", ["random", "fifo", "lifo", "starve", "priority", "any"])
def test_a_seed_replays_a_run_step_by_step(policy: str) -> None:
    case = make_case(Workload(num_ranks=3, num_tokens=4, hidden=16), 11)
    runs = [simulate.run(rank_main(case), 3, seed, policy) for seed in (11, 11, 12)]
    assert runs[0].num_steps == runs[1].num_steps
    assert runs[0].time_ns == runs[1].time_ns
    if policy in ("random", "priority"):
        assert runs[0].num_steps != runs[2].num_steps


def test_a_rank_that_stays_away_is_named_in_virtual_time() -> None:
    def main(group: simulate.SimulatedGroup) -> None:
        buffer = Buffer(group, 1 << 16, device="cpu", timeout_s=1000)
        if group.rank() != 1:
            x, idx = torch.zeros(2, 8), torch.zeros(2, 1, dtype=torch.int64)
            buffer.dispatch(x, topk_idx=idx, num_experts=3)

    errors = simulate.run(main, 3, seed=3, on_stuck="clock", return_errors=True)
    assert errors[1] is None
    for error in (errors[0], errors[2]):
        assert isinstance(error, PeerTimeout)
        assert error.peer == 1 and error.waited_s >= 1000


def test_a_run_without_progress_reports_who_waits_and_the_seed() -> None:
    def main(group: simulate.SimulatedGroup) -> None:
        buffer = Buffer(group, 1 << 16, device="cpu")
        if group.rank() == 0:
            x, idx = torch.zeros(2, 8), torch.zeros(2, 1, dtype=torch.int64)
            buffer.dispatch(x, topk_idx=idx, num_experts=3)

    with pytest.raises(simulate.SimulationStuck) as caught:
        simulate.run(main, 2, seed=77)
    assert caught.value.failed_rank == 0
    for fragment in ("seed 77", "notify_dispatch", "peer=1"):
        assert fragment in str(caught.value)


def test_the_error_of_a_rank_goes_before_those_it_causes() -> None:
    def main(group: simulate.SimulatedGroup) -> None:
        if group.rank() == 1:
            raise KeyError("cause")
        group.barrier()

    with pytest.raises(KeyError) as caught:
        simulate.run(main, 3, seed=0)
    assert caught.value.failed_rank == 1


def test_a_run_needs_a_rank() -> None:
    with pytest.raises(ArgumentError):
        simulate.run(lambda group: None, 0, seed=0)


def test_the_command_says_passed_and_returns_zero(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEP_COMM_RANKS_PER_NODE", "2")  # its ranks are one node all the same
    assert command([*SMALL, "--seed", "4", "--runs", "3"]) == 0
    printed = capsys.readouterr().out
    assert "seed 6:" in printed and "PASSED 3 runs" in printed and "runs/s" in printed


def test_the_command_finds_a_fault_and_names_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command([*SMALL, "--runs", "60", "--fault", "weaken_release"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED at seed" in printed


def test_the_command_shows_whom_a_stalled_rank_holds_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command([*SMALL, "--stall", "1:50:0"]) == 1
    assert "SimulationStuck" in capsys.readouterr().out
    assert command([*SMALL, "--stall", "1:50:0", "--on-stuck", "clock"]) == 1
    assert "PeerTimeout" in capsys.readouterr().out
    assert command([*SMALL, "--stall", "1:50:300"]) == 0


def test_the_command_refuses_a_stall_it_cannot_read(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command(["--stall", "1:2"])
    assert "rank:after-step:steps" in capsys.readouterr().err


def test_the_command_refuses_numbers_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    for option, value in (("--ranks", "0"), ("--tokens", "-1"), ("--runs", "0")):
        with pytest.raises(SystemExit):
            command([option, value])
        assert f"argument {option}: must be at least" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--fault", "foo"], "'foo' is none of weaken_release"),
        (["--weaken", "a"], "file:line:op:relaxed"),
        (["--stall", "7:1:1", "--ranks", "2"], "rank 7 is not in"),
        (["--ranks", "9"], "at most 8"),
        (["--hidden", "12"], "a multiple of 8"),
        (["--seed", "x"], "must be an integer; got 'x'"),
        (["--seed", str(2**64)], "--seed: must be at most 18446744073709551615"),
        (["--seed", str(2**64 - 1), "--runs", "2"], "--runs: must be at most 1 with --seed"),
    ],
)
def test_the_command_refuses_what_the_machine_does_not_have(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_the_last_seed_can_be_run() -> None:
    assert command([*SMALL, "--seed", str(2**64 - 1)]) == 0


def test_a_place_that_no_run_comes_to_cannot_be_weakened(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command([*SMALL, "--weaken", "foo.cuh:1:load:relaxed"])
    told = capsys.readouterr()
    assert "--weaken: no run came to foo.cuh:1:load; they came to device/" in told.err
    assert "PASSED" not in told.out
    place = told.err.splitlines()[0].rpartition(" ")[2]
    assert command([*SMALL, "--weaken", f"{place}:relaxed"]) in (0, 1)


def test_the_command_writes_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert command([*SMALL, "--seed", "4", "--runs", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [run["seed"] for run in found["runs"]] == [4, 5] and found["failed_seed"] is None
    assert command([*SMALL, "--stall", "1:50:0", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["failed_seed"] == 0 and "SimulationStuck" in found["failure"]
