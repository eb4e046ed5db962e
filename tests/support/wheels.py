"""Builds the wheel as pip does, and installs it into an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def run(*command: object, **options) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=900, **options
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def clean_environment(folder: Path) -> Path:
    """Its python. torch comes from outside: which build of it is the user's choice. As a plain
    folder of other packages: their own .pth files, such as an editable deep_comm's, stay shut."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(site) / "torch_from_outside.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return python


def install(wheel: Path, python: Path) -> None:
    """By pip of the outside, so that the environment needs none. It would take a deep_comm that
    PYTHONPATH names for one that is installed."""
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "-q", "--no-deps", "--no-index", wheel, env=variables())


def variables() -> dict[str, str]:
    """Of this process, but for where it finds packages."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}


def build_wheel(folder: Path, *, cuda: str) -> Path:
    """Into ``folder``. A compiler cache has the objects of the tests' build: options are equal."""
    for needed in ("scikit_build_core", "pybind11"):
        pytest.importorskip(needed)
    run(
        sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps",
        f"--config-settings=build-dir={ROOT / 'build' / f'wheel-cuda-{cuda}'}", "-w", folder, ROOT,
        env={**os.environ, "DEEP_COMM_CUDA": cuda, "DEEP_COMM_TESTS": "OFF"},
    )  # fmt: skip
    (built,) = folder.glob("*.whl")
    return built
