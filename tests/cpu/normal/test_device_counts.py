"""Worst-case outputs and counts on the device: what tests/gpu/test_graphs_gpu.py
captures, without a graph.
"""

from __future__ import annotations

import pytest
import torch
from graph_bodies import check, fill, make_step, run_step

import deep_comm
from deep_comm import local, simulate

pytestmark = pytest.mark.usefixtures("poison")


def _steps(group, num_calls: int, direct_bytes: int, per_node: int | None = None) -> None:
    with deep_comm.Buffer(
        group, 4 << 20, 0 if per_node is None else 2 << 20, num_direct_bytes=direct_bytes,
        device="cpu", timeout_s=60, ranks_per_node=per_node,
    ) as buffer:  # fmt: skip
        step = make_step(torch.device("cpu"))
        for call in range(num_calls):
            fill(step, buffer.rank, call)
            run_step(buffer, step)
            check(buffer, step, group.all_gather_object)


@pytest.mark.parametrize("direct_bytes", [0, 2 << 20])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_counts_on_the_device_describe_the_rows(num_ranks: int, direct_bytes: int) -> None:
    local.run(lambda group: _steps(group, 7, direct_bytes), num_ranks, timeout_s=100)


@pytest.mark.parametrize("seed", range(6))
def test_counts_on_the_device_under_every_schedule(seed: int) -> None:
    direct_bytes = (0, 2 << 20)[seed % 2]
    simulate.run(lambda group: _steps(group, 2, direct_bytes), 3, seed, timeout_s=100)


SHAPES = [(2, 1), (2, 2), (3, 2), (1, 3)]


@pytest.mark.parametrize("direct_bytes", [0, 2 << 20])
@pytest.mark.parametrize(("num_nodes", "per_node"), SHAPES)
def test_between_nodes_as_well(num_nodes: int, per_node: int, direct_bytes: int) -> None:
    num_ranks = num_nodes * per_node
    local.run(lambda group: _steps(group, 7, direct_bytes, per_node), num_ranks, timeout_s=100)


@pytest.mark.parametrize("seed", range(6))
def test_between_nodes_under_every_schedule(seed: int) -> None:
    direct_bytes = (0, 2 << 20)[seed % 2]
    simulate.run(lambda group: _steps(group, 2, direct_bytes, 2), 4, seed, timeout_s=100)
