"""How programs come to find the drop-in under the name deep_ep, and how it leaves again.

In processes of their own, few of them: each takes seconds to import torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MAIN = "from deep_comm.compat.__main__ import main\n"


def python(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, **options
    )


def run(code: str, **options) -> str:
    done = python("-c", code, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def path_of_the_drop_in() -> str:
    return python("-m", "deep_comm.compat", "path").stdout.strip()


def test_nothing_is_named_deep_ep_until_asked_and_the_path_is_enough() -> None:
    found = run("import deep_comm, importlib.util as u; print(u.find_spec('deep_ep'))")
    assert found.strip() == "None"
    folder = path_of_the_drop_in()
    assert [entry.name for entry in Path(folder).iterdir() if entry.is_dir()] == ["deep_ep"]
    module = run(
        "import deep_ep; print(deep_ep.Buffer.__module__)",
        env={**os.environ, "PYTHONPATH": folder},
    )
    assert module.strip() == "deep_comm.compat.legacy"


def test_install_and_uninstall(tmp_path: Path) -> None:
    target = str(tmp_path)
    run(f"{MAIN}assert main(['install', '--target', {target!r}]) == 0")
    run(f"""{MAIN}
import sys; sys.path.insert(0, {target!r})
import deep_ep, importlib.metadata as m
assert deep_ep.__file__.startswith({target!r})
assert m.version("deep_ep") == deep_ep.__version__
assert all(m.files("deep_ep")) and all(file.locate().exists() for file in m.files("deep_ep"))
from deep_ep.utils import EventHandle, EventOverlap
assert main(["install", "--target", {target!r}]) == 0  # again: replaced
assert main(["uninstall", "--target", {target!r}]) == 0
""")
    assert list(tmp_path.iterdir()) == []
    assert python("-m", "deep_comm.compat", "uninstall", "--target", target).returncode == 1


def test_doctor_says_whose_deep_ep_is_found(tmp_path: Path) -> None:
    (tmp_path / "deep_ep").mkdir()
    (tmp_path / "deep_ep" / "__init__.py").write_text("")
    said = run(f"""
import sys
from deep_comm.compat.installer import SITE
from deep_comm.doctor.findings import packages
for path in ("/nowhere", str(SITE), {str(tmp_path)!r}):
    sys.path.insert(0, path)
    print(packages().lines[-1])
    sys.path.remove(path)
""").splitlines()
    wanted = ("import deep_ep: nothing", "the drop-in", "not ours")
    assert len(said) == len(wanted)
    assert all(line.endswith(words) for line, words in zip(said, wanted, strict=True)), said


def test_another_deep_ep_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "deep_ep").mkdir()
    (tmp_path / "deep_ep" / "__init__.py").write_text("mine = True\n")
    said = run(f"""{MAIN}
for command in ("install", "uninstall"):
    assert main([command, "--target", {str(tmp_path)!r}]) == 1
""")
    assert said.count("another deep_ep") == 2
    assert (tmp_path / "deep_ep" / "__init__.py").read_text() == "mine = True\n"
    other = tmp_path / "elsewhere"
    done = python(
        "-m", "deep_comm.compat", "install", "--target", str(other),
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1 and str(tmp_path) in done.stderr
    assert python("-m", "deep_comm.compat", "install", "--target", str(other)).returncode == 0
    done = python(
        "-m", "deep_comm.compat", "install", "--target", str(other),
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1 and (other / "deep_ep" / "__init__.py").exists()


def test_modules_are_attributes_without_an_import_of_their_own() -> None:
    """As DeepEP's package imports them itself."""
    code = """
import deep_ep
for name in ("_C", "buffer", "buffers.elastic", "buffers.legacy", "utils.envs", "utils.event"):
    found = deep_ep
    for part in name.split("."):
        found = getattr(found, part)
"""
    run(code, env={**os.environ, "PYTHONPATH": path_of_the_drop_in()})
