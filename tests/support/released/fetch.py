"""Released files from PyPI, by pip, without their dependencies.

A folder holds, for every release, the files of its modules under PROJECT-VERSION/, and RECORD,
the lines of the release's own record about them: a SHA-256 hash each. `files_of` checks it, so
that what runs is what was released, wherever the folder came from.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from released.program import Release

# Releases with compiled parts name one of these; pip matches them exactly.
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 24, 17)]
# The Python whose wheels are taken; only their Python files are used.
_PYTHON = "3.12"
_PIP_S = 600  # the largest wheel has 340 MB


class NotFetched(Exception):
    """A release is not obtainable, or a file of it is not what was released."""


def _folder_of(release: Release, folder: Path) -> Path:
    return folder / f"{release.project}-{release.version}"


def _paths(release: Release, names: Iterable[str]) -> dict[str, str]:
    """Module name -> path in the wheel."""
    known = set(names)
    found = {}
    for module in release.modules:
        stem = f"{release.package}.{module}".replace(".", "/")
        path = next((p for p in (f"{stem}.py", f"{stem}/__init__.py") if p in known), None)
        if path is None:
            raise NotFetched(f"{release.pin} has no module {release.package}.{module}")
        found[f"{release.package}.{module}"] = path
    return found


def _download(release: Release, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--python-version", _PYTHON, "--dest", str(folder)]
    for platform in (*_PLATFORMS, "manylinux2014_x86_64", "any"):
        command += ["--platform", platform]
    try:
        done = subprocess.run(
            [*command, release.pin], capture_output=True, text=True, timeout=_PIP_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NotFetched(f"{release.pin}: pip did not end within {_PIP_S} s") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        why = done.stderr.strip().splitlines()[-1:] or ["pip said nothing"]
        raise NotFetched(f"{release.pin}: {why[0]}")
    return wheels[0]


def fetch(release: Release, folder: Path) -> None:
    """Put the files of ``release`` into ``folder``, unless they are there.

    Raises NotFetched.
    """
    place = _folder_of(release, folder)
    if (place / "RECORD").exists():
        try:
            files_of(release, folder)
            return
        except NotFetched:
            pass  # of other modules, or spoilt: once more
    with tempfile.TemporaryDirectory() as temporary:
        with zipfile.ZipFile(_download(release, Path(temporary))) as wheel:
            names = wheel.namelist()
            record = next(name for name in names if name.endswith(".dist-info/RECORD"))
            rows = csv.reader(io.StringIO(wheel.read(record).decode()))
            hashes = {row[0]: row[1] for row in rows if row}
            paths = _paths(release, names).values()
            for path in paths:
                file = place / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(wheel.read(path))
    (place / "RECORD").write_text("".join(f"{path},{hashes[path]}\n" for path in sorted(paths)))


def files_of(release: Release, folder: Path) -> dict[str, Path]:
    """Module name -> file, all of them as released. Raises NotFetched."""
    place = _folder_of(release, folder)
    try:
        lines = (place / "RECORD").read_text().splitlines()
    except OSError as error:
        raise NotFetched(f"{release.pin} is not in {folder}") from error
    hashes = dict(line.rsplit(",", 1) for line in lines)
    files = {}
    for module, path in _paths(release, hashes).items():
        try:
            digest = hashlib.sha256((place / path).read_bytes()).digest()
        except OSError as error:
            raise NotFetched(f"{release.pin}: {path} is not in {folder}") from error
        found = "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        if found != hashes[path]:
            raise NotFetched(f"{release.pin}: {path} is not what was released")
        files[module] = place / path
    return files
