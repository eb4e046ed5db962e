"""Tests of this folder need one CUDA device; ranks are processes that share it."""

import pytest
import torch
from gpu_pool import pytest_runtest_makereport  # noqa: F401 - a hook


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count >= 1:
        return
    for item in items:
        if "gpu1" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, has none"))
