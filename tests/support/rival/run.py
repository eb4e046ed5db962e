"""Runs a part: its program in processes of its own, over the drop-in."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from free_port import free_port

from deep_comm.compat.installer import NAME, SITE
from rival.files import V2, files_of
from rival.parts import Part

_HERE = Path(__file__).resolve().parent
# Folders with a sitecustomize.py, by device. With a GPU for each rank nothing is put in place.
_IN_TEST = {"cpu": _HERE / "on_host", "one-gpu": _HERE / "on_one_gpu"}


@dataclass(frozen=True)
class Verdict:
    seconds: float
    failure: str | None  # the end of what it printed


def make_site(folder: Path, site: Path) -> None:
    """The drop-in, with V2's helper modules beside it."""
    shutil.copytree(SITE / NAME, site / NAME, ignore=shutil.ignore_patterns("__pycache__"))
    helpers = files_of(V2, folder) / NAME / "utils"
    for file in helpers.iterdir():
        if file.suffix == ".py":
            shutil.copy(file, site / NAME / "utils" / file.name)


def _command(part: Part, folder: Path, device: str, num_ranks: int) -> list[str]:
    program = files_of(part.release, folder) / part.program
    flags = (*part.flags, *(part.small if device == "cpu" else ()))
    of_node = num_ranks // part.num_nodes
    return [sys.executable, str(program), "--num-processes", str(of_node), *flags]


def _variables(part: Part, site: Path, device: str, node: int, port: int) -> dict[str, str]:
    paths = [str(site)]
    if device in _IN_TEST:
        paths = [str(_IN_TEST[device]), *paths, str(_HERE.parent)]
    before = os.environ.get("PYTHONPATH")
    variables = {
        **os.environ,
        **dict(part.variables),
        "PYTHONPATH": os.pathsep.join([*paths, *([before] if before else [])]),
        "PYTHONUNBUFFERED": "1",
        # Their casts are compiled only to be fast.
        "TORCH_COMPILE_DISABLE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(part.num_nodes),
        "RANK": str(node),
    }
    if device == "cpu":
        variables.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    if part.num_nodes > 1:
        variables["DEEP_COMM_HOST_NAME"] = f"node-{node}"
    return variables


@contextlib.contextmanager
def _processes(
    part: Part, folder: Path, site: Path, device: str, num_ranks: int, log: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    port, started = free_port(), []
    try:
        with log.open("wb") as out:
            for node in range(part.num_nodes):
                started.append(
                    subprocess.Popen(
                        _command(part, folder, device, num_ranks),
                        env=_variables(part, site, device, node, port),
                        stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                    )
                )  # fmt: skip
        yield started
    finally:
        for process in started:
            # The ranks too: they are of the program's session.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(
    part: Part, folder: Path, site: Path, device: str, num_ranks: int, limit_s: float, log: Path
) -> Verdict:
    """A test without end is ended when it has come far enough. ``limit_s``: its most seconds."""
    line, wanted = part.endless or ("", 0)
    started = time.monotonic()
    with _processes(part, folder, site, device, num_ranks, log) as running:
        codes: list[int | None] = []
        is_far_enough = False
        while time.monotonic() - started < limit_s and not is_far_enough:
            codes = [process.poll() for process in running]
            if None not in codes or any(codes):
                break
            time.sleep(0.2)
            if part.endless is not None:
                is_far_enough = log.read_bytes().count(line.encode()) >= wanted
    seconds = time.monotonic() - started
    failure = None
    if any(codes):
        failure = f"ended with {codes}"
    elif part.endless is not None and not is_far_enough:
        failure = f"has printed {line!r} fewer than {wanted} times in {seconds:.0f} s"
    elif part.endless is None and None in codes:
        failure = f"had not ended after {limit_s:.0f} s"
    if failure is not None:
        printed = log.read_text(errors="replace").splitlines()
        failure = f"{part.name}, {num_ranks} ranks, {device}: {failure}\n" + "\n".join(
            printed[-60:]
        )
    return Verdict(seconds, failure)
