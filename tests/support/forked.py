"""Ranks that are forks of one process, which has imported torch: each is there seconds sooner than
one that imports it itself."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from typing import Any

import pytest

from deep_comm import processes


def _own() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("DEEP_COMM_")}


@functools.cache
def _start() -> None:
    """What the first test has set must not be what the forks of all others begin with."""
    with pytest.MonkeyPatch.context() as patch:
        for name in _own():
            patch.delenv(name)
        forkserver.set_forkserver_preload(["deep_comm.processes", "torch.distributed"])
        forkserver.ensure_running()


def outcomes(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: object,
    variables: Mapping[str, str] | None = None,
    timeout_s: float = 200.0,
) -> list[processes.Outcome]:
    """As `processes.outcomes`, with this process's variables of deep_comm."""
    _start()
    return processes.outcomes(
        fn, num_ranks, *args, start_method="forkserver", timeout_s=timeout_s,
        variables={**_own(), **(variables or {})},
    )  # fmt: skip


def run(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: object,
    variables: Mapping[str, str] | None = None,
    timeout_s: float = 200.0,
) -> list[Any]:
    """As `processes.run`, with this process's variables of deep_comm."""
    _start()
    return processes.run(
        fn, num_ranks, *args, start_method="forkserver", timeout_s=timeout_s,
        variables={**_own(), **(variables or {})},
    )  # fmt: skip
