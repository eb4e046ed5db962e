"""A program may end right after a rendezvous: threads of gloo, which let go of a collective's
tensors later than it returns, never have one to free."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

from deep_comm.ranks import rendezvous

PROGRAM = """
import gc, os, sys
import torch.distributed as dist
import deep_comm.ranks.rendezvous

gc.freeze()  # ranks need not look at, and so copy, what the imports have made
NUM_RANKS, NUM_RUNS = 4, 4
for run in range(NUM_RUNS):
    ranks = []
    for rank in range(NUM_RANKS):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            break
    else:
        print(*[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks], flush=True)
        continue
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/{run}", rank=rank,
                            world_size=NUM_RANKS)
    # Threads of gloo get behind: one processor, and every other thread goes first; what they must
    # have the GIL for waits until the end.
    processor = min(os.sched_getaffinity(0))
    for thread in map(int, os.listdir("/proc/self/task")):
        os.sched_setaffinity(thread, {processor})
        if thread != os.getpid():
            os.setpriority(os.PRIO_PROCESS, thread, 19)
    sys.setswitchinterval(1.0)
    BODY
    break
"""


@pytest.mark.parametrize(
    "body",
    [
        "deep_comm.Buffer(dist.group.WORLD, 1 << 20, device='cpu').destroy()",
        "deep_comm.ranks.rendezvous.all_gather_object(dist.group.WORLD, rank)",
    ],
)
def test_a_program_may_end_right_after_a_rendezvous(body: str, tmp_path: Path) -> None:
    """With torch.distributed.all_gather_object instead, ranks abort: a third of them on two idle
    cores (torch 2.13), fewer on busy ones."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("BODY", body)], cwd=tmp_path, text=True,
        capture_output=True, timeout=200, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout.splitlines() == ["0 0 0 0"] * 4, done.stdout + done.stderr


class Seen:
    """A process group, and the tensors that its collectives were given."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.given: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def allgather(self, out: list[list[torch.Tensor]], own: list[torch.Tensor]) -> Any:
        self.given.extend([*out[0], *own])
        return self._group.allgather(out, own)


def _tensors_that_stay(group: Any) -> tuple[list[object], list[bool]]:
    """(what was gathered, of each tensor that a collective was given: does a view hold it?)"""
    seen = Seen(group)
    with torch.inference_mode():
        payload = {"rank": group.rank(), "more": "x" * 9 * group.rank()}
        gathered = rendezvous.all_gather_object(seen, payload)
    bases = {id(view._base) for tensors in rendezvous._kept for _, view in tensors}
    return gathered, [id(tensor) in bases for tensor in seen.given]


def test_tensors_of_a_rendezvous_stay() -> None:
    for gathered, is_held in forked.run(_tensors_that_stay, 3):
        assert gathered == [{"rank": rank, "more": "x" * 9 * rank} for rank in range(3)]
        assert is_held == [True] * 8  # two collectives of three rows and an own one
