"""What the host target answers when an adapter asks for CUDA."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


class _CudaMeansHost(TorchFunctionMode):
    """Device arguments of `cuda` make tensors of the host."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class _Event:
    def record(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Stream:
    """Work of the host is done when a call returns: there is nothing to wait for."""

    def wait_event(self, event: object) -> None:
        pass

    wait_stream = wait_event

    def record_event(self, event: object = None) -> _Event:
        return _Event()


class _Here(threading.local):
    stream = Stream()  # of every thread, until it sets another


_here = _Here()


def current_stream() -> Stream:
    return _here.stream


def _set_stream(stream: Stream) -> None:
    _here.stream = stream


@contextlib.contextmanager
def _on(stream: Stream) -> Iterator[None]:
    before = current_stream()
    _set_stream(stream)
    yield
    _set_stream(before)


@contextlib.contextmanager
def cuda_means_host() -> Iterator[None]:
    """Within it, in this thread, tensors for `cuda` are the host's; in all threads streams and
    events are names, and a device has 132 multiprocessors.
    """
    properties = SimpleNamespace(multi_processor_count=132, major=9, minor=0, name="host")
    with (
        _CudaMeansHost(),
        mock.patch.object(torch.cuda, "get_device_properties", lambda device=None: properties),
        mock.patch.object(torch.accelerator, "synchronize", lambda device=None: None),
        mock.patch.object(torch, "Event", _Event),
        mock.patch.object(torch.cuda, "Stream", Stream),
        mock.patch.object(torch.cuda, "current_stream", current_stream),
        mock.patch.object(torch.cuda, "set_stream", _set_stream),
        mock.patch.object(torch.cuda, "stream", _on),
        mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None),
    ):
        yield
