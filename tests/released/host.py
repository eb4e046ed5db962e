"""What the host target answers when an adapter asks for CUDA."""

from __future__ import annotations

import contextlib
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


@contextlib.contextmanager
def cuda_means_host() -> Iterator[None]:
    """Within it tensors for `cuda` are the host's, and a device has 132 multiprocessors."""
    properties = SimpleNamespace(multi_processor_count=132, major=9, minor=0, name="host")
    with (
        _CudaMeansHost(),
        mock.patch.object(torch.cuda, "get_device_properties", lambda device=None: properties),
        mock.patch.object(torch.accelerator, "synchronize", lambda device=None: None),
    ):
        yield
