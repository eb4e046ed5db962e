"""What blocks note while they run, merged over ranks, and told when a call does not end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import tracing
from on_buffers import on_buffers
from run_by import run_by

import deep_comm
from deep_comm import _core, errors, local, processes, simulate, trace
from deep_comm.trace import Event, Recording, rings
from deep_comm.trace.__main__ import main as command
from deep_comm.trace.summary import step_times


def test_the_table_of_steps() -> None:
    """Files of one version are read by another."""
    assert _core.trace_steps == (
        "begun", "counted", "entered", "forwarded", "sent", "received", "left", "gave_up",
    )  # fmt: skip
    assert _core.kernel_names[1:4] == ("notify_dispatch", "dispatch", "combine")


@run_by(on_buffers, 1, 1 << 20)
def test_off_there_is_no_memory_and_nothing_to_read(buffer: deep_comm.Buffer, /) -> None:
    assert buffer._context.trace_rings is None
    with pytest.raises(errors.UnsupportedError, match="DEEP_COMM_TRACE"):
        buffer.trace()


@pytest.mark.parametrize("direct", [True, False])
def test_blocks_of_dispatch_and_combine_note_their_steps(direct: bool) -> None:
    recordings = local.run(lambda g: tracing.normal_calls(g, "cpu", 3, direct=direct), 3)
    for kernel in ("notify_dispatch", "combine"):
        if direct or kernel != "combine":
            tracing.require_steps(recordings, kernel, 3)
    if direct:
        tracing.require_steps(recordings, "dispatch", 3)
    else:
        steps = {e.step for each in recordings for e in each.events if e.kernel == "dispatch"}
        assert steps == {"begun", "entered", "left"}
    assert "clocks: rank 0" in tracing.require_merged(recordings)


@pytest.mark.parametrize("direct", [True, False])
def test_blocks_of_calls_between_nodes_note_their_steps(direct: bool) -> None:
    recordings = local.run(lambda g: tracing.internode_calls(g, "cpu", 3, direct=direct), 4)
    kernels = ("internode_notify", "internode_dispatch", "internode_combine")
    for kernel in kernels:
        if direct or kernel == "internode_notify":
            tracing.require_steps(recordings, kernel, 3)
            continue
        steps = {e.step for each in recordings for e in each.events if e.kernel == kernel}
        assert steps == {"begun", "entered", "left"}
    merged = tracing.require_merged(recordings)
    assert all(kernel in merged for kernel in kernels)


def test_blocks_of_low_latency_calls_note_their_steps() -> None:
    recordings = local.run(lambda g: tracing.low_latency_calls(g, "cpu", 3), 3)
    for kernel in ("low_latency_dispatch", "low_latency_combine"):
        tracing.require_steps(recordings, kernel, 3)
    tracing.require_merged(recordings)


@pytest.mark.parametrize(
    "calls", [tracing.normal_calls, tracing.low_latency_calls, tracing.internode_calls]
)
def test_in_simulation_too(calls: Any) -> None:
    results = simulate.run(lambda group: calls(group, "cpu", 2), 2, 11, timeout_s=120)
    for kernel in {kernel for kernel, _ in results[0].calls}:
        tracing.require_steps(list(results), kernel, 2)


def _in_process(group: Any) -> Recording:
    return tracing.normal_calls(group, "cpu", 2)


def test_ranks_that_are_processes() -> None:
    recordings = processes.run(_in_process, 2, timeout_s=120)
    tracing.require_steps(recordings, "combine", 2)
    tracing.require_merged(recordings)


def test_rings_keep_the_last_calls() -> None:
    few = local.run(lambda g: tracing.normal_calls(g, "cpu", 7, keep=2), 2)
    many = local.run(lambda g: tracing.normal_calls(g, "cpu", 7, keep=32), 2)
    for kernel in ("dispatch", "combine"):
        of_few = [call for name, call in few[0].calls if name == kernel]
        of_many = [call for name, call in many[0].calls if name == kernel]
        assert len(of_many) == 7
        # Calls of all kernels are numbered together: a page may serve none.
        assert of_few == of_many[-len(of_few) :]
        assert 1 <= len(of_few) <= 2
    assert _core.trace_bytes(num_calls=2) < 2 << 20


def test_a_call_that_is_overwritten_is_not_read() -> None:
    """Fewer blocks in the page's next call leave notes of the one before."""
    size = _core.trace_bytes(num_calls=1)
    slots = torch.zeros(size // 8, dtype=torch.int64)
    # kernel 0: blocks 0 and 1 of call 5, then block 0 of call 6; a slot is two words
    slots[0:2] = torch.tensor([100, 5])
    slots[32:34] = torch.tensor([110, 5])
    slots[0:2] = torch.tensor([200, 6 | 9 << 32])
    assert _core.read_trace(slots.data_ptr(), num_calls=1) == [(0, 6, 0, 0, 200, 9)]


def test_a_time_out_tells_where_each_block_was(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("DEEP_COMM_TRACE_DIR", str(tmp_path / "traces"))
    stories = local.run(lambda g: tracing.late_combine(g, "cpu", 1, lambda g: g.barrier()), 3)
    assert stories[1] == ""
    for rank in (0, 2):
        assert f"trace of rank {rank}, combine number 3:" in stories[rank]
        assert (
            "blocks 0-7: last step 'begun', then gave up waiting for rank 1 in stage entry_barrier "
            "(word 'arrived')"
        ) in stories[rank]
        path = Path(stories[rank].splitlines()[-1].removeprefix("all of it: "))
        (recording,) = trace.load([path])
        assert recording.rank == rank
        assert {"begun", "gave_up"} <= {e.step for e in recording.of_call("combine", 3)}
    # Their Buffers have left a file at their end, too. In the folder that of the time-out counts.
    recordings = trace.load([tmp_path / "traces"])
    assert [recording.rank for recording in recordings] == [0, 1, 2]
    for recording in (recordings[0], recordings[2]):
        assert "gave_up" in {e.step for e in recording.of_call("combine", 3)}
    with pytest.raises(errors.ArgumentError, match="must not both be named"):
        trace.load([path, path.with_name(path.name.removeprefix("timeout-"))])


def test_a_trace_that_cannot_be_written_hides_nothing(
    tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DEEP_COMM_TRACE_DIR", str(tmp_path / "file" / "traces"))

    def main(group: Any) -> None:
        with (
            pytest.raises(ValueError, match="the cause"),
            deep_comm.Buffer(group, 1 << 20, device="cpu", trace=2),
        ):
            raise ValueError("the cause")

    local.run(main, 1)
    assert "the trace of rank 0 is not written" in caplog.text


def test_reset_begins_anew() -> None:
    def rank_main(buffer: deep_comm.Buffer) -> list[tuple[str, int]]:
        x, topk_idx, _ = tracing.inputs(buffer.rank, 8, "cpu")
        for _ in range(3):
            buffer.dispatch(x, topk_idx=topk_idx, num_experts=tracing.NUM_EXPERTS)
        buffer.reset()
        buffer.dispatch(x, topk_idx=topk_idx, num_experts=tracing.NUM_EXPERTS)
        return buffer.trace().calls

    assert on_buffers(rank_main, 2, 256 << 20, trace=4)[0] == [
        ("notify_dispatch", 1),
        ("dispatch", 2),
    ]


def test_files_of_a_program_that_knows_nothing_of_it(tmp_path: Path, monkeypatch: Any) -> None:
    """Two variables, then the tool."""
    monkeypatch.setenv("DEEP_COMM_TRACE", "3")
    monkeypatch.setenv("DEEP_COMM_TRACE_DIR", str(tmp_path))

    def rank_main(buffer: deep_comm.Buffer) -> None:
        x, topk_idx, _ = tracing.inputs(buffer.rank, 8, "cpu")
        buffer.dispatch(x, topk_idx=topk_idx, num_experts=tracing.NUM_EXPERTS)

    on_buffers(rank_main, 2, 256 << 20)
    assert len(list(tmp_path.glob("*.json"))) == 2
    merged = tmp_path / "merged" / "out.json"
    merged.parent.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "deep_comm.trace", str(tmp_path), "-o", str(merged)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 of 2 ranks" in done.stdout
    assert "received" in done.stdout
    assert json.loads(merged.read_text())["traceEvents"]
    done = subprocess.run(
        [sys.executable, "-m", "deep_comm.trace", str(merged)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2
    assert "must be a trace that a Buffer left" in done.stderr and "Traceback" not in done.stderr


def test_a_folder_is_read_once_and_without_what_was_merged_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [("combine", 1, 0, "begun", 5), ("combine", 1, 0, "entered", 9)]
    for rank in (0, 1):
        _recording(rank, "same", events).save(tmp_path / f"b-rank{rank}.json")
    merged = tmp_path / "merged.json"
    for _ in range(2):
        assert command([str(tmp_path), "-o", str(merged)]) == 0
    one = str(tmp_path / "b-rank1.json")
    assert command([str(tmp_path), f"{tmp_path}/../{tmp_path.name}", one, one]) == 0
    assert capsys.readouterr().out.count("2 of 2 ranks") == 3
    with pytest.raises(errors.ArgumentError, match="merged.json"):
        trace.load([merged])  # named itself, it is no recording


@pytest.mark.parametrize(
    "damage",
    [{"rank": "0"}, {"rank": None}, {"num_ranks": 2.0}, {"buffer": 3}, {"clock": ["a"]},
     {"events": [["combine", 1, 0, "nosuch", 5, 0]]},
     {"events": [["combine", 1, 0, "begun", "5", 0]]},
     {"events": [["combine", 1, 0, "begun", 10**400, 0]]},
     {"events": [[["combine"], 1, 0, "begun", 5, 0]]}, {"events": [["combine", 1, 0]]},
     {"events": 7}, {"rank": -1},
     {"events": [["combine", 1, 0, "gave_up", 5, 1 << 32]]}, {"deep_comm_trace": 2}, {"more": 1}],
    ids=str,
)  # fmt: skip
def test_damaged_files_are_refused_by_name(
    damage: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = _recording(0, "same", [("combine", 1, 0, "begun", 5)]).save(tmp_path / "b-rank0.json")
    assert command([str(file)]) == 0
    file.write_text(json.dumps(json.loads(file.read_text()) | damage))
    with pytest.raises(SystemExit, match="2"):
        command([str(file)])
    told = capsys.readouterr().err
    assert "b-rank0.json" in told and "must be a trace that a Buffer left" in told


@pytest.mark.parametrize("fails_with", [torch.OutOfMemoryError, RuntimeError])
def test_a_rank_without_room_for_its_trace_does_not_leave_the_others_alone(
    fails_with: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = rings.Rings.__init__

    def make_here(self: Any, device: Any, num_calls: int, rank: int, *others: Any) -> None:
        if rank == 1:
            raise fails_with("no room")
        make(self, device, num_calls, rank, *others)

    monkeypatch.setattr(rings.Rings, "__init__", make_here)

    def main(group: Any) -> str:
        try:
            deep_comm.Buffer(group, 1 << 20, device="cpu", trace=4, timeout_s=20)
        except Exception as error:  # noqa: BLE001 - looked at below
            return type(error).__name__
        return "built"

    own = "AllocationError" if fails_with is torch.OutOfMemoryError else "RuntimeError"
    assert local.run(main, 3, timeout_s=30) == ["PeerLost", own, "PeerLost"]


@pytest.mark.parametrize("value", [-1, 4097, 1.0, "1"])
def test_numbers_of_calls_are_checked(value: Any) -> None:
    with pytest.raises(errors.ArgumentError, match="trace"):
        local.run(lambda g: deep_comm.Buffer(g, 1 << 20, device="cpu", trace=value), 1)


def _recording(rank: int, clock: str, events: list[tuple[str, int, int, str, int]]) -> Recording:
    return Recording(rank, 2, "b", clock, [Event(*event, 0) for event in events])


@pytest.mark.parametrize(
    "kernel", ["combine", "internode_notify", "internode_dispatch", "internode_combine"]
)
def test_clocks_are_brought_together_and_the_error_is_stated(kernel: str) -> None:
    """Rank 1's clock is 1000 ahead; a word takes 10 at least, and 30 in the first call."""
    events = []
    for rank, ahead in enumerate((0, 1000)):
        of_rank = []
        for call, (starts, trip) in enumerate((((100, 120), 30), ((500, 505), 10)), 1):
            entered = max(starts) + trip
            of_rank += [
                (kernel, call, 0, "begun", starts[rank] + ahead),
                (kernel, call, 0, "entered", entered + ahead),
            ]
        events.append(of_rank)
    recordings = [_recording(rank, f"clock {rank}", of_rank) for rank, of_rank in enumerate(events)]
    alignment = trace.align(recordings)
    # Of the second call: 0's word came 15 after its begin at the latest, 1's 10 after it.
    assert alignment.errors_ns == {0: 0.0, 1: 12.5}
    assert abs(alignment.offsets_ns[1] + 1000) <= 12.5
    (row,) = [row for row in step_times(recordings, alignment) if row.step == "entered"]
    assert row.num_notes == 2
    one_clock = [_recording(rank, "same", of_rank) for rank, of_rank in enumerate(events)]
    assert trace.align(one_clock).offsets_ns == {0: 0.0, 1: 0.0}


def test_a_rank_that_met_nobody_is_said_to_be_unknown() -> None:
    recordings = [
        _recording(0, "a", [("combine", 1, 0, "begun", 5), ("combine", 1, 0, "entered", 9)]),
        _recording(1, "b", [("combine", 7, 0, "begun", 5)]),
    ]
    assert "rank 1 unknown" in str(trace.align(recordings))
