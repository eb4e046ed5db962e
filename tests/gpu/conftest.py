"""These tests need two or more CUDA devices; every rank is a process with a device of its own."""

from collections.abc import Iterator

import pytest
import torch
from gpu_pool import pytest_runtest_makereport  # noqa: F401 - a hook

from deep_comm import processes


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


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[processes.Pool]:
    """Processes of one file alone, as many as its NUM_PROCESSES."""
    with processes.Pool(request.module.NUM_PROCESSES) as pool:
        yield pool


@pytest.fixture
def num_ranks() -> int:
    return min(torch.cuda.device_count(), 8)
