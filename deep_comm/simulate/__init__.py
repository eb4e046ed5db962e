"""Deterministic simulation: all ranks of a job in this process, under one seeded scheduler.

The kernels are the real ones. The scheduler permutes their threads, holds back stores that are not
releases, lets loads return what was there before, completes bulk copies late and stalls ranks, all
from a seed: equal seeds give equal runs.
A run without progress raises SimulationStuck, which lists every waiting thread::

    def rank_main(group):
        buffer = deep_comm.Buffer(group, num_nvl_bytes=1 << 20, device="cpu")
        ...

    results = deep_comm.simulate.run(rank_main, num_ranks=4, seed=17)

``deep_comm simulate --seed 17 --ranks 4`` replays dispatch and combine of a random
routing.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from deep_comm._core import MachineError, Simulation, SimulationStuck
from deep_comm.local import check_num_ranks, run_threads
from deep_comm.settings import integers

__all__ = [
    "MachineError",
    "SimulatedGroup",
    "Simulation",
    "SimulationResults",
    "SimulationStuck",
    "run",
]


class SimulatedGroup:
    """All ranks of a simulation, as one of them sees it. Exchanges go through the scheduler."""

    in_process = True

    def __init__(self, simulation: Simulation, rank: int, num_ranks: int) -> None:
        self.simulation = simulation
        self._rank = rank
        self._num_ranks = num_ranks

    def rank(self) -> int:
        """This rank's number."""
        return self._rank

    def size(self) -> int:
        """Ranks of the simulation."""
        return self._num_ranks

    def all_gather_object(self, payload: Any) -> list[Any]:
        """Every rank's object, by rank. Raises SimulationStuck if a rank can no longer come."""
        gathered = self.simulation.exchange(self._rank, pickle.dumps(payload))
        return [pickle.loads(item) for item in gathered]

    def barrier(self) -> None:
        """Wait for all ranks. Raises SimulationStuck as all_gather_object does."""
        self.all_gather_object(None)

    def kill(self) -> None:
        """Stop this rank's kernels where they are, as if its process had been killed."""
        self.simulation.kill(self._rank)


LARGEST_SEED = 2**64 - 1


class SimulationResults(list[Any]):
    """The ranks' results, with what the scheduler counted.

    ``visited_sites``: of a run with ``weaken``, the places in the kernels that order something and
    that a thread came to, "file:line:op".
    """

    def __init__(self, results: list[Any], seed: int, simulation: Simulation) -> None:
        super().__init__(results)
        self.seed = seed
        self.num_steps = simulation.num_steps
        self.time_ns = simulation.time_ns
        self.visited_sites = simulation.visited_sites()


def run(
    fn: Callable[[SimulatedGroup], Any],
    num_ranks: int,
    seed: int,
    policy: str = "any",
    weak_memory: bool = True,
    delay_bulk: bool = True,
    faults: Sequence[str] = (),
    stalls: Sequence[tuple[int, int, int]] = (),
    on_stuck: str = "report",
    *,
    collectives_order_memory: bool = False,
    find_races: bool = False,
    weaken: str = "",
    timeout_s: float = 300.0,
    return_errors: bool = False,
) -> SimulationResults:
    """Call ``fn(group)`` for every rank of one simulation; returns the results by rank.

    Args:
        seed: decides every choice of the scheduler.
        policy: "random", "fifo", "lifo", "starve", "priority", or "any": the seed picks one.
        weak_memory: hold back stores that are not releases, and let loads that nothing orders
            return what was there before.
        delay_bulk: complete bulk copies late.
        faults: protocol parts to break on purpose, e.g. "weaken_release", "skip_credit".
        stalls: (rank, after step, for so many steps); 0 steps: for ever.
        on_stuck: "report" raises SimulationStuck; "clock" jumps to the next deadline, so that
            kernels time out as they would in life.
        collectives_order_memory: shuffles and votes order memory as sync_warp does. GPUs do this,
            PTX does not promise it.
        find_races: an access to shared memory that nothing orders is an error. A ValueError unless
            the build has DEEP_COMM_FIND_RACES=ON.
        weaken: a place in the kernels whose order is left out, "file:line:op:relaxed", or reaches
            less far, "file:line:op:narrow". See tools/mutate. A place that no thread comes to
            changes nothing: look at the results' ``visited_sites``.
        timeout_s: real time after which ranks still running are given up.
        return_errors: put exceptions into the list instead of raising the root cause.
    """
    check_num_ranks(num_ranks)
    simulation = Simulation(
        num_ranks=num_ranks,
        seed=integers.require("seed", seed, 0, LARGEST_SEED),
        policy=policy,
        weak_memory=weak_memory,
        delay_bulk=delay_bulk,
        faults=list(faults),
        stalls=list(stalls),
        on_stuck=on_stuck,
        collectives_order_memory=collectives_order_memory,
        find_races=find_races,
        weaken=weaken,
    )
    results = run_threads(
        lambda rank: fn(SimulatedGroup(simulation, rank, num_ranks)),
        num_ranks,
        on_exit=simulation.leave,
        timeout_s=timeout_s,
        return_errors=return_errors,
    )
    return SimulationResults(results, seed, simulation)
