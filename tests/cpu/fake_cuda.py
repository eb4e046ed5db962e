"""The CUDA backend on a machine without CUDA: its Python code runs, its streams are numbers.

The module `deep_comm._cuda` is replaced by one whose engine is the host target's and whose events write
down what they are asked to do. Tensors live on the host. So the order of streams and the number of calls
can be tested, and kernels still move the rows.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator

import pytest
import torch

import deep_comm
from deep_comm import _core

COMPUTE, COMM = 11, 22


class Log(list):
    """What was done to streams and memory, in order."""

    def names(self) -> list[str]:
        return [entry[0] for entry in self]


class _Stream:
    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.cuda_stream = COMM

    def synchronize(self) -> None:
        pass


def _module(log: Log) -> types.ModuleType:
    module = types.ModuleType("deep_comm._cuda")

    class Event:
        def __init__(self, device: int) -> None:
            pass

        def record(self, stream: int) -> None:
            log.append(("record", stream))

        def wait(self, stream: int) -> None:
            log.append(("wait", stream))

        def order(self, first: int, then: int) -> None:
            log.append(("order", first, then))

    class Engine(_core.Engine):
        def dispatch(self, **arguments: object) -> None:
            log.append(("dispatch", arguments["stream"]))
            super().dispatch(**arguments)

        def combine(self, **arguments: object) -> None:
            log.append(("combine", arguments["stream"]))
            super().combine(**arguments)

        def notify_dispatch(self, **arguments: object) -> None:
            log.append(("notify", arguments["stream"]))
            super().notify_dispatch(**arguments)

        def wait_counts(self) -> object:
            log.append(("wait_counts",))
            return super().wait_counts()

        def get_dispatch_layout(self, **arguments: object) -> None:
            log.append(("layout", arguments["stream"]))
            super().get_dispatch_layout(**arguments)

    def mark(device: int, stream: int) -> Event:
        log.append(("mark", stream))
        return Event(device)

    module.architectures = "90a"
    module.Event, module.Engine, module.mark = Event, Engine, mark
    module.is_capturing = lambda stream: False
    module.current_device = lambda: 0
    module.num_sms = lambda device: 132
    module.allocate = lambda device, num_bytes: _core.allocate(num_bytes)
    module.free = lambda device, address: _core.free(address)
    return module


@contextlib.contextmanager
def installed() -> Iterator[Log]:
    """Buffers built inside, on device "cpu", go through the CUDA backend."""
    log = Log()
    device = torch.device("cpu", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "deep_comm._cuda", _module(log))
        patch.setattr(deep_comm, "_cuda", sys.modules["deep_comm._cuda"], raising=False)
        for name in ("deep_comm.backends.cuda", "deep_comm.backends.cuda_launch"):
            patch.delitem(sys.modules, name, raising=False)
        patch.setattr(
            torch._C, "_cuda_getCurrentRawStream", lambda index: COMPUTE, raising=False
        )
        patch.setattr(torch.cuda, "Stream", _Stream)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        backend = importlib.import_module("deep_comm.backends.cuda").CudaBackend
        patch.setattr("deep_comm.context.resolve_device", lambda wanted: torch.device("cpu"))
        patch.setattr("deep_comm.context.create_backend", lambda wanted: backend(device))
        try:
            yield log
        finally:
            for name in ("deep_comm.backends.cuda", "deep_comm.backends.cuda_launch"):
                sys.modules.pop(name, None)
