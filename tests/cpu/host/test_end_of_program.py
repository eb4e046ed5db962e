"""Programs end cleanly: no Buffer keeps the threads of a process group alive into the interpreter's
own end, where one of them that needs the GIL aborts the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, glob, time

def is_group_thread(file):
    # pt_gloo_runloop: frees tensors of collectives, under the GIL.
    try:
        return "runloop" in open(file).read()
    except OSError:  # has ended
        return False

def num_group_threads():
    return sum(map(is_group_thread, glob.glob("/proc/self/task/*/comm")))

def num_left():
    # A thread that has been joined stays in /proc until the kernel has done with it.
    deadline = time.monotonic() + 20
    while num_group_threads() > 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    return num_group_threads()

@atexit.register  # before torch and deep_comm are imported: runs after what they have registered
def report():
    print("at exit", num_left())

import torch
import torch.distributed as dist
import deep_comm

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
{body}
"""

BUILD = {
    "Buffer": "made = deep_comm.Buffer(dist.group.WORLD, 1 << 20, device='cpu')",
    "ExpertParallel": (
        "made = deep_comm.ExpertParallel(dist.group.WORLD, hidden=64, num_experts=2, num_topk=1, "
        "max_tokens=4, device='cpu')"
    ),
    "deep_ep.ElasticBuffer": (
        "from deep_comm.compat.elastic import ElasticBuffer\n"
        "made = ElasticBuffer(dist.group.WORLD, 64 << 20)"
    ),
}


def run(body: str, tmp_path: Path) -> list[str]:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(body=body))
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("what", sorted(BUILD))
def test_a_destroyed_one_does_not_hold_its_group(what: str, tmp_path: Path) -> None:
    body = f"{BUILD[what]}\nprint('alive', num_group_threads() > 0)\nmade.destroy()\n"
    body += "dist.destroy_process_group()\nprint('destroyed', num_left())"
    assert run(body, tmp_path) == ["alive True", "destroyed 0", "at exit 0"]


@pytest.mark.parametrize("what", sorted(BUILD))
def test_one_that_is_left_lets_go_of_its_group_at_exit(what: str, tmp_path: Path) -> None:
    body = f"{BUILD[what]}\ndist.destroy_process_group()\nprint('left', num_group_threads() > 0)"
    assert run(body, tmp_path) == ["left True", "at exit 0"]
