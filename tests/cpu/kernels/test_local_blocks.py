"""Kernels that only work in a rank's own memory take the whole GPU, unless the caller says how many
SMs a call may have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fake_cuda
import pytest
import torch

import deep_comm
from deep_comm import local
from deep_comm.settings import env

T, H, K, E, SMS = 6, 64, 2, 4, 132
NAMES = ("number_rows", "expand_rows", "transpose_scales", "combine_expanded")
BETWEEN_NODES = ("number_received", "expand_received", "transpose_scales", "reduce_experts")
TWO_NODES: dict[str, Any] = {"num_rdma_bytes": 8 << 20, "ranks_per_node": 1}


@pytest.fixture(autouse=True)
def log() -> Iterator[fake_cuda.Log]:
    with fake_cuda.installed() as log:
        yield log


def _blocks_of_a_step(
    log: fake_cuda.Log, config: Any = None, names: tuple[str, ...] = NAMES, **nodes: Any
) -> dict[str, int]:
    def body(group: Any) -> dict[str, int]:
        with deep_comm.Buffer(group, 8 << 20, timeout_s=20, **nodes) as buffer:
            # As on a GPU: on the host target default calls are small.
            buffer._defaults.can_choose = env.NUM_SMS.get() is None
            x = torch.randn(T, H).bfloat16()
            weights, idx = torch.rand(T, E).topk(K)
            (rows, _), _, row_weights, _, handle, _ = buffer.dispatch(
                (x, torch.rand(T, 3)), topk_idx=idx, topk_weights=weights, num_experts=E,
                expand=True, column_major_scales=True, config=config,
            )  # fmt: skip
            buffer.combine(
                rows, handle, topk_weights=row_weights, apply_weights=True, config=config
            )
            return {name: blocks for name, blocks in log.planned if name in names}

    num_ranks = 2 if nodes else 1
    return local.run(body, num_ranks, timeout_s=60)[0]


def test_they_take_the_whole_gpu(log: fake_cuda.Log) -> None:
    blocks = _blocks_of_a_step(log)
    assert blocks == dict.fromkeys(NAMES, SMS)
    assert ("may_run_beside", True) in log.planned
    blocks = _blocks_of_a_step(log, None, BETWEEN_NODES, **TWO_NODES)
    assert blocks == dict.fromkeys(BETWEEN_NODES, SMS)


def test_a_config_bounds_them(log: fake_cuda.Log) -> None:
    assert set(_blocks_of_a_step(log, deep_comm.Config(3, 4, 16)).values()) == {3}
    assert ("may_run_beside", False) in log.planned
    config = deep_comm.Config(4, 4, 16, 4, 16)
    assert set(_blocks_of_a_step(log, config, BETWEEN_NODES, **TWO_NODES).values()) == {4}


def test_sms_of_the_environment_bound_them(
    log: fake_cuda.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEP_COMM_NUM_SMS", "4")
    assert set(_blocks_of_a_step(log).values()) == {4}
    assert set(_blocks_of_a_step(log, None, BETWEEN_NODES, **TWO_NODES).values()) == {4}
