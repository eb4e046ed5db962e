"""Ranks on GPUs of one host, as logical nodes, over NVSHMEM.

A process has one NVSHMEM job for good, which takes in all processes of a pool and the GPU of each.
So each placement has a pool of its own.
"""

from __future__ import annotations

import atexit
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from deep_comm import processes

needs_nvshmem = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("deep_comm._nvshmem", "nvshmem")),
    reason="needs nvshmem4py and a build with the NVSHMEM module",
)
_pools: dict[tuple[int, ...], processes.Pool] = {}  # by the devices of the ranks


def run(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: object,
    near: bool = True,
    timeout_s: float = 200.0,
    devices: Sequence[int] | None = None,
) -> list:
    """``near``: rows are stored straight into near nodes, else all goes through NVSHMEM's puts and
    signals. Rank r on device r unless ``devices`` says otherwise.
    """
    places = tuple(devices or range(num_ranks))
    if places not in _pools:
        _pools[places] = processes.Pool(num_ranks)
        atexit.register(_pools[places].close)
    variables = {
        "DEEP_COMM_RAIL": "nvshmem", "DEEP_COMM_RAIL_NEAR": str(int(near)), "DEEP_COMM_POISON": "1",
    }  # fmt: skip
    try:
        return _pools[places].run(
            fn, num_ranks, *args, backend="gloo", devices=places,
            variables=variables, timeout_s=timeout_s,
        )  # fmt: skip
    except BaseException:
        _pools.pop(places).close(kill=True)  # ranks may have left kernels or half a job behind
        raise
