"""Puts the adapters in the place of vLLM's DeepEP backends.

vLLM picks its all-to-all backends by name in several places and has no registry for others. So the
operator goes on choosing ``deepep_high_throughput`` or ``deepep_low_latency``, and the classes
behind those names are exchanged, in every process, before a model is built.
"""

from __future__ import annotations

import importlib
from typing import Any

from deep_comm import log
from deep_comm._version import __version__
from deep_comm.errors import UnsupportedError
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
    log.set_up()
    log.logger.info(
        "deep_comm %s serves vLLM's deepep_high_throughput and deepep_low_latency", __version__
    )
