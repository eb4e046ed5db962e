"""Which way the rows of a Buffer's calls took, and the warning of calls without room."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from deep_comm import _core
from deep_comm.settings.buffer import RING_BYTES


class PerformanceWarning(UserWarning):
    """A call takes longer than it would with other sizes or arguments."""


@dataclass(frozen=True)
class BufferStats:
    """Calls of one rank since its Buffer was built. A captured call counts once.

    Rows of a call go straight to their final rows if every rank has room for them in its receive
    region. Otherwise the rows of all ranks go through rings, which takes longer. These are the
    calls for which this rank had room, and those for which it had none.

    Attributes:
        dispatch_direct, dispatch_rings: dispatches, cached ones too.
        combine_direct, combine_rings: combines; they need room for the rows that return.
        receive_region_bytes: of this rank.
        missing_bytes: the most that a call without room needed; 0: all had room.
    """

    dispatch_direct: int
    dispatch_rings: int
    combine_direct: int
    combine_rings: int
    missing_bytes: int
    receive_region_bytes: int

    @classmethod
    def of(cls, calls: _core.BufferCalls, region_bytes: int) -> BufferStats:
        """Of the Buffer whose calls these are."""
        return cls(*calls.region_use, receive_region_bytes=region_bytes)


def warn_without_room(num_nvl_bytes: int, region_bytes: int, needed_bytes: int) -> None:
    """Of a Buffer's first large call without room."""
    # Rows of a dispatch live until they are combined, which needs room as well.
    enough = max(num_nvl_bytes, RING_BYTES) + 2 * needed_bytes
    warnings.warn(
        f"rows of a call need {_mib(needed_bytes)} MiB, and the receive region of this Buffer, "
        f"{_mib(region_bytes)} MiB, has no room for them: rows of all ranks go through rings, "
        f"which takes longer. num_nvl_bytes={enough} instead of {num_nvl_bytes} gives room for a "
        "dispatch and its combine; see Buffer.stats() and Config.get_nvl_buffer_size_hint",
        PerformanceWarning,
        stacklevel=3,
    )


def _mib(num_bytes: int) -> int:
    return -(-num_bytes // (1 << 20))
