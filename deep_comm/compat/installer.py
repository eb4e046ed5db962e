"""Puts the package ``deep_ep`` beside the others of a Python environment, and takes it away again.

It is installed as any distribution is, with metadata and a record of its files, so that pip lists
it, refuses to be surprised by it, and can remove it.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import re
import shutil
import sys
import sysconfig
from pathlib import Path

from deep_comm import __version__
from deep_comm.errors import DeepCommError

SITE = Path(__file__).resolve().parent / "site"
NAME = "deep_ep"
VERSION = f"2.1.0+deep.comm.{__version__}"
_INSTALLER = "deep_comm"
_SUMMARY = "The drop-in deep_ep of deep_comm: remove with deep_comm compat uninstall"


class InstallError(DeepCommError):
    """The drop-in was not installed or removed; nothing was changed."""


def default_target() -> Path:
    """Where pip installs, in the Python that runs this."""
    return Path(sysconfig.get_path("purelib"))


def _dist_info(target: Path) -> Path | None:
    """Of a deep_ep in ``target``, whoever installed it."""
    pattern = re.compile(r"deep[-_.]ep-.*\.(dist|egg)-info$", re.IGNORECASE)
    found = [path for path in target.glob("*-info") if pattern.match(path.name)]
    return found[0] if found else None


def is_ours(target: Path) -> bool:
    """Did install() put the deep_ep of ``target`` there?"""
    info = _dist_info(target)
    installer = info / "INSTALLER" if info is not None else None
    return (
        installer is not None and installer.exists() and installer.read_text().strip() == _INSTALLER
    )


def existing() -> Path | None:
    """Where ``import deep_ep`` finds something now."""
    spec = importlib.util.find_spec(NAME)
    if spec is None:
        return None
    if spec.origin is not None:
        return Path(spec.origin).resolve().parent
    return Path(next(iter(spec.submodule_search_locations or ["?"])))


def is_drop_in(package: Path) -> bool:
    """Is this folder, which existing() returned, the drop-in, installed or by its path?"""
    return package == SITE / NAME or is_ours(package.parent)


def install(target: Path | None = None) -> Path:
    """Copy the package into ``target`` (default: where pip installs). Returns its folder.

    Raises InstallError if there is another deep_ep, here or earlier on sys.path.
    """
    target = default_target() if target is None else target
    package = target / NAME
    if not is_ours(target) and (package.exists() or _dist_info(target) is not None):
        raise InstallError(f"{target} has another {NAME}: remove it first (pip uninstall {NAME})")
    found = existing()
    if found is not None and found not in (package.resolve(), (SITE / NAME).resolve()):
        raise InstallError(f"import {NAME} finds {found}, not by deep_comm: remove it first")
    if is_ours(target):
        uninstall(target)
    target.mkdir(parents=True, exist_ok=True)
    shutil.copytree(SITE / NAME, package, ignore=shutil.ignore_patterns("__pycache__"))
    info = target / f"{NAME}-{VERSION}.dist-info"
    info.mkdir()
    (info / "INSTALLER").write_text(f"{_INSTALLER}\n")
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\nSummary: {_SUMMARY}\n"
    )
    (info / "top_level.txt").write_text(f"{NAME}\n")
    _write_record(target, package, info)
    importlib.invalidate_caches()
    return package


def _write_record(target: Path, package: Path, info: Path) -> None:
    lines = []
    for path in sorted([*package.rglob("*"), *info.iterdir()]):
        if path.is_file():
            data = path.read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{path.relative_to(target).as_posix()},sha256={digest},{len(data)}")
    record = (info / "RECORD").relative_to(target).as_posix()
    (info / "RECORD").write_text("\n".join([*lines, f"{record},,"]) + "\n")


def uninstall(target: Path | None = None) -> Path:
    """Remove what install() put into ``target``; returns the folder that went.

    Raises InstallError if the deep_ep there is another one, or if there is none.
    """
    target = default_target() if target is None else target
    info = _dist_info(target)
    if info is None or not is_ours(target):
        what = "another deep_ep" if info is not None or (target / NAME).exists() else "no deep_ep"
        raise InstallError(f"{target} has {what}; only what deep_comm installed is removed")
    for line in (info / "RECORD").read_text().splitlines():
        (target / line.split(",")[0]).unlink(missing_ok=True)
    for folder in (target / NAME, info):
        for cache in folder.rglob("__pycache__"):
            shutil.rmtree(cache)
        for path in sorted(folder.rglob("*"), reverse=True):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        if folder.exists() and not any(folder.iterdir()):
            folder.rmdir()
    importlib.invalidate_caches()
    return target / NAME


def status(target: Path | None = None) -> dict[str, str | bool | None]:
    """What ``import deep_ep`` finds; None: nothing."""
    target = default_target() if target is None else target
    found = existing()
    return {
        "python": sys.executable,
        "target": str(target),
        "installed": is_ours(target),
        "finds": None if found is None else str(found),
        "is_drop_in": found is not None and is_drop_in(found),
    }


def describe(target: Path | None = None) -> str:
    """What ``status`` finds, in words."""
    found = status(target)
    return (
        f"python: {found['python']}\n"
        f"installed in {found['target']}: {'yes' if found['installed'] else 'no'}\n"
        f"import {NAME} finds: {found['finds'] or 'nothing'}"
    )
