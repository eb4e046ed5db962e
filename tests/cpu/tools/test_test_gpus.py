"""tools/test_gpus on folders of small tests: what it deals to its lanes, and what it says."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

WELL = "def test_a(): pass\ndef test_b(): pass\n"
SKIPPED = "import pytest\ndef test_skip(): pytest.skip('needs 9 devices')\n"
ALONE = """
import pathlib, pytest, time
def test_beside_others():
    pathlib.Path(__file__).with_name("beside").touch()
@pytest.mark.alone
def test_by_itself():
    time.sleep(0.5)
    assert not pathlib.Path(__file__).with_name("beside").exists()
"""


def run(
    folder: Path, files: dict[str, str], *options: str
) -> tuple[subprocess.CompletedProcess[str], list[dict]]:
    """What the tool said, and the lines of its lanes."""
    tests, out = folder / "tests", folder / "out"
    tests.mkdir()
    for name, text in files.items():
        (tests / name).write_text(text)
    command = [sys.executable, str(ROOT / "tools" / "test_gpus"), "--tests", str(tests)]
    done = subprocess.run(
        [*command, "--out", str(out), "--lanes", "2", *options],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    lines = [
        json.loads(line) | {"lane": path.stem}
        for path in sorted(out.glob("lane*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return done, lines


def test_every_test_is_run_once_and_some_alone(tmp_path: Path) -> None:
    files = {"test_one.py": WELL, "test_two.py": WELL, "test_s.py": SKIPPED, "test_c.py": ALONE}
    done, lines = run(tmp_path, files)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed, 1 skipped in" in done.stdout and ": OK" in done.stdout
    assert "skipped: 1 of test_s.py: needs 9 devices" in done.stdout
    begun = [line["begun"] for line in lines if "begun" in line]
    assert len(begun) == len(set(begun)) == 7
    by_file = {line["file"]: line["lane"] for line in lines if "file" in line}
    assert set(by_file) == set(files)


def test_failures_and_what_was_not_reached_are_named(tmp_path: Path) -> None:
    slow = "import time\ndef test_slow(): time.sleep(60)\ndef test_after(): pass\n"
    wrong = "def test_wrong():\n    assert 1 == 2, 'one is not two'\n"
    begin = time.monotonic()
    done, _ = run(tmp_path, {"test_slow.py": slow, "test_wrong.py": wrong}, "--limit", "16")
    assert done.returncode == 1
    assert 15 < time.monotonic() - begin < 80
    said = done.stdout
    assert "test_wrong.py::test_wrong" in said and "failed: " in said
    assert "ended in it: " in said and "test_slow.py::test_slow" in said
    assert "not reached: " in said and "test_slow.py::test_after" in said
    assert "1 ended in it, 1 failed, 1 not reached in" in said and "FAILED" in said


def test_a_file_that_cannot_be_imported_is_a_failure(tmp_path: Path) -> None:
    done, _ = run(tmp_path, {"test_good.py": WELL, "test_broken.py": "import no_such_module\n"})
    assert done.returncode == 1 and "FAILED" in done.stdout


def test_files_that_are_skipped_whole_are_no_failure(tmp_path: Path) -> None:
    whole = "import pytest\npytest.importorskip('no_such_module')\ndef test_a(): pass\n"
    done, _ = run(tmp_path, {"test_whole.py": whole, "test_other.py": whole})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 skipped in" in done.stdout and ": OK" in done.stdout
    assert "skipped: 1 of test_whole.py: could not import 'no_such_module'" in done.stdout


def test_a_folder_without_tests_is_a_failure(tmp_path: Path) -> None:
    done, _ = run(tmp_path, {"test_none.py": ""})
    assert done.returncode == 1 and "FAILED" in done.stdout


@pytest.mark.parametrize("option", [["--lanes", "0"], ["--limit", "0"], ["--limit", "nan"]])
def test_no_lane_and_no_time_are_refused(option: list[str], tmp_path: Path) -> None:
    done, _ = run(tmp_path, {"test_good.py": WELL}, *option)
    assert done.returncode == 2 and f"argument {option[0]}: must be " in done.stderr
    assert not (tmp_path / "out").exists()


def test_time_for_no_test_is_a_failure(tmp_path: Path) -> None:
    done, _ = run(tmp_path, {"test_good.py": WELL}, "--limit", "0.01")
    assert done.returncode == 1 and "no lane has come to a list of its tests" in done.stdout


def test_an_interrupted_run_leaves_no_lane_behind(tmp_path: Path) -> None:
    """Lanes are sessions of their own, which Ctrl-C does not reach."""
    tests, out, pid = tmp_path / "tests", tmp_path / "out", tmp_path / "pid"
    tests.mkdir()
    (tests / "test_slow.py").write_text(
        "import os, pathlib, time\ndef test_slow():\n"
        f"    pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\n    time.sleep(60)\n"
    )
    command = [sys.executable, str(ROOT / "tools" / "test_gpus"), "--tests", str(tests)]
    tool = subprocess.Popen([*command, "--out", str(out), "--lanes", "1"], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    lane = int(pid.read_text())
    tool.send_signal(signal.SIGINT)
    tool.communicate(timeout=60)
    with pytest.raises(ProcessLookupError):
        os.kill(lane, 0)
