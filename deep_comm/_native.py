"""Loads the native modules where they are first needed, and says how to get them if they are not."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, cast

from deep_comm.errors import UnsupportedError

if TYPE_CHECKING:
    from deep_comm import _core, _cuda


def _load(name: str, remedy: str) -> ModuleType:
    try:
        return importlib.import_module(f"deep_comm.{name}")
    except ImportError as error:
        raise UnsupportedError(f"deep_comm.{name} cannot be loaded ({error}); {remedy}") from error


def core() -> _core:  # type: ignore[valid-type]
    """The host target; part of every build."""
    return cast("_core", _load("_core", "install the package: pip install ."))


def cuda() -> _cuda:  # type: ignore[valid-type]
    """The GPU target; built when nvcc is found."""
    return cast("_cuda", _load("_cuda", "install the package where nvcc is on PATH: pip install ."))
