"""Tests of this folder need one CUDA device; ranks are processes that share it."""

from collections.abc import Generator
from typing import Any

import gpu_pool
import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count >= 1:
        return
    for item in items:
        if "gpu1" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, has none"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo
) -> Generator[None, Any, Any]:
    report = yield
    if report.failed:
        gpu_pool.distrust()
    return report
