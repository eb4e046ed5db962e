"""What kernels of one Buffer recorded, as errors. Native calls hold it: it holds no Context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from deep_comm import errors

if TYPE_CHECKING:
    from deep_comm._core import Engine
    from deep_comm.backends.base import Backend
    from deep_comm.trace.rings import Rings


class Failures:
    """Of one Buffer."""

    def __init__(self, engine: Engine, backend: Backend, has_unordered: bool) -> None:
        self._engine, self._backend = engine, backend
        self._has_unordered = has_unordered
        self.trace_rings: Rings | None = None

    def synchronize(self) -> None:
        """Wait for this rank's kernels."""
        self._backend.synchronize()
        if self._has_unordered and not self._backend.is_synchronous:
            torch.cuda.synchronize(self._backend.device)  # these calls run on the callers' streams

    def raise_recorded(self) -> None:
        """Raise what a kernel recorded, if any has. Does not wait for kernels of a rank that is out
        of step.
        """
        record = self._engine.poll_error()
        if record is not None:
            self.raise_record(record)

    def raise_record(self, record: Any) -> None:
        other = (-1, "")
        is_capturing = self._backend.is_capturing()  # then nothing may wait, or touch memory
        if not is_capturing and not errors.needs_reset(record):
            # All ranks are still in step: the Buffer goes on.
            self.synchronize()  # what still runs might report once more
            self._engine.clear_error()
        if record.kind == "peer_timeout" and not is_capturing:
            other = self._engine.begun_by_peer()
        error = errors.from_record(record, other)
        if self.trace_rings is not None and not is_capturing:
            self.trace_rings.tell(error)
        try:
            raise error
        finally:
            del error  # or it and this frame keep each other, and all that the call has held
