"""Puts DeepCommDispatcher in the place of SGLang's DeepEP dispatcher.

SGLang picks its dispatcher by ``--moe-a2a-backend``, in several modules that have imported the
class by name. The operator goes on choosing ``deepep``; the class behind the name is exchanged in
every process, before a model is built.
"""

from __future__ import annotations

import importlib

from deep_comm import log
from deep_comm._version import __version__
from deep_comm.errors import UnsupportedError
from deep_comm.integrations.sglang.dispatcher import DeepCommDispatcher

_NAME = "DeepEPDispatcher"
_SOURCE = "sglang.srt.layers.moe.token_dispatcher.deepep"
# Modules that import the class by name; which of them do has changed between versions.
_USERS = (
    "sglang.srt.layers.moe.token_dispatcher",
    "sglang.srt.layers.moe.fused_moe_triton.layer",
    "sglang.srt.batch_overlap.two_batch_overlap",
)


def register() -> list[str]:
    """Exchange the class in this process; returns the modules that had it. May be called again.

    Raises UnsupportedError, and changes nothing, if this SGLang does not have
    it where it is looked for.
    """
    try:
        source = importlib.import_module(_SOURCE)
    except ImportError as error:
        raise UnsupportedError(
            f"cannot import {_SOURCE} ({error}): SGLang is not installed here, or the adapter does "
            "not know this SGLang; the drop-in needs less of it (deep_comm compat install)"
        ) from error
    if not hasattr(source, _NAME):
        raise UnsupportedError(f"{_SOURCE} has no {_NAME}: the adapter does not know this SGLang")
    modules = [source]
    for name in _USERS:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(module, _NAME):
            modules.append(module)
    for module in modules:
        setattr(module, _NAME, DeepCommDispatcher)
    log.set_up()
    log.logger.info("deep_comm %s serves SGLang's --moe-a2a-backend deepep", __version__)
    return [module.__name__ for module in modules]
