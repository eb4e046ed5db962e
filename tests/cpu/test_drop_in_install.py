"""How programs come to find the drop-in under the name deep_ep, and how it leaves again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def python(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, **options
    )


def compat(*arguments: object) -> subprocess.CompletedProcess:
    return python("-m", "deep_comm.compat", *map(str, arguments))


def test_nothing_is_named_deep_ep_until_asked() -> None:
    code = "import deep_comm, importlib.util as u; print(u.find_spec('deep_ep'))"
    done = python("-c", code)
    assert done.stdout.strip() == "None", done.stdout + done.stderr


def test_path_is_enough_to_import() -> None:
    folder = compat("path").stdout.strip()
    assert [entry.name for entry in Path(folder).iterdir() if entry.is_dir()] == ["deep_ep"]
    done = python(
        "-c", "import deep_ep; print(deep_ep.Buffer.__module__)",
        env={**os.environ, "PYTHONPATH": folder},
    )  # fmt: skip
    assert done.stdout.strip() == "deep_comm.compat.legacy", done.stderr


def test_install_and_uninstall(tmp_path: Path) -> None:
    done = compat("install", "--target", tmp_path)
    assert done.returncode == 0, done.stderr
    check = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
import deep_ep, importlib.metadata as m
assert deep_ep.__file__.startswith({str(tmp_path)!r})
assert m.version("deep_ep") == deep_ep.__version__
assert all(m.files("deep_ep")) and all(file.locate().exists() for file in m.files("deep_ep"))
from deep_ep.utils import EventHandle, EventOverlap
"""
    done = python("-c", check)
    assert done.returncode == 0, done.stderr
    assert compat("install", "--target", tmp_path).returncode == 0  # again: replaced
    done = compat("uninstall", "--target", tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    assert compat("uninstall", "--target", tmp_path).returncode == 1


def test_doctor_says_whose_deep_ep_is_found(tmp_path: Path) -> None:
    code = "from deep_comm.doctor.findings import packages; print(packages().lines[-1])"
    (tmp_path / "deep_ep").mkdir()
    (tmp_path / "deep_ep" / "__init__.py").write_text("")
    for path, wanted in (
        ("", "import deep_ep: nothing"),
        (compat("path").stdout.strip(), "the drop-in"),
        (str(tmp_path), "not ours"),
    ):
        done = python("-c", code, env={**os.environ, "PYTHONPATH": path})
        assert done.stdout.strip().endswith(wanted), done.stdout + done.stderr


def test_another_deep_ep_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "deep_ep").mkdir()
    (tmp_path / "deep_ep" / "__init__.py").write_text("mine = True\n")
    for command in ("install", "uninstall"):
        done = compat(command, "--target", tmp_path)
        assert done.returncode == 1 and "another deep_ep" in done.stderr
    assert (tmp_path / "deep_ep" / "__init__.py").read_text() == "mine = True\n"
    other = tmp_path / "elsewhere"
    done = python(
        "-m", "deep_comm.compat", "install", "--target", str(other),
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1 and str(tmp_path) in done.stderr
