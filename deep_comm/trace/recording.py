"""The notes of one rank, and the file that they are kept in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from deep_comm import _core
from deep_comm.errors import ArgumentError

_FORMAT = 1
TIMED_OUT = "timeout-"
"""Begins the names of files that were written when a call timed out."""


class Event(NamedTuple):
    """A block has passed a step.

    ``call`` counts the kernels of a group that talk to peers (low latency: its calls of this
    kernel), alike on all ranks. ``value`` depends on the step: csrc/device/layout/trace.cuh.
    """

    kernel: str
    call: int
    block: int
    step: str
    time_ns: int  # by the device's clock
    value: int


@dataclass(frozen=True)
class Recording:
    """What one rank of one Buffer has noted; events by time."""

    rank: int
    num_ranks: int
    buffer: str  # the same on all ranks
    clock: str  # equal where ranks read one clock
    events: Sequence[Event]

    def save(self, path: str | Path) -> Path:
        """As JSON, for ``deep_comm trace``; folders are made."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"deep_comm_trace": _FORMAT, **vars(self)}, separators=(",", ":"))
        path.write_text(text)
        return path

    @property
    def calls(self) -> list[tuple[str, int]]:
        """Kernel and number of each call, in the order in which they began."""
        return list(dict.fromkeys((event.kernel, event.call) for event in self.events))

    def of_call(self, kernel: str, call: int) -> list[Event]:
        """By time."""
        return [event for event in self.events if (event.kernel, event.call) == (kernel, call)]


_OF_EVENT = (str, int, int, str, int, int)
_OF_RECORDING = {"rank": int, "num_ranks": int, "buffer": str, "clock": str}


def _read(path: Path, *, is_named: bool) -> Recording | None:
    """None: what ``deep_comm trace -o`` wrote, among the files of a folder."""
    try:
        fields = json.loads(path.read_text())
        if "traceEvents" in fields and not is_named:
            return None
        if fields.pop("deep_comm_trace") != _FORMAT:
            raise KeyError("deep_comm_trace")
        events = [Event(*event) for event in fields.pop("events")]
        recording = Recording(**fields, events=events)
        for name, kind in _OF_RECORDING.items():
            _require_kind(name, fields[name], kind)
        for event in events:
            for name, value, kind in zip(Event._fields, event, _OF_EVENT, strict=True):
                _require_kind(name, value, kind)
            if event.step not in _core.trace_steps:
                raise ValueError(f"no step {event.step!r}")
            if event.step == "gave_up":
                _core.trace_wait(event.value)
        return recording
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        rule = "must be a trace that a Buffer left in DEEP_COMM_TRACE_DIR"
        raise ArgumentError("file", str(path), rule) from error


def _require_kind(name: str, value: Any, kind: type) -> None:
    if type(value) is not kind or (isinstance(value, int) and not 0 <= value < 1 << 64):
        raise TypeError(f"{name} is {value!r}")


def load(paths: Iterable[str | Path]) -> list[Recording]:
    """Recordings of these files, and of all ``*.json`` in these folders, by Buffer and rank.

    Of a rank of a folder that timed out the recording of that moment counts, not that of its end.
    A file that is named twice counts once. Merged traces in a folder are passed over.

    Raises ArgumentError naming what is no recording, or was recorded twice.
    """
    files: dict[Path, bool] = {}  # whether it was named itself
    for path in map(Path, paths):
        if not path.is_dir():
            files[path.resolve()] = True
            continue
        found = {it.name: it for it in sorted(path.resolve().glob("*.json"))}
        for name, file in found.items():
            if f"{TIMED_OUT}{name}" not in found:
                files.setdefault(file, False)
    by_rank: dict[tuple[str, int], tuple[Path, Recording]] = {}
    for path, is_named in files.items():
        recording = _read(path, is_named=is_named)
        if recording is None:
            continue
        key = (recording.buffer, recording.rank)
        if key in by_rank:
            raise ArgumentError(
                "files", f"{by_rank[key][0]} and {path}",
                "must not both be named: both are of the same rank of a Buffer",
            )  # fmt: skip
        by_rank[key] = (path, recording)
    return [by_rank[key][1] for key in sorted(by_rank)]
