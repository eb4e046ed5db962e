"""What every run needs: the server's environment, processes that end, and what they leave behind.

A run leaves NAME.json, with `failure` if it failed, and its logs in the same folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from free_port import free_port

from servers.combinations import Row, variables
from servers.models import MODELS, write_model

IN_SERVER = Path(__file__).resolve().parent / "in_server"
SHARED_MEMORY = Path("/dev/shm")
TIME_IS_UP = 124  # exit status of `timeout`
_BUILT = re.compile(r"<Buffer: .* of deep_comm .* is built.*")


class Failed(Exception):
    """A run did not come to its end."""


@dataclass(frozen=True)
class Machine:
    """Where things are on the machine with GPUs."""

    models: Path
    out: Path
    paths: tuple[str, ...]  # of what is to be imported: the release, its packages, deep_ep
    hooks: tuple[str, ...] = ()
    device: str = "cuda"  # that makes models, and trains
    limit_s: float = (
        300.0  # of a process, and of a server's start; a server may live four times as long
    )
    repeats: int = 5  # of figures
    trace: bool = False  # figures of vLLM: also under its profiler
    steps: int = 300  # of training
    one_gpu: bool = False  # all ranks share it, and what NCCL would do goes through the host

    def has_model(self, name: str) -> bool:
        return (self.models / name / "config.json").exists()

    def model(self, name: str) -> Path:
        """Its folder; made when it is first asked for."""
        if not self.has_model(name):
            write_model(MODELS[name], self.models / name, self.device)
        return self.models / name


def file_name(row: Row) -> str:
    return row.name.replace("/", "-").replace(":", "-")


def environment(row: Row, machine: Machine) -> dict[str, str]:
    """Of the server's processes."""
    before = os.environ.get("PYTHONPATH")
    paths = [str(IN_SERVER), *machine.paths, *([before] if before else [])]
    quiet = dict.fromkeys(
        ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK",
         "DO_NOT_TRACK", "PYTHONUNBUFFERED"), "1",
    )  # fmt: skip
    # What a trimmed release lacks, and NVLink multicast, which hosts that are shared forbid.
    off = dict.fromkeys(
        ("NCCL_NVLS_ENABLE", "VLLM_ALLREDUCE_USE_FLASHINFER", "VLLM_ALLREDUCE_USE_SYMM_MEM",
         "VLLM_MOE_USE_DEEP_GEMM", "VLLM_USE_DEEP_GEMM", "VLLM_USE_FLASHINFER_SAMPLER",
         "VLLM_USE_NCCL_SYMM_MEM", "VLLM_USE_RUST_FRONTEND"), "0",
    )  # fmt: skip
    local = dict(
        VLLM_HOST_IP="127.0.0.1", VLLM_LOOPBACK_IP="127.0.0.1", GLOO_SOCKET_IFNAME="lo",
        NCCL_SOCKET_IFNAME="lo", NVSHMEM_DISABLE_NVLS="1", TOKENIZERS_PARALLELISM="false",
        TORCH_SYMM_MEM_DISABLE_MULTICAST="1", DEEP_COMM_LOG="info",
    )  # fmt: skip
    of_row = variables(row)
    is_native = bool({"native", "auto"} & set(row.options))
    watch = dict(
        SERVERS_COUNTS=str(_counts(row, machine)),
        SERVERS_HOOKS=" ".join(machine.hooks),
        SERVERS_WATCH="deep_comm.buffer" if is_native else "deep_ep",
        SERVERS_ONE_GPU=str(int(machine.one_gpu)),
        SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS=str(int(machine.one_gpu)),
    )
    return {
        **os.environ, **quiet, **off, **local, **watch, **of_row,
        "PYTHONPATH": os.pathsep.join(paths),
    }  # fmt: skip


# ---- processes -----------------------------------------------------------------------------------


_living: set[subprocess.Popen[bytes]] = set()
_is_stopped = threading.Event()


def stop() -> None:
    """End all that runs; nothing starts any more."""
    _is_stopped.set()
    for process in list(_living):
        _kill(process)


def is_stopped() -> bool:
    return _is_stopped.is_set()


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill it and what it has started: they are of its session."""
    _kill(process)
    process.wait()


@contextlib.contextmanager
def started(
    command: Sequence[str], env: dict[str, str], log: Path, limit_s: float
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own session that lives ``limit_s`` at most, whatever becomes of this one.
    Raises Failed after a ``stop``.
    """
    bounded = ["timeout", "--kill-after=10", str(limit_s), *command]
    with log.open("wb") as out:
        process = subprocess.Popen(
            bounded, env=env, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            cwd=log.parent, start_new_session=True,
        )  # fmt: skip
    _living.add(process)
    try:
        if is_stopped():
            raise Failed("stopped")
        yield process
    finally:
        end(process)
        _living.discard(process)


def tail(log: Path) -> str:
    said = log.read_text(errors="replace").splitlines()[-40:]
    return "\n".join([f"--- {log.name}", *(line[:400] for line in said)])


def run_to_end(
    commands: Sequence[tuple[Sequence[str], dict[str, str], Path]], limit_s: float
) -> None:
    """Run commands at the same time, each with environment and log. Raises Failed if one fails."""
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(started(command, env, log, limit_s))
            for command, env, log in commands
        ]
        codes: list[int | None] = [None]
        while None in codes and not any(codes):
            time.sleep(0.2)
            codes = [process.poll() for process in processes]
    if any(codes):
        logs = "\n".join(tail(log) for _, _, log in commands)
        raise Failed(f"processes ended with {codes} ({TIME_IS_UP}: the time was up)\n{logs}")


def run_ranks(
    row: Row, machine: Machine, program: str, jobs: Sequence[dict[str, Any]], **more: str
) -> tuple[list[dict[str, Any]], list[Path]]:
    """Run a program of in_server/ once per job, each a rank; what they wrote to their ``result``,
    and their logs. ``more``: environment variables. Raises Failed.
    """
    port, commands, results = free_port(), [], [Path(job["result"]) for job in jobs]
    for rank, (job, result) in enumerate(zip(jobs, results, strict=True)):
        result.unlink(missing_ok=True)
        path = result.with_suffix(".job")
        path.write_text(json.dumps(job))
        env = environment(row, machine) | dict(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(len(jobs)),
            LOCAL_WORLD_SIZE=str(len(jobs)), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **more,
        )  # fmt: skip
        command = python(str(IN_SERVER / program), str(path))
        commands.append((command, env, path.with_suffix(".log")))
    run_to_end(commands, machine.limit_s)
    return [json.loads(path.read_text()) for path in results], [log for _, _, log in commands]


# ---- what they leave -----------------------------------------------------------------------------


def segments() -> set[str]:
    """Shared memory of deep_comm on this machine."""
    return {path.name for path in SHARED_MEMORY.glob("deep_comm*")}


def device_mib() -> list[int]:
    """Memory in use of each GPU; none where there is none. Raises Failed."""
    if not torch.cuda.is_available():
        return []
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise Failed(f"nvidia-smi does not say what memory is in use: {error}") from error
    return [int(line) for line in done.stdout.split()]


@dataclass(frozen=True)
class Left:
    """What there was before a run."""

    segments: set[str]
    device_mib: list[int]

    @classmethod
    def now(cls) -> Left:
        return cls(segments(), device_mib())

    @classmethod
    def settled(cls, limit_s: float = 20.0) -> Left:
        """When nobody's memory of the GPUs comes or goes. Raises Failed after ``limit_s``."""
        deadline, now = time.monotonic() + limit_s, cls.now()
        while time.monotonic() < deadline:
            before = now
            time.sleep(1)
            now = cls.now()
            if before == now:
                return now
        raise Failed(f"other processes use these GPUs: {now.device_mib} MiB")

    def require_nothing_more(self, limit_s: float = 20.0) -> None:
        """Raises Failed if there is more than this ``limit_s`` after a kill."""
        deadline = time.monotonic() + limit_s
        while True:
            new = sorted(segments() - self.segments)
            more = [now - then for now, then in zip(device_mib(), self.device_mib, strict=True)]
            if not new and all(mib <= 64 for mib in more):
                return
            if time.monotonic() > deadline:
                raise Failed(f"left behind: shared memory {new}, MiB of the GPUs {more}")
            time.sleep(0.5)


def _counts(row: Row, machine: Machine) -> Path:
    return machine.out / f"{file_name(row)}.counts"


def forget_counts(row: Row, machine: Machine) -> None:
    """Of an earlier run."""
    shutil.rmtree(_counts(row, machine), ignore_errors=True)


def counted(row: Row, machine: Machine) -> list[dict[str, Any]]:
    """Calls of deep_ep or deep_comm, by process."""
    found = sorted(_counts(row, machine).glob("*.json"))
    return [json.loads(path.read_text()) for path in found]


def built(logs: Sequence[Path]) -> list[str]:
    """deep_comm's own lines about its Buffers."""
    return [
        found[0] for log in logs for line in log.read_text(errors="replace").splitlines()
        if (found := _BUILT.search(line))
    ]  # fmt: skip


def has_run(row: Row, machine: Machine) -> bool:
    """Whether an earlier run left a result, which a skipped one must not replace."""
    result = kept(row, machine)
    return bool(result) and "skipped" not in result


def kept(row: Row, machine: Machine) -> dict[str, Any]:
    """The row's result so far; empty without one."""
    path = machine.out / f"{file_name(row)}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def keep(row: Row, machine: Machine, result: dict[str, Any]) -> None:
    path = machine.out / f"{file_name(row)}.json"
    path.write_text(json.dumps(result | dict(name=row.name)))


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]
