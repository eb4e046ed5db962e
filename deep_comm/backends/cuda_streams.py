"""Streams and events of CUDA, as Buffers on one device share them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from deep_comm import _core, _cuda, events
from deep_comm.backends.base import EXCHANGE_API


def _current_raw_stream(device_index: int) -> int:
    return int(torch.cuda.current_stream(device_index).cuda_stream)


# torch's own shortcut, which its compiler's output uses too; a build without it
# pays for a stream object.
current_raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", _current_raw_stream
)


@functools.cache
def streams_of(device_index: int) -> _core.Streams:
    return _core.Streams(_cuda.streams(device_index))


def _mark(device_index: int, stream: int) -> _core.Event:
    return streams_of(device_index).mark(stream)


def _mark_here() -> _core.Event:
    device = _cuda.current_device()
    return _mark(device, current_raw_stream(device))


events.pool = events.Pool(_mark, _mark_here, lambda: current_raw_stream(_cuda.current_device()))


def make_framework(device: torch.device, comm: torch.cuda.Stream) -> _core.Framework:
    return _core.TorchFramework(
        device=device, comm_stream=comm, exchange_api=EXCHANGE_API, current_stream=None
    )
