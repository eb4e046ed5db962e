"""Shared memory segments: private, sized exactly, never a SIGBUS, and cleaned up after a crash."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deep_comm import _core

SHM = Path("/dev/shm")


def file_of(name: str) -> Path:
    assert name.startswith("/")
    return SHM / name[1:]


def peek(address: int, num_bytes: int) -> bytes:
    return ctypes.string_at(address, num_bytes)


def run_python(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


CREATE_AND_WAIT = """
from deep_comm import _core
segment = _core.Segment.create(8192)
print(segment.name, flush=True)
input()
"""


@pytest.fixture
def segment() -> Iterator[_core.Segment]:
    segment = _core.Segment.create(10_000)
    yield segment
    segment.close()
    segment.unlink()


def removed_now(path: Path) -> list[str]:
    """What this process removes when ``path`` is left over; that one is gone then.

    Every Buffer of processes removes what is left over, on the whole machine: where another one was
    first, the file is left there once more.
    """
    for _ in range(100):
        removed = _core.remove_stale_segments()
        assert not path.exists()
        if f"/{path.name}" in removed:
            break
        path.write_bytes(b"x")
    return removed


def start_time(pid: int) -> str:
    text = Path(f"/proc/{pid}/stat").read_text()
    return text[text.rindex(")") + 2 :].split()[19]


def test_a_segment_is_zeroed_private_and_names_its_creator(segment: _core.Segment) -> None:
    assert segment.num_bytes == 10_000
    assert segment.address % 4096 == 0
    assert peek(segment.address, 10_000) == bytes(10_000)
    owner = f"{os.geteuid()}.{os.getpid()}.{start_time(os.getpid())}"
    assert re.fullmatch(rf"/deep_comm\.{re.escape(owner)}\.[0-9a-f]{{32}}", segment.name)
    status = file_of(segment.name).stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == os.geteuid()
    assert status.st_size == 10_000
    assert status.st_blocks * 512 >= 10_000, "the pages are reserved, not only promised"


def test_names_do_not_repeat() -> None:
    names = {_core.Segment.create(4096).name for _ in range(20)}
    assert len(names) == 20
    assert not any(file_of(name).exists() for name in names)


def test_what_one_mapping_writes_the_other_reads(segment: _core.Segment) -> None:
    other = _core.Segment.attach(segment.name, 10_000)
    assert other.address != segment.address
    ctypes.memset(segment.address + 9_990, 0xAB, 10)
    assert peek(other.address + 9_990, 10) == b"\xab" * 10
    other.close()
    assert file_of(segment.name).exists(), "who attached does not own the name"


def test_unlink_removes_the_name_and_keeps_the_memory(segment: _core.Segment) -> None:
    other = _core.Segment.attach(segment.name, 10_000)
    segment.unlink()
    segment.unlink()
    assert not file_of(segment.name).exists()
    ctypes.memset(segment.address, 1, 1)
    assert peek(other.address, 1) == b"\x01"
    with pytest.raises(FileNotFoundError, match=re.escape(segment.name)):
        _core.Segment.attach(segment.name, 10_000)


def test_close_is_idempotent(segment: _core.Segment) -> None:
    segment.close()
    segment.close()
    assert segment.address == 0


def test_attach_demands_the_agreed_size(segment: _core.Segment) -> None:
    with pytest.raises(RuntimeError, match="has 10000 bytes, expected 20000"):
        _core.Segment.attach(segment.name, 20_000)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_attach_refuses_the_segment_of_another_user(segment: _core.Segment) -> None:
    os.chown(file_of(segment.name), 12345, -1)
    with pytest.raises(RuntimeError, match="belongs to user 12345"):
        _core.Segment.attach(segment.name, 10_000)


@pytest.mark.parametrize("num_bytes", [0, 2**63])
def test_impossible_sizes_are_refused(num_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"num_bytes is {num_bytes}"):
        _core.Segment.create(num_bytes)
    with pytest.raises(ValueError, match=f"num_bytes is {num_bytes}"):
        _core.allocate(num_bytes)


def test_a_full_shared_memory_is_an_error_with_numbers_and_leaves_nothing() -> None:
    before = set(SHM.iterdir())
    room = os.statvfs(SHM)
    num_bytes = room.f_blocks * room.f_frsize + 4096
    with pytest.raises(RuntimeError, match=rf"{num_bytes} bytes needed, \d+ available"):
        _core.Segment.create(num_bytes)
    mine = f"deep_comm.{os.geteuid()}.{os.getpid()}."
    assert not [path for path in set(SHM.iterdir()) - before if path.name.startswith(mine)]


def test_a_lost_segment_removes_its_name(segment: _core.Segment) -> None:
    lost = _core.Segment.create(4096)
    path = file_of(lost.name)
    assert path.exists()
    del lost
    assert not path.exists()


def test_a_forked_child_that_ends_leaves_the_name_to_its_parent(segment: _core.Segment) -> None:
    # In a process of its own: forking this one would copy pytest's threads' locks.
    code = """
import os, sys
from deep_comm import _core
segment = _core.Segment.create(4096)
pid = os.fork()
if pid == 0:
    sys.exit(0)  # runs the destructors
os.waitpid(pid, 0)
print(os.path.exists("/dev/shm" + segment.name))
name = segment.name
del segment
print(os.path.exists("/dev/shm" + name))
"""
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert output.split() == ["True", "False"]


def test_a_crashed_process_leaves_a_segment_that_the_next_run_removes() -> None:
    process = run_python(CREATE_AND_WAIT)
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    assert name not in _core.remove_stale_segments(), "its creator lives"
    assert file_of(name).exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert name in removed_now(file_of(name))


def plant(name: str) -> Path:
    path = SHM / name
    path.write_bytes(b"x")
    return path


def test_only_left_over_segments_of_this_user_are_removed(segment: _core.Segment) -> None:
    uid, pid, suffix = os.geteuid(), os.getpid(), "0" * 32
    # A pid that was given to this process since: same pid, another start.
    reused = plant(f"deep_comm.{uid}.{pid}.1.{suffix}")
    kept = [
        file_of(segment.name),
        plant(f"deep_comm.{uid + 1}.{pid}.1.{suffix}"),  # says that it is another user's
        plant(f"deep_comm.{uid}.{pid}.x.{suffix}"),  # not a name of ours
        plant(f"deep_comm.{uid}.{suffix}"),
        plant(f"deep_comm_other.{uid}.{pid}.1.{suffix}"),
    ]
    try:
        assert f"/{reused.name}" in removed_now(reused)
        assert all(path.exists() for path in kept)
    finally:
        for path in kept[1:]:
            path.unlink(missing_ok=True)
        reused.unlink(missing_ok=True)


def test_a_living_creator_in_another_pid_namespace_keeps_its_segment() -> None:
    # Its pid there means nothing here; its lock on the segment still shows that it lives.
    process = run_python(CREATE_AND_WAIT)
    assert process.stdout is not None and process.stdin is not None
    path = file_of(process.stdout.readline().strip())
    uid, pid, start, suffix = path.name.removeprefix("deep_comm.").split(".")
    foreign = path.with_name(f"deep_comm.{uid}.{pid}.{int(start) + 1}.{suffix}")
    path.rename(foreign)
    try:
        assert f"/{foreign.name}" not in _core.remove_stale_segments()
        process.kill()
        process.wait()
        assert f"/{foreign.name}" in removed_now(foreign)
    finally:
        foreign.unlink(missing_ok=True)
        process.stdout.close()
        process.stdin.close()


SWEEP = """
from deep_comm import _core
print("begun", flush=True)
while True:
    for name in _core.remove_stale_segments():
        print(name, flush=True)
"""


def test_a_segment_in_the_making_is_not_swept_from_another_pid_namespace() -> None:
    """Its pages take a while, and until it has a lock its creator looks dead from there."""
    unshared = ["unshare", "--pid", "--kill-child", "--mount-proc", sys.executable, "-c", SWEEP]
    with subprocess.Popen(unshared, stdout=subprocess.PIPE, text=True) as sweeper:
        try:
            assert sweeper.stdout is not None
            if sweeper.stdout.readline() != "begun\n":
                pytest.skip("this user may not make pid namespaces")
            for _ in range(3):
                segment = _core.Segment.create(64 << 20)
                _core.Segment.attach(segment.name, segment.num_bytes).close()
                segment.unlink()
                segment.close()
        finally:
            sweeper.kill()


def test_allocate_is_zeroed_and_aligned() -> None:
    for num_bytes in (1, 4096, 100_001):
        address = _core.allocate(num_bytes)
        assert address % 4096 == 0
        assert peek(address, num_bytes) == bytes(num_bytes)
        ctypes.memset(address, 0xFF, num_bytes)
        _core.free(address)
    _core.free(0)
