"""The log: Python's logger ``deep_comm``. ``DEEP_COMM_LOG`` sets its level: warning, info, debug.

info: Buffers and layers that are built, reset and destroyed, ranks that are masked, memory that is
added. debug: every call with its rank, sizes and path, also one that raises. Calls are wrapped when
a Buffer is built, if the level is debug then; else they cost nothing. How many calls took which
path: ``buffer.stats()``.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from deep_comm.settings import env

logger = logging.getLogger("deep_comm")

_FORMAT = "%(asctime)s %(levelname)s %(name)s[%(process)d]: %(message)s"


def set_up() -> None:
    """Do what DEEP_COMM_LOG asks for. Handlers that a program has made are left as they are."""
    level = env.LOG.get()
    if level is None:
        return
    logger.setLevel(level.upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)


_user = contextvars.ContextVar("user", default="")


@contextlib.contextmanager
def used_by(name: str) -> Iterator[None]:
    """Within it the lines of Buffers that are built say who uses them: ``name``."""
    before = _user.set(name)
    try:
        yield
    finally:
        _user.reset(before)


def user() -> str:
    """Who uses a Buffer that is built now, if not the program itself."""
    return _user.get()


def warn_of_lost_gradient(call: str, instead: str = "ExpertParallel has", of: str = "x") -> None:
    """Of a call whose argument ``of`` requires one. ``instead``: what has gradients."""
    if torch.is_grad_enabled():
        warnings.warn(
            f"{call} has no gradient: {of} requires one, which ends here. {instead} "
            "gradients; or call it in a torch.autograd.Function, or under torch.no_grad()",
            stacklevel=3,
        )


def brief(value: Any) -> str:
    """Shapes instead of contents, types instead of objects."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        ends = "()" if isinstance(value, tuple) else "[]"
        inside = ", ".join(map(brief, value)) if len(value) <= 8 else f"{len(value)} items"
        return ends[0] + inside + ends[1]
    if value is None or isinstance(value, (bool, int, float, str, tuple)):
        return repr(value)
    return type(value).__name__


def show_calls(owner: Any, rank: int, names: Sequence[str], stats: Callable[[], Any]) -> None:
    """If the level is debug, let these methods of ``owner`` log what they did, or how they failed.

    Args:
        stats: BufferStats, before and after a call; what has changed is its path.
    """
    if not logger.isEnabledFor(logging.DEBUG):
        return
    owner._shown = rank, stats
    # Methods of a class: functions among the owner's attributes would have to hold the owner.
    kind: Any = type(owner)
    owner.__class__ = _shown_class(kind, tuple(names))


@functools.cache
def _shown_class(kind: Any, names: tuple[str, ...]) -> type:
    shown = {name: _shown(getattr(kind, name)) for name in names}
    same = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), same | shown)


def _shown(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return method(self, *arguments, **options)
        rank, stats = self._shown
        before, started = vars(stats()), time.perf_counter()
        try:
            result = method(self, *arguments, **options)
            ended = f"-> {brief(result)}"
            return result
        except BaseException as error:
            ended = f"raised {type(error).__name__}"
            raise
        finally:
            host_us = (time.perf_counter() - started) * 1e6
            paths = [path for path, count in vars(stats()).items()
                     if path.endswith(("_direct", "_rings")) and count > before[path]]  # fmt: skip
            given = [*map(brief, arguments), *(f"{key}={brief(it)}" for key, it in options.items())]
            path = f" by {', '.join(paths)}" if paths else ""
            logger.debug("rank %d: %s(%s) %s%s, %.0f us on the host", rank, method.__qualname__,
                         ", ".join(given), ended, path, host_us)  # fmt: skip

    return call
