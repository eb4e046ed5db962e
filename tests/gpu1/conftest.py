"""Tests of this folder need one CUDA device; ranks are threads of one process that share it."""

import os

# Ranks share a device and wait for each other, so nothing may make one rank's stream wait for another's:
# neither a kernel that is loaded at its first launch (loading waits for running kernels), nor hardware queues
# that several streams share. Both are read when CUDA starts.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import pytest  # noqa: E402
import torch  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count >= 1:
        return
    for item in items:
        if "gpu1" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, has none"))
