"""Programs that tests start warm end, fail and are stopped as those of an interpreter are."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm

PYTHONS = [pytest.param(lambda: sys.executable, id="cold"), pytest.param(warm.python, id="warm")]


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(
    ("code", "status", "printed"),
    [
        ("import sys, os; print(sys.argv, os.getcwd(), os.environ['WHO'])", 0, "['-c', 'a', '-m']"),
        ("import atexit; atexit.register(print, 'bye'); raise SystemExit(7)", 7, "bye"),
        ("raise SystemExit('a text')", 1, "a text"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import threading, time; threading.Timer(0.2, print, ['late']).start()", 0, "late"),
        (
            "import multiprocessing as m; c = m.get_context('spawn'); p = c.Process(target=print, "
            "args=('spawned',)); p.start(); p.join(); print(p.exitcode)",
            0,
            "spawned\n0",
        ),
    ],
)  # fmt: skip
def test_a_program_ends_as_it_would(python, code: str, status: int, printed: str, tmp_path) -> None:
    done = subprocess.run(
        [python(), "-c", code, "a", "-m"], capture_output=True, text=True, timeout=60,
        cwd=tmp_path, env={"WHO": "me"},
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    assert printed in done.stdout + done.stderr
    if "WHO" in code:
        assert done.stdout.endswith(f"{tmp_path} me\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_program_that_is_stopped_is_gone(number: int, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = f"import os, pathlib, time; pathlib.Path({str(note)!r}).write_text(str(os.getpid()))"
    program = subprocess.Popen(
        [warm.python(), "-c", f"{code}; time.sleep(100)"], stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not (note.exists() and note.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    program.send_signal(number)
    assert program.wait(60) == -number
    while Path("/proc", note.read_text()).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path("/proc", note.read_text()).exists()
