"""The doctor always prints, and its exit code is its verdict."""

import sys

import pytest
import warm

from deep_comm.doctor import __main__ as doctor
from deep_comm.doctor import findings
from deep_comm.settings import env


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
