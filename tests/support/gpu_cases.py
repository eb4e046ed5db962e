"""Cases of the end-to-end tests on GPUs, and the processes of their ranks."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gpu_pool
import matrix
import pytest
import torch
from cases import Case

NUM_CASES = 64
POISON = {"DEEP_COMM_POISON": "1"}


def on_gpus(*counts: int) -> pytest.MarkDecorator:
    """Runs a test with each of these ``num_ranks`` that the machine has devices for."""
    marks = [pytest.param(count, marks=pytest.mark.gpu(num_devices=count)) for count in counts]
    return pytest.mark.parametrize("num_ranks", marks)


def run(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: object,
    backend: str = "gloo",
    devices: Sequence[int] | None = None,
    variables: Mapping[str, str] = POISON,
    timeout_s: float = 280,
) -> list:
    """One process of the session's pool a rank, on a device of its own unless ``devices`` says
    otherwise.
    """
    return gpu_pool.shared().run(
        fn, num_ranks, *args, backend=backend, variables=variables, timeout_s=timeout_s,
        devices=range(num_ranks) if devices is None else devices,
    )  # fmt: skip


def on_own_device(group: Any, fn: Callable[..., Any], *args: object) -> Any:
    """Of a rank: ``fn(group, device, *args)``."""
    return fn(group, torch.device("cuda", torch.cuda.current_device()), *args)


def matrix_for(num_ranks: int, seed: int, num_cases: int = NUM_CASES) -> list[Case]:
    cases = matrix.sample(num_cases, seed, ranks=[num_ranks])
    # A default config on a GPU takes more room than one on the host.
    return [dataclasses.replace(case, nvl_bytes=128 << 20) for case in cases]
