"""The version of the installed distribution; pyproject.toml is where it is written."""

from __future__ import annotations

from importlib import metadata


def _version() -> str:
    try:
        return metadata.version("deep_comm")
    except metadata.PackageNotFoundError:
        return "0+not-installed"


__version__ = _version()
