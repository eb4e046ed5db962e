"""Runs programs on ranks of their own."""

from __future__ import annotations

import contextlib
import importlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deep_comm import processes
from deep_comm.errors import PeerTimeout
from released import fetch, host, package
from released.program import Checks, Program

# In the order of the table.
_MODULES = (
    "vllm_v1", "vllm_v2", "vllm_dbo", "vllm_faults", "vllm_graphs", "sglang_v1", "sglang_v2",
    "sglang_graphs", "megatron", "torchtitan", "lmdeploy", "native",
)  # fmt: skip


def programs() -> list[Program]:
    found = []
    for name in _MODULES:
        found += importlib.import_module(f"released.{name}").PROGRAMS
    return found


@dataclass(frozen=True)
class Verdict:
    program: Program
    num_ranks: int
    num_compared: int  # by all ranks
    seconds: float
    failure: str  # empty if there was none; else what each rank raised


def _on_rank(group: Any, name: str, folder: str) -> int:
    """On every rank: comparisons made. Raises what the program raises."""
    import drop_in

    program = next(one for one in programs() if one.name == name)
    files = fetch.files_of(program.release, Path(folder))
    package.install(program.release.package, files, program.stand_ins())
    checks = Checks()
    on_host = drop_in.device().type == "cpu"
    with host.cuda_means_host() if on_host else contextlib.nullcontext():
        program.run(group, checks)
    return checks.num_compared


def run(
    pool: processes.Pool,
    program: Program,
    num_ranks: int,
    folder: Path,
    device: str,
    timeout_s: float = 100.0,
) -> Verdict:
    """``program`` on ``num_ranks`` processes: of the host target ("cpu") or a GPU each."""
    variables = dict(program.variables)
    if device == "cpu":
        variables["DEEP_COMM_DEVICE"] = "cpu"
    began = time.monotonic()
    ended = pool.outcomes(
        _on_rank, num_ranks, program.name, str(folder),
        backend="gloo" if device == "cpu" else program.backend,
        devices=None if device == "cpu" else range(num_ranks),
        variables=variables, timeout_s=timeout_s,
    )  # fmt: skip
    # Ranks that only waited for another say little.
    failed = sorted(
        (one for one in ended if one.error), key=lambda one: isinstance(one.error, PeerTimeout)
    )
    failures = [f"rank {one.rank}: {one.error!r}" for one in failed]
    failures += [one.traceback for one in failed[:1]]
    if failed or program.leaves_traces:
        pool.restart()
    num_compared = sum(one.value for one in ended if one.error is None)
    return Verdict(program, num_ranks, num_compared, time.monotonic() - began, "\n".join(failures))
