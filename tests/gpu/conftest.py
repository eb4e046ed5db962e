"""These tests need two or more CUDA devices; every rank is a process with a device of its own."""

from collections.abc import Generator
from typing import Any

import gpu_pool
import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if "gpu" in item.path.parts:
            needed = 2
            marker = item.get_closest_marker("gpu")
            if marker is not None:
                needed = marker.kwargs.get("num_devices", 2)
            if count < needed:
                item.add_marker(
                    pytest.mark.skip(reason=f"needs {needed} CUDA devices, has {count}")
                )


@pytest.fixture
def num_ranks() -> int:
    return min(torch.cuda.device_count(), 8)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo
) -> Generator[None, Any, Any]:
    report = yield
    if report.failed:
        gpu_pool.distrust()
    return report
