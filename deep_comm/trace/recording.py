"""The notes of one rank, and the file that they are kept in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from deep_comm.errors import ArgumentError

_FORMAT = 1


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


def _read(path: Path) -> Recording:
    try:
        fields = json.loads(path.read_text())
        if fields.pop("deep_comm_trace") != _FORMAT:
            raise KeyError("deep_comm_trace")
        events = [Event(*event) for event in fields.pop("events")]
        return Recording(**fields, events=events)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(
            "file", str(path), "must be a trace that a Buffer left in DEEP_COMM_TRACE_DIR"
        ) from error


def load(paths: Iterable[str | Path]) -> list[Recording]:
    """Recordings of these files, and of all ``*.json`` in these folders, by Buffer and rank.

    Raises ArgumentError naming what is no recording, or was recorded twice.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        files += sorted(path.glob("*.json")) if path.is_dir() else [path]
    recordings = [_read(path) for path in files]
    recordings.sort(key=lambda recording: (recording.buffer, recording.rank))
    seen: set[tuple[str, int]] = set()
    for recording in recordings:
        key = (recording.buffer, recording.rank)
        if key in seen:
            raise ArgumentError(
                "files", f"{recording.rank}", "must hold one recording a rank, of each Buffer"
            )
        seen.add(key)
    return recordings
