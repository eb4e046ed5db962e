"""The doctor always prints, and its exit code is its verdict."""

import json
import sys
from pathlib import Path

import pytest
import torch
import warm

from deep_comm import processes
from deep_comm.doctor import __main__ as doctor
from deep_comm.doctor import findings, ping
from deep_comm.settings import command_line, env


def test_doctor_finds_this_machine_fit(tmp_path) -> None:
    command = [sys.executable, "-m", "deep_comm.doctor"]
    done = warm.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("verdict: OK")
    for text in ("/dev/shm", "_core", "host target, processes: OK", "host target, simulation: OK"):
        assert text in done.stdout
    for variable in env.REGISTRY:
        assert variable.name in done.stdout


def test_a_variable_with_a_bad_value_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_TIMEOUT_S", "soon")
    (problem,) = findings.environment().problems
    assert "DEEP_COMM_TIMEOUT_S" in problem and "soon" in problem


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("DEEP_COMM_DEVICE", "bogus", "must be a torch device such as 'cpu'"),
     ("DEEP_COMM_RAIL", "ib", "must be nvshmem, software"),
     ("DEEP_COMM_TRACE_DIR", "{file}/traces", "cannot be written"),
     ("DEEP_COMM_TUNE_FILE", "{file}.json", "is not a file")],
)  # fmt: skip
def test_a_bad_variable_is_one_problem_of_one_line(
    name: str, value: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "file").touch()
    monkeypatch.setenv(name, value.format(file=tmp_path / "file"))
    assert doctor.main(["--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (problem,) = found["problems"]
    assert problem.startswith(name) and words in problem and "\n" not in problem
    by_title = {section["title"]: section for section in found["sections"]}
    assert by_title["environment variables"]["problems"] == [problem]
    assert "left out" in by_title["pings"]["lines"][0]


def test_folders_and_files_that_can_be_used_are_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tune.json").write_text("{}")
    monkeypatch.setenv("DEEP_COMM_TUNE_FILE", str(tmp_path / "tune.json"))
    monkeypatch.setenv("DEEP_COMM_TRACE_DIR", str(tmp_path / "new" / "traces"))  # made when needed
    assert findings.environment().problems == [] and not (tmp_path / "new").exists()


def test_a_device_that_is_not_there_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings.devices().problems == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("DEEP_COMM_DEVICE", "cuda")
    assert findings.devices().problems == [
        "device 'cuda' was asked for, but torch sees no CUDA device"
    ]


def test_a_ping_that_fails_is_told_in_one_line() -> None:
    def fail() -> None:
        raise processes.RankFailed(0, "raised OSError: no room", "Traceback ...")

    section = findings.Section("pings")
    ping._try(section, "a way", fail, command_line.Progress(is_on=False))
    assert section.problems == ["a way: RankFailed: rank 0 raised OSError: no room"]


def test_a_variable_that_nobody_reads_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_TIMEOUT", "3")
    assert any("DEEP_COMM_TIMEOUT " in warning for warning in findings.environment().warnings)


def test_a_crash_of_one_examination_does_not_end_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash() -> findings.Section:
        raise OSError("no such luck")

    monkeypatch.setattr(doctor, "machine", crash)
    monkeypatch.setattr(doctor, "pings", lambda: findings.Section("pings left out"))
    assert doctor.main() == 1
    printed = capsys.readouterr().out
    assert "no such luck" in printed and "pings left out" in printed
    assert printed.rstrip().endswith("1 problem(s)")


def test_help_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--help"])
    assert ended.value.code == 0
    assert "verdict" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        doctor.main(["machine"])
    assert ended.value.code == 2
