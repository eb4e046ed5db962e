"""The rings of one rank: device memory that its kernels write and the host reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from deep_comm import _core
from deep_comm.errors import DeepCommError, PeerTimeout
from deep_comm.settings import env
from deep_comm.trace.recording import TIMED_OUT, Event, Recording
from deep_comm.trace.story import story

if TYPE_CHECKING:
    from collections.abc import Callable


class Rings:
    """Memory for the notes of the last ``num_calls`` kernels, or more, on ``device``.

    ``buffer``: as Recording has it. ``clock``: of the device.
    """

    def __init__(
        self, device: torch.device, num_calls: int, rank: int, num_ranks: int, buffer: str,
        clock: str, synchronize: Callable[[], None],
    ) -> None:  # fmt: skip
        num_calls = 1 << (num_calls - 1).bit_length()
        self.num_calls = num_calls
        self._slots = torch.zeros(_core.trace_bytes(num_calls), dtype=torch.uint8, device=device)
        self._rank, self._num_ranks, self._buffer, self._clock = rank, num_ranks, buffer, clock
        self._synchronize = synchronize
        self._has_told = False
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # zeroed before any stream's kernels

    @property
    def address(self) -> int:
        return self._slots.data_ptr()

    def read(self) -> Recording:
        """After all kernels of this rank have ended."""
        self._synchronize()
        copied = self._slots.cpu()
        raw = _core.read_trace(copied.data_ptr(), self.num_calls)
        events = [
            Event(_core.kernel_names[kernel], call, block, _core.trace_steps[step], time_ns, value)
            for kernel, call, block, step, time_ns, value in raw
        ]
        events.sort(key=lambda event: event.time_ns)
        return Recording(self._rank, self._num_ranks, self._buffer, self._clock, events)

    def leave(self, prefix: str = "") -> Path | None:
        """Write a file to DEEP_COMM_TRACE_DIR, if it is set. Raises OSError."""
        folder = env.TRACE_DIR.get()
        if folder is None:
            return None
        return self.read().save(Path(folder) / f"{prefix}{self._buffer}-rank{self._rank}.json")

    def tell(self, error: DeepCommError) -> None:
        """Add to the first PeerTimeout since a reset how far the blocks have come."""
        if self._has_told or not isinstance(error, PeerTimeout):
            return
        self._has_told = True
        error.story = story(self.read(), error.kernel)
        try:
            path = self.leave(TIMED_OUT)
        except OSError as failure:
            error.story += f"\n(not written: {failure})"
        else:
            error.story += f"\nall of it: {os.fspath(path)}" if path is not None else ""
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(error.story)

    def reset(self) -> None:
        """The Buffer begins anew, and its calls with the number 1. No kernel runs."""
        self._has_told = False
        self._slots.zero_()
        if self._slots.is_cuda:
            torch.cuda.synchronize(self._slots.device)
