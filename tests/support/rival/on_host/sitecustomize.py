"""Lets programs that say "cuda" run on the host target: read by every Python process whose path has
this folder. Nothing of the program changes but what its calls of torch mean; it takes no times, and
its Buffers, which small shapes do not fill, are at most so large that 16 ranks find room.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch
from rival import over_host  # noqa: F401  puts gloo in NCCL's place
from torch.overrides import TorchFunctionMode


class _HostTensors(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class _Event:
    def __init__(self, **options: Any) -> None:
        pass

    def record(self) -> None:
        pass

    def elapsed_time(self, end: _Event) -> float:
        return 1.0


def _once(fn: Any, *args: Any, **options: Any) -> tuple[float, float, float]:
    fn()
    return 1.0, 1.0, 1.0


def _once_per_kernel(
    fn: Any, kernel_names: Any, *args: Any, num_kernels_per_period: int = 1, **options: Any
) -> Any:
    fn()
    duration = 1.0 if num_kernels_per_period == 1 else [1.0] * num_kernels_per_period
    return (duration,) * len(kernel_names) if isinstance(kernel_names, tuple) else duration


_MOST_BYTES = 128 << 20


def _build_small(kind: Any) -> None:
    build = kind.__init__

    def build_small(
        self: Any,
        group: Any = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        *args: Any,
        **options: Any,
    ) -> None:
        sizes = (min(size, _MOST_BYTES) for size in (num_nvl_bytes, num_rdma_bytes))
        build(self, group, *sizes, *args, **options)

    kind.__init__ = build_small


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules to change: DeepEP's helpers that measure, and the drop-in."""

    HELPERS = ("utils", "deep_ep.utils.testing")
    DROP_IN = "deep_comm.compat.legacy"

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in (*self.HELPERS, self.DROP_IN):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)  # type: ignore[attr-defined]
        if module.__name__ == self.DROP_IN:
            _build_small(module.Buffer)
        else:
            vars(module).update(bench=_once, bench_kineto=_once_per_kernel)


torch.set_default_device = lambda device: None
torch.cuda.set_device = lambda device: None
torch.cuda.synchronize = lambda device=None: None
torch.cuda.Event = _Event  # type: ignore[assignment, misc]
sys.meta_path.insert(0, _Changed())
_HostTensors().__enter__()
