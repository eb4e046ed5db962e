"""Puts the adapters in the place of vLLM's DeepEP backends.

vLLM picks its all-to-all backends by name in several places and has no registry for others. So the
operator goes on choosing ``deepep_high_throughput`` or ``deepep_low_latency``, and the classes
behind those names are exchanged, in every process, before a model is built.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from deep_comm import log
from deep_comm._version import __version__
from deep_comm.errors import UnsupportedError
from deep_comm.integrations.vllm import interface as vllm
from deep_comm.integrations.vllm.low_latency import LowLatencyPrepareFinalize
from deep_comm.integrations.vllm.manager import LowLatencyManager, NormalManager
from deep_comm.integrations.vllm.normal import NormalPrepareFinalize

_MANAGERS = "vllm.distributed.device_communicators.all2all"
_MAKER = "vllm.model_executor.layers.fused_moe.all2all_utils"
_REPLACED: tuple[tuple[str, str, Any], ...] = (
    (_MANAGERS, "DeepEPHTAll2AllManager", NormalManager),
    (_MANAGERS, "DeepEPLLAll2AllManager", LowLatencyManager),
    (_MAKER, "DeepEPHTPrepareAndFinalize", NormalPrepareFinalize),
    (_MAKER, "DeepEPLLPrepareAndFinalize", LowLatencyPrepareFinalize),
)


def _keep_graphs() -> None:
    """vLLM compiles a model whose backend is deepep_high_throughput without CUDA graphs, since the
    host waits in DeepEP's calls. While they are captured, NormalPrepareFinalize's wait for nothing.
    """
    try:
        from vllm.config.compilation import CompilationConfig

        set_up: Callable[..., None] = CompilationConfig.set_splitting_ops_for_v1
    except (ImportError, AttributeError):
        return  # an older vLLM, which has its rule elsewhere
    is_known = "all2all_backend" in inspect.signature(set_up).parameters
    if not is_known or hasattr(set_up, "__wrapped__"):
        return

    @functools.wraps(set_up)
    def set_up_here(self: Any, all2all_backend: str, data_parallel_size: int = 1) -> None:
        if all2all_backend == "deepep_high_throughput":
            all2all_backend = "deepep_low_latency"
        set_up(self, all2all_backend, data_parallel_size)

    CompilationConfig.set_splitting_ops_for_v1 = set_up_here


def _let_workspaces_grow() -> None:
    """vLLM fixes the sizes of the experts' workspaces when it has captured graphs. How many rows
    come in a step that is not captured only the step itself tells. So graphs keep the workspaces
    that they were captured with, and a step that needs more gets a new one.
    """
    try:
        from vllm.v1.worker.workspace import WorkspaceManager

        lock: Callable[..., None] = WorkspaceManager.lock
    except (ImportError, AttributeError):
        return
    if hasattr(lock, "__wrapped__"):
        return

    @functools.wraps(lock)
    def keep(self: Any) -> None:
        workspaces = getattr(self, "_current_workspaces", None)
        if workspaces is None:
            return lock(self)  # another vLLM, whose workspaces nobody could keep
        self._kept_for_graphs = list(workspaces)
        return None

    WorkspaceManager.lock = keep


def _load_by_descriptors() -> None:
    """Let vLLM's Triton experts of rows by expert load weights by tensor descriptors, as vLLM does
    on XPUs alone. Without, they take 5 to 8 times as long (docs/guide/vllm.md#low-latency). Does
    nothing on GPUs without TMA, or if VLLM_TRITON_USE_TD is set, which also decides for other
    kernels.
    """
    try:
        experts: Any = importlib.import_module(vllm.BATCHED_EXPERTS)
        decide: Callable[..., bool] = experts.use_tensor_descriptor
        from vllm import envs
    except (ImportError, AttributeError):
        return
    if hasattr(decide, "__wrapped__"):
        return

    @functools.wraps(decide)
    def decide_here(override: bool | None = None) -> bool:
        is_open = override is None and getattr(envs, "VLLM_TRITON_USE_TD", None) is None
        return (is_open and _has_tma()) or decide(override)

    experts.use_tensor_descriptor = decide_here


def _leave_padding_out() -> None:
    """vLLM's routers give rows that only fill up a CUDA graph, or the step of an idle rank, no
    expert. That of grouped top-k does so only if a model asks for it, since not every backend takes
    indices of -1. The adapters do: such rows are not sent, and no weights are loaded for them.
    """
    try:
        router: Any = importlib.import_module(vllm.GROUPED_ROUTER).GroupedTopKRouter
    except (ImportError, AttributeError):
        return
    make = router.__init__
    if "skip_padding" not in inspect.signature(make).parameters or hasattr(make, "__wrapped__"):
        return

    @functools.wraps(make)
    def make_here(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.skip_padding = True  # VLLM_MOE_SKIP_PADDING=0 still turns it off

    router.__init__ = make_here


@functools.cache
def _has_tma() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def register() -> None:
    """Exchange the classes in this process. May be called again.

    Raises UnsupportedError, and changes nothing, if this vLLM does not have them where they are
    looked for.
    """
    found = []
    for module_name, name, ours in _REPLACED:
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise UnsupportedError(
                f"cannot import {module_name} ({error}): vLLM is not installed here, or the "
                "adapter does not know this vLLM; the drop-in needs less of it (deep_comm compat "
                "install)"
            ) from error
        if not hasattr(module, name):
            raise UnsupportedError(
                f"{module_name} has no {name}: this vLLM is not one that the adapter knows, or "
                "finds no deep_ep (deep_comm compat install)"
            )
        found.append((module, name, ours))
    for module, name, ours in found:
        setattr(module, name, ours)
    _keep_graphs()
    _let_workspaces_grow()
    _load_by_descriptors()
    _leave_padding_out()
    log.set_up()
    log.logger.info(
        "deep_comm %s serves vLLM's deepep_high_throughput and deepep_low_latency", __version__
    )
