"""A kernel that breaks a rule of the machine ends in an error that says which, who and where."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from simt_machine import Shape, native, run_direct, simulate

CASES = [
    ("mask_without_caller", [], 32, r"warp 0 lane 3: sync_warp with mask 0x00000001: .*lacks"),
    ("different_masks", [], 32, r"diverged: calls sync_warp .*wait for it in sync_warp"),
    ("different_operations", [], 32, r"diverged: calls (any|ballot) .* in (any|ballot)"),
    ("mask_of_exited_lane", [], 32, r"sync_warp with mask .*0x00000001, which have exited"),
    ("exit_while_waited_for", [], 32, r"lane 31: exits while lanes .* wait|have exited"),
    ("barrier_counts", [], 96, r"sync_named\(1, (64|96)\): others use this barrier with"),
    ("barrier_of_roles", [], 64, r"sync_block at .*kernels.cpp:\d+: others .*kernels.cpp:\d+;"),
    ("barrier_id", [0], 32, r"sync_named\(0, 32\): a named barrier is 1 to 15"),
    ("barrier_id", [16], 32, r"sync_named\(16, 32\): a named barrier is 1 to 15"),
    ("barrier_multiple", [], 64, r"sync_named\(2, 33\): .*multiple of 32"),
    ("trapped", [], 64, r"kernel 'trapped' rank 0 block 1 warp 1 lane 5: trap: a broken invariant"),
    ("thrown", [], 32, r"lane 1: exception in a kernel: no kernel throws"),
    ("smem_overrun", [1024], 32, r"written behind its 1024 bytes of shared memory \(offset 1024\)"),
    ("smem_overrun", [1087], 32, r"offset 1087"),
]


@pytest.mark.parametrize("machine", ["direct", "fifo", "lifo", "random"])
@pytest.mark.parametrize("kernel, params, num_threads, message", CASES)
def test_broken_rules_are_named(
    kernel: str, params: list[int], num_threads: int, message: str, machine: str
) -> None:
    shape = Shape(2, num_threads)
    with pytest.raises(native.MachineError, match=message) as raised:
        if machine == "direct":
            run_direct(kernel, params, shape=shape)
        else:
            simulate(kernel, params, shape=shape, policy=machine).check()
    assert f"kernel '{kernel}' rank 0 block" in str(raised.value)
    assert not isinstance(raised.value, native.SimulationStuck)


@pytest.mark.parametrize("machine", ["direct", "fifo", "lifo", "random"])
def test_roles_may_meet_at_a_barrier_of_their_own(machine: str) -> None:
    if machine == "direct":
        run_direct("roles_that_meet", [], shape=Shape(2, 96))
    else:
        simulate("roles_that_meet", [], shape=Shape(2, 96), policy=machine).check()


STUCK = [
    ("barrier_never", 64, [r"warp 0 lanes 0-31: at sync_named\(4\) \(32 of 64 threads"]),
    (
        "collective_never",
        32,
        [
            r"lanes 0-15: at sync_warp, waits for lanes 16-31",
            r"lanes 16-31: at sync_block \(16 of 32 threads",
        ],
    ),
]


@pytest.mark.parametrize("kernel, num_threads, messages", STUCK)
def test_a_barrier_that_can_never_complete_is_found_at_once(
    kernel: str, num_threads: int, messages: list[str]
) -> None:
    for message in messages:
        with pytest.raises(native.MachineError, match=message):
            run_direct(kernel, shape=Shape(1, num_threads))
        with pytest.raises(native.SimulationStuck, match=message):
            simulate(kernel, shape=Shape(1, num_threads)).check()


def test_the_machine_works_after_an_error() -> None:
    for _ in range(3):
        with pytest.raises(native.MachineError):
            run_direct("trapped", shape=Shape(2, 64))
        assert run_direct("block_rounds", [3], shape=Shape(2, 64))[0] == 0


def test_misaligned_accesses_are_found() -> None:
    with pytest.raises(native.MachineError, match="misaligned access of 8 bytes"):
        simulate("misaligned_store", shape=Shape(1, 1)).check()


def run_apart(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own, away from the checkout, whose package has no native modules."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, text=True, cwd=folder
    )


def test_an_overflowing_stack_ends_at_its_guard_page(tmp_path: Path) -> None:
    code = (
        "import numpy, deep_comm._simt_tests as native\n"
        "native.run(memory=numpy.zeros(64, dtype=numpy.uint64), kernel='stack_overflow', rank=0,"
        " num_blocks=1, num_threads=32, smem_bytes=0, params=[])\n"
    )
    result = run_apart(code, tmp_path)
    assert result.returncode < 0, result


def test_stacks_are_aligned_as_after_a_call() -> None:
    memory = run_direct("stack_alignment", shape=Shape(2, 64))
    assert memory[:64].tolist() == [1] * 64


def test_deep_stacks_fit() -> None:
    memory = run_direct("deep_stack", shape=Shape(1, 64, 0))
    assert memory[:64].tolist() == [3] * 64


def test_without_guard_pages_a_canary_finds_the_overflow(tmp_path: Path) -> None:
    code = (
        "import numpy, deep_comm._simt_tests as native\n"
        "native.refuse_guard_pages(True)\n"
        "run = lambda kernel: native.run(memory=numpy.zeros(64, dtype=numpy.uint64), kernel=kernel,"
        " rank=0, num_blocks=1, num_threads=8, smem_bytes=0, params=[])\n"
        "run('deep_stack')\n"
        "try:\n"
        "    run('nearly_overflow')\n"
        "except native.MachineError as error:\n"
        "    print(error)\n"
    )
    result = run_apart(code, tmp_path)
    assert "stack overflow: a thread has 65536 bytes of stack" in result.stdout, result
