"""The processes that run the ranks of GPU tests: started once, used by all tests of a session.

Starting a rank (an interpreter, torch, a CUDA context, loading the kernels) takes several seconds,
most tests less than one. conftest.py of tests/gpu and tests/gpu1 ask for fresh
ones after a failed test.
"""

from __future__ import annotations

import atexit
from collections.abc import Generator
from typing import Any

import pytest
import torch

from deep_comm import processes

_pool: processes.Pool | None = None


def shared() -> processes.Pool:
    """The session's pool; its processes may use any device."""
    global _pool
    if _pool is None:
        # Three: what the tests that share one device need.
        _pool = processes.Pool(max(3, min(8, torch.cuda.device_count())))
        atexit.register(_pool.close)
    return _pool


def distrust() -> None:
    """After a failed test: its ranks may have left kernels, memory or an error behind."""
    if _pool is not None:
        _pool.restart()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo
) -> Generator[None, Any, Any]:
    """Of both conftest.py: a failed test gets new processes."""
    report = yield
    if report.failed:
        distrust()
    return report
