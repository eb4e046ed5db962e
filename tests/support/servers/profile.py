"""What the time of vLLM's steps goes to, by its torch profiler: kernels of one rank by name."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import statistics
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Of the first steps of a load: later ones are as they are, and traces are large.
_NUM_STEPS = 150
_NUM_KERNELS = 25  # that are listed
_STEP = re.compile(r"execute_context_(\d+)\(\d+\)_generation_(\d+)\(\d+\)")


def vllm_options(folder: Path) -> dict[str, Any]:
    """Of vLLM's engine: traces go to ``folder``."""
    return dict(
        profiler_config=dict(
            profiler="torch", torch_profiler_dir=str(folder), torch_profiler_with_stack=False,
            torch_profiler_dump_cuda_time_total=False, ignore_frontend=True,
            max_iterations=_NUM_STEPS,
        )
    )  # fmt: skip


@contextlib.contextmanager
def running(port: int, name: str) -> Iterator[None]:
    """The profiler, whose files' names begin with ``name``. Raises OSError."""
    _post(port, "start_profile", dict(profile_prefix=name))
    try:
        yield
    finally:
        _post(port, "stop_profile", {})


def _post(port: int, path: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/{path}", json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    urllib.request.urlopen(request, timeout=120).close()


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    """What ``summary`` says of each rank's trace, by the files' names."""
    paths = sorted(folder.glob(f"{name}_*.json*"))
    return [dict(summary(_events(path)), file=path.name) for path in paths]


def _events(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]


def summary(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Steps by their requests, of prompts and of single tokens: from the host's begin of one to the
    next one's. Kernels: microseconds in all, and how many. busy: share of the time with a kernel.

    Launches of a kernel with other grids are apart: steps with prompts and steps of single tokens
    give the same kernels different work.
    """
    timed = [event for event in events if event.get("ph") == "X"]
    kernels = [one for one in timed if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    alike: dict[tuple[str, tuple[int, ...]], list[float]] = {}
    for one in kernels:
        grid = tuple(one.get("args", {}).get("grid", ()))
        alike.setdefault((one["name"], grid), []).append(one["dur"])
    begun = sorted(
        (one["ts"], found[1], found[2])
        for one in timed
        if one.get("cat") == "user_annotation" and (found := _STEP.match(one["name"]))
    )
    after: dict[str, list[float]] = {}
    for (at, prompts, single), (then, _, _) in zip(begun[:-1], begun[1:], strict=True):
        kind = f"{prompts} prompts, {single} single tokens"
        after.setdefault(kind, []).append((then - at) / 1e3)
    most = sorted(alike.items(), key=lambda item: -sum(item[1]))[:_NUM_KERNELS]
    return dict(
        steps={
            kind: dict(count=len(ms), median_ms=statistics.median(ms)) for kind, ms in after.items()
        },
        busy=_busy(kernels),
        kernels=[
            dict(
                name=name[:120],
                grid=list(grid),
                us=sum(us),
                count=len(us),
                median_us=statistics.median(us),
            )
            for (name, grid), us in most
        ],
    )


def _busy(kernels: list[dict[str, Any]]) -> float:
    """Share of the time from the first kernel to the last in which one ran."""
    spans = sorted((one["ts"], one["ts"] + one["dur"]) for one in kernels)
    if not spans:
        return 0.0
    covered, until = 0.0, spans[0][0]
    for start, end in spans:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered / (until - spans[0][0])
