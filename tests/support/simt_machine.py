"""Runs the native test kernels (tests/native), on a direct or on a simulated machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

native = pytest.importorskip("deep_comm._simt_tests", reason="built only with DEEP_COMM_TESTS=ON")


def words(count: int = 8192) -> np.ndarray:
    """Memory that all ranks share, zeroed and aligned to 64 bytes."""
    raw = np.zeros(count + 8, dtype=np.uint64)
    skip = (-raw.ctypes.data // 8) % 8
    return raw[skip : skip + count]


@dataclass
class Shape:
    num_blocks: int = 1
    num_threads: int = 32
    smem_bytes: int = 1024


@dataclass
class Run:
    """What a simulated run left behind."""

    memory: np.ndarray
    num_steps: int = 0
    time_ns: int = 0
    errors: list[BaseException | None] = field(default_factory=list)

    def check(self) -> Run:
        for error in self.errors:
            if error is not None:
                raise error
        return self


def run_direct(
    kernel: str,
    params: Sequence[int] = (),
    *,
    shape: Shape | None = None,
    memory: np.ndarray | None = None,
    rank: int = 0,
) -> np.ndarray:
    memory = words() if memory is None else memory
    shape = shape or Shape()
    native.run(
        memory=memory, kernel=kernel, rank=rank, num_blocks=shape.num_blocks,
        num_threads=shape.num_threads, smem_bytes=shape.smem_bytes, params=list(params),
    )  # fmt: skip
    return memory


def launch(
    simulation: Any,
    memory: np.ndarray,
    kernel: str,
    params: Sequence[int] = (),
    *,
    rank: int = 0,
    stream: int = 0,
    shape: Shape | None = None,
    begin: str = "behind",
) -> None:
    """``begin``: "behind", "early" or "beside" the launch before it (simt::Begin)."""
    shape = shape or Shape()
    native.launch(
        simulation, stream=stream, memory=memory, kernel=kernel, rank=rank,
        num_blocks=shape.num_blocks, num_threads=shape.num_threads, smem_bytes=shape.smem_bytes,
        params=list(params), begin=begin,
    )  # fmt: skip


def run_ranks(simulation: Any, bodies: Sequence[Callable[[], None]]) -> list[BaseException | None]:
    """One thread per rank; returns what each raised."""
    errors: list[BaseException | None] = [None] * len(bodies)

    def rank_main(rank: int) -> None:
        try:
            bodies[rank]()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            errors[rank] = error
        finally:
            simulation.leave(rank)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def simulate(
    kernel: str,
    params: Sequence[int] = (),
    *,
    num_ranks: int = 1,
    seed: int = 0,
    policy: str = "any",
    shape: Shape | None = None,
    memory: np.ndarray | None = None,
    **options: Any,
) -> Run:
    """The same kernel on every rank."""
    simulation = native.Simulation(num_ranks=num_ranks, seed=seed, policy=policy, **options)
    return run_simulation(simulation, num_ranks, kernel, params, shape=shape, memory=memory)


def run_simulation(
    simulation: Any,
    num_ranks: int,
    kernel: str,
    params: Sequence[int] = (),
    *,
    shape: Shape | None = None,
    memory: np.ndarray | None = None,
) -> Run:
    """The same kernel on every rank of a simulation that has not run yet."""
    memory = words() if memory is None else memory

    def body(rank: int) -> Callable[[], None]:
        def run() -> None:
            launch(simulation, memory, kernel, params, rank=rank, shape=shape)
            native.synchronize(simulation, rank, 0)

        return run

    errors = run_ranks(simulation, [body(rank) for rank in range(num_ranks)])
    return Run(memory, simulation.num_steps, simulation.time_ns, errors)


def run_on(machine: str, kernel: str, params: Sequence[int] = (), **options: Any) -> np.ndarray:
    """``machine``: "direct", or "seed N" for a simulated one with every whim on."""
    if machine == "direct":
        return run_direct(kernel, params, **options)
    return simulate(kernel, params, seed=int(machine.split()[1]), **options).check().memory
