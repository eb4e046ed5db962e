"""The pytest plugin of tools/mutate: runs suites on a simulated machine with one site weakened.

It does as the JSON file named by MUTATE_JOB says, beside other processes with the same job:

* ``{"reached": [test, ...]}``: runs all other tests as they are and notes which sites each of them
  reaches;
* ``{"mutants": [...]}``: runs, for each mutant, the tests that reach its site, in a child process
  each, until one fails.

The processes take one item after the other (``queue``: a file with the number of the next) until
the time ``end``. Every result is a line of JSON in the file that the job names as ``results``.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from _pytest.runner import runtestprotocol

SEED_STEP = 1_000_003
Item = TypeVar("Item")


class Machines:
    """Makes the simulations of the tests, and changes them as the job asks."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.seed_offset = 0
        self.made: list[Any] = []
        self.has_faults = False

    def install(self) -> None:
        from deep_comm import simulate

        original = simulate.Simulation

        def make(**options: Any) -> Any:
            self.has_faults = self.has_faults or bool(options.get("faults"))
            options["seed"] += self.seed_offset
            machine = original(**{**options, **self.options})
            self.made.append(machine)
            return machine

        simulate.Simulation = make  # type: ignore[assignment,misc]


def failure_of(item: pytest.Item) -> str | None:
    """Runs one test; why it failed, in a line, or None."""
    for report in runtestprotocol(item, log=False, nextitem=None):
        if report.failed:
            lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
            return (lines[0][1:].strip() if lines else report.when)[:160]
    return None


class Mutation:
    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.machines = Machines()
        self.results = Path(job["results"])

    def write(self, **result: Any) -> None:
        with self.results.open("a") as file:
            file.write(json.dumps(result) + "\n")

    def take(self, items: Sequence[Item]) -> Iterator[Item]:
        """Those that no other process of the job has taken."""
        while time.time() < self.job["end"]:
            with open(self.job["queue"], "r+") as queue:
                fcntl.flock(queue, fcntl.LOCK_EX)
                index = int(queue.read())
                queue.seek(0)
                queue.write(str(index + 1))
            if index >= len(items):
                return
            yield items[index]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.machines.install()
        if "mutants" in self.job:
            self.run_mutants({item.nodeid: item for item in session.items})
        else:
            self.note_reach(session.items)
        return True

    def note_reach(self, items: list[pytest.Item]) -> None:
        reached = set(self.job["reached"])
        self.machines.options = {"note_sites": True, "find_races": True}
        for item in self.take([item for item in items if item.nodeid not in reached]):
            self.machines.made.clear()
            self.machines.has_faults = False
            begin = time.monotonic()
            failure = failure_of(item)
            sites = {site for machine in self.machines.made for site in machine.visited_sites()}
            self.write(
                test=item.nodeid,
                seconds=round(time.monotonic() - begin, 2),
                sites=[] if self.machines.has_faults else sorted(sites),
                failure=failure,
            )

    def run_mutants(self, items: dict[str, pytest.Item]) -> None:
        for mutant in self.take(self.job["mutants"]):
            tests = [test for test in mutant["tests"] if test in items]
            read, write = os.pipe()
            begin = time.monotonic()
            child = os.fork()
            if child == 0:
                os.close(read)
                found: dict[str, Any] = {"verdict": "error", "by": "the child ended"}
                try:
                    found = self.run_mutant(mutant, [items[test] for test in tests])
                finally:
                    os.write(write, json.dumps(found).encode())
                    os._exit(0)
            os.close(write)
            with os.fdopen(read, "rb") as pipe:
                answer = pipe.read()
            os.waitpid(child, 0)
            found = json.loads(answer) if answer else {"verdict": "found", "by": "crash"}
            if not found:
                return
            self.write(
                site=mutant["site"],
                how=mutant["how"],
                seconds=round(time.monotonic() - begin, 1),
                num_tests=len(tests),
                **found,
            )

    def run_mutant(self, mutant: dict[str, Any], items: list[pytest.Item]) -> dict[str, Any]:
        """The verdict, or nothing if the job's time ended before."""
        sys.stdout.flush()
        weaken = f"{mutant['site']}:{mutant['how']}"
        end = time.time() + self.job["seconds_per_mutant"]
        num_runs = 0
        for round_idx in range(self.job["rounds"]):
            self.machines.seed_offset = round_idx * SEED_STEP
            for item in items:
                if time.time() > self.job["end"]:
                    return {}
                if time.time() > end:
                    return {"verdict": "survived", "by": f"{num_runs} runs, out of time"}
                self.machines.options = {"weaken": weaken, "find_races": mutant["find_races"]}
                failure = failure_of(item)
                num_runs += 1
                if failure is None:
                    continue
                self.machines.options = {"find_races": mutant["find_races"]}
                if round_idx > 0 and failure_of(item) is not None:
                    continue  # these seeds do not suit that test
                by = item.nodeid if round_idx == 0 else f"{item.nodeid} seeds +{round_idx}"
                return {"verdict": "found", "by": by, "failure": failure}
        return {"verdict": "survived", "by": f"{num_runs} runs"}


def pytest_configure(config: pytest.Config) -> None:
    job = json.loads(Path(os.environ["MUTATE_JOB"]).read_text())
    config.pluginmanager.register(Mutation(job), "mutation_of_a_job")
