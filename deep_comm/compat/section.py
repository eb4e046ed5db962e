"""Torch operations and communication as one piece of work on the communication stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from deep_comm.buffer import Buffer
from deep_comm.events import EventHandle, EventOverlap


class Section:
    """Everything inside runs on the Buffer's communication stream, after ``events`` if there are
    any, else after the current stream; on the host target there are no streams. Gradients end here,
    as they do in the calls of the engine.

    ``finish`` makes the current stream wait for it, or returns the event to wait for.
    """

    def __init__(self, buffer: Buffer, events: Iterable[EventHandle], is_async: bool) -> None:
        self._comm = buffer.get_comm_stream() if buffer.device.type == "cuda" else None
        self._events = list(events)
        self._is_async = is_async
        self._no_grad = torch.no_grad()

    def __enter__(self) -> Section:
        self._no_grad.__enter__()
        if self._comm is not None:
            self._compute = torch.cuda.current_stream(self._comm.device)
            for event in self._events:
                event.stream_wait(self._comm)
            if not self._events and self._compute != self._comm:
                self._comm.wait_stream(self._compute)
            self._scope = torch.cuda.stream(self._comm)
            self._scope.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._comm is not None:
            self._scope.__exit__(*raised)
        self._no_grad.__exit__(*raised)

    def finish(
        self, inputs: Iterable[Tensor | None], outputs: Iterable[Tensor | None]
    ) -> EventOverlap:
        """After the ``with``. ``inputs`` came from outside, ``outputs`` were made inside."""
        if self._comm is None:
            return EventOverlap(EventHandle() if self._is_async else None)
        for tensors, stream in ((inputs, self._comm), (outputs, self._compute)):
            for tensor in tensors:
                if tensor is not None and tensor.numel() > 0:
                    tensor.record_stream(stream)
        if self._is_async:
            return EventOverlap(EventHandle(self._comm))
        if self._compute != self._comm:
            self._compute.wait_stream(self._comm)
        return EventOverlap(None)
