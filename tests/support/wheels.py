"""Builds the wheel as pip does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: object, **options) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=900, **options
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


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
