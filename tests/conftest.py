"""What all tests share. They test the installed package: the checkout has no native modules."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def _prefer_installed_package() -> None:
    """Take the checkout off sys.path unless its package has native modules (an in-place build).

    ``python -m pytest`` puts the working directory first, which would hide the installed package.
    """
    if any((ROOT / "deep_comm").glob("_core*.so")):
        return
    elsewhere = [entry for entry in sys.path if Path(entry or os.getcwd()).resolve() != ROOT]
    removed, sys.path[:] = list(sys.path), elsewhere
    if importlib.util.find_spec("deep_comm") is None:
        sys.path[:] = removed


_prefer_installed_package()

# The compiler's cache stays where it is: the wheel's test needs it.
if shutil.which("ccache"):
    place = subprocess.run(["ccache", "-k", "cache_dir"], capture_output=True, text=True).stdout
    os.environ.setdefault("CCACHE_DIR", place.strip())

# What was tuned on this machine must not decide what a test sees either, in processes
# that tests start included.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="deep_comm.cache.")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.fixture(autouse=True)
def _no_variables_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """DEEP_COMM_* of the shell must not decide what a test sees."""
    for name in list(os.environ):
        if name.startswith("DEEP_COMM_"):
            monkeypatch.delenv(name)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are filled before kernels run with what none would write by chance."""
    monkeypatch.setenv("DEEP_COMM_POISON", "1")


@pytest.fixture(params=["put", "stored"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How rows get to another node of the same host: over the rail, or stored by the kernel."""
    monkeypatch.setenv("DEEP_COMM_RAIL_NEAR", str(int(request.param == "stored")))
    return request.param


@pytest.fixture(params=["node", "put", "stored"])
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Inside a node, or between nodes; there rows are put, or stored: no NIC holds them back."""
    monkeypatch.setenv("DEEP_COMM_RAIL_NEAR", str(int(request.param == "stored")))
    return request.param


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores reach the memory of all nodes: nothing is put."""
    monkeypatch.setenv("DEEP_COMM_RAIL_NEAR", "1")


@pytest.fixture(params=["direct", *(f"seed {seed}" for seed in range(6))])
def machine(request: pytest.FixtureRequest) -> str:
    """Of simt_machine.run_on: directly, or simulated."""
    return request.param


@pytest.fixture
def on_the_host(poison: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that are told no device are of the host target."""
    monkeypatch.setenv("DEEP_COMM_DEVICE", "cpu")
    monkeypatch.setenv("DEEP_COMM_TIMEOUT_S", "10")


def _num_cuda_devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        gpu = item.get_closest_marker("gpu")
        if gpu is not None:
            needed = gpu.kwargs.get("num_devices", gpu.args[0] if gpu.args else 2)
        elif item.get_closest_marker("gpu1") is not None:
            needed = 1
        else:
            continue
        if _num_cuda_devices() < needed:
            reason = f"needs {needed} CUDA devices, this machine has {_num_cuda_devices()}"
            item.add_marker(pytest.mark.skip(reason=reason))
