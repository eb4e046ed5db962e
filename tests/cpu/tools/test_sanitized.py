"""What tools/sanitize runs under a sanitizer gives the right bits on the host target, without."""

import sys
from pathlib import Path

import warm

SUPPORT = Path(__file__).resolve().parents[2] / "support"


def test_every_call_of_the_program_is_right(tmp_path: Path) -> None:
    done = warm.run(
        [sys.executable, str(SUPPORT / "sanitized.py"), "--device", "cpu"],
        capture_output=True, text=True, timeout=200, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("same bits") == 14 and "LogFMT-10: within" in done.stdout
