"""The kernel behind the link limit moves every row to its place, and waits for what it reuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simt_machine import Shape, run_direct, simulate, words

STAGES = 4


def push_order(rank: int, num_ranks: int, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(peer, row there) of every row that a rank pushes: to the ranks after it in turn, as
    deep_comm.bench.link expects; rows there count from the rank's block."""
    row = np.arange((num_ranks - 1) * num_rows)
    return (rank + 1 + row % (num_ranks - 1)) % num_ranks, row // (num_ranks - 1)


def arena(
    num_ranks: int, num_rows: int, row_bytes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(memory, receive areas [R, R, rows, bytes], sources [R, (R - 1) * rows, bytes])"""
    num_area, num_source = num_ranks * num_ranks * num_rows, num_ranks * (num_ranks - 1) * num_rows
    memory = words((num_area + num_source) * row_bytes // 8)
    data = memory.view(np.uint8)
    areas = data[: num_area * row_bytes].reshape(num_ranks, num_ranks, num_rows, row_bytes)
    sources = data[num_area * row_bytes :].reshape(num_ranks, (num_ranks - 1) * num_rows, row_bytes)
    sources[:] = np.random.default_rng(num_rows).integers(0, 256, sources.shape, dtype=np.uint8)
    areas[:] = 0xA5
    return memory, areas, sources


def pushed_right(areas: np.ndarray, sources: np.ndarray) -> bool:
    """Every row where push_order says, and no other byte touched."""
    num_ranks, num_rows = areas.shape[0], areas.shape[2]
    expected = np.full_like(areas, 0xA5)
    for rank in range(num_ranks):
        peers, rows = push_order(rank, num_ranks, num_rows)
        expected[peers, rank, rows] = sources[rank]
    return bool((areas == expected).all())


def push(machine: str, num_ranks: int, num_rows: int, row_bytes: int, num_blocks: int, num_warps:
int,          **options: Any) -> bool:  # fmt: skip
    memory, areas, sources = arena(num_ranks, num_rows, row_bytes)
    shape = Shape(num_blocks, 32 * num_warps, num_warps * STAGES * (row_bytes + 8))
    params = [num_ranks, num_rows, row_bytes]
    if machine == "direct":
        for rank in range(num_ranks):
            run_direct("push_all", params, shape=shape, memory=memory, rank=rank)
    else:
        seed = int(machine.split()[1])
        run = simulate(
            "push_all", params, num_ranks=num_ranks, seed=seed, shape=shape, memory=memory,
            **options,
        )  # fmt: skip
        run.check()
    return pushed_right(areas, sources)


@pytest.mark.parametrize(
    ("num_ranks", "num_rows", "row_bytes", "num_blocks", "num_warps"),
    [
        (2, 1, 16, 1, 1),
        (2, 7, 48, 1, 1),  # more rows than stages
        (3, 5, 128, 2, 2),  # rows do not divide by warps
        (4, 2, 256, 3, 3),  # more warps than rows
        (3, 0, 64, 1, 1),
        (8, 3, 32, 2, 1),
    ],
)
def test_every_row_arrives(
    machine: str, num_ranks: int, num_rows: int, row_bytes: int, num_blocks: int, num_warps: int
) -> None:
    assert push(machine, num_ranks, num_rows, row_bytes, num_blocks, num_warps)


def test_without_its_waits_rows_are_lost() -> None:
    """Negative control: a stage that is loaded again while it is still being stored."""

    def is_right(seed: int) -> bool:
        return push(f"seed {seed}", 2, 9, 64, 1, 1, faults=["skip_bulk_wait_read"])

    assert not all(is_right(seed) for seed in range(30))
