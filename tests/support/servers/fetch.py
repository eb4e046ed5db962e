"""Wheels from PyPI by pip, checked against releases.py; trimmed, and packed for machines without a
network that take small transfers. Of a folder:

    wheels/vllm-0.33.0/*.whl       fetch
    unpacked/vllm-0.33.0-deps/     fetch: packages; requirements.txt says which versions
    unpacked/vllm-0.33.0/          trim: files of the wheel, machine code of one architecture
    parts/vllm-0.33.0.tar.xz       pack: each unpacked folder
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from servers import fatbin
from servers.releases import ARCH, PYTHON, Release, Wheel

_PIP_S = 1200
_STRIP_S = 300
_PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (35, 34, 31, 28, 27, 24, 17, 5)),
    "manylinux2014_x86_64",
)


class NotFetched(Exception):
    """A release is not obtainable, or is not the one that the table names."""


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    command += ["--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--python-version", PYTHON, "--implementation", "cp"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NotFetched(f"pip {arguments[0]} did not end within {_PIP_S} s") from error
    if done.returncode != 0:
        why = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise NotFetched(f"pip {arguments[0]}: {(why or ['it said nothing'])[-1]}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _found(wheel: Wheel, place: Path) -> list[Path]:
    project, version = wheel.pin.replace("-", "_").split("==")
    return list(place.glob(f"{project}-{version}-*.whl"))


def wheels_of(release: Release, folder: Path) -> list[Path]:
    """The wheels, if they are the table's. Raises NotFetched."""
    place, paths = folder / "wheels" / release.name, []
    for wheel in release.wheels:
        found = _found(wheel, place)
        if len(found) != 1:
            raise NotFetched(f"{place} has no wheel of {wheel.pin}")
        digest = _sha256(found[0])
        if digest != wheel.sha256:
            raise NotFetched(f"{found[0].name}: SHA-256 {digest}, not {wheel.sha256} of the table")
        paths += found
    return paths


def fetch(release: Release, folder: Path) -> None:
    """Downloads the wheels and installs what they need beside torch and transformers, unless they
    are there. Raises NotFetched.
    """
    place = folder / "wheels" / release.name
    for wheel in release.wheels:
        if not _found(wheel, place):
            _pip("download", "--platform", wheel.platform, "--dest", str(place), wheel.pin)
    wheels_of(release, folder)
    packages = folder / "unpacked" / release.packages_name
    listed = packages / "requirements.txt"
    if listed.exists():
        return
    shutil.rmtree(packages, ignore_errors=True)
    platforms = [word for name in (*_PLATFORMS, "any") for word in ("--platform", name)]
    packages.mkdir(parents=True)
    if release.packages:
        _pip("install", *platforms, "--target", str(packages), *release.packages)
    found = importlib.metadata.distributions(path=[str(packages)])
    listed.write_text("".join(sorted(f"{one.name}=={one.version}\n" for one in found)))


def trim(release: Release, folder: Path) -> list[str]:
    """Unpacks wheels without what does not run; what became of their extension modules."""
    place, said = folder / "unpacked" / release.name, []
    shutil.rmtree(place, ignore_errors=True)
    part = _part_of(place)
    for path in wheels_of(release, folder):
        with zipfile.ZipFile(path) as wheel:
            said += _unpack(wheel, release, part)
    part.rename(place)
    return said


def _part_of(place: Path) -> Path:
    """Where a folder is made before it has its name; empty."""
    part = place.with_name(f"{place.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    return part


def _unpack(wheel: zipfile.ZipFile, release: Release, place: Path) -> list[str]:
    said = []
    for info in wheel.infolist():
        dropped = any(fnmatch.fnmatch(info.filename, one) for one in release.dropped)
        if info.is_dir() or dropped:
            continue
        path = Path(wheel.extract(info, place))
        if path.suffix == ".so":
            arch = None if info.filename in release.idle else ARCH
            said.append(f"{info.filename}: {trim_module(path, arch)}")
    return said


def trim_module(path: Path, arch: int | None) -> str:
    """One extension module, in place."""
    data, before = bytearray(path.read_bytes()), path.stat().st_size
    trimmed = fatbin.trim(data, arch)
    path.write_bytes(data)
    path.chmod(0o755)
    subprocess.run(["strip", "--strip-unneeded", str(path)], check=True, timeout=_STRIP_S)
    code = "no kernels" if arch is None else f"sm_{arch}"
    return (
        f"{before >> 20} MiB, {trimmed.containers} containers, {code}: "
        f"{trimmed.bytes_kept / (1 << 20):.1f} of {trimmed.bytes_before / (1 << 20):.1f} MiB"
    )


def pack(release: Release, folder: Path, limit_mib: int | None = None) -> list[Path]:
    """An archive of each unpacked folder. Raises ValueError if one is over ``limit_mib``."""
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    packed = []
    for name in (release.name, release.packages_name):
        if not (folder / "unpacked" / name).is_dir():
            raise ValueError(f"{folder / 'unpacked' / name} is not there: run fetch and trim first")
        path = folder / "parts" / f"{name}.tar.xz"
        with tarfile.open(path, "w:xz", preset=6) as archive:
            archive.add(folder / "unpacked" / name, name, filter=_plain)
        if limit_mib is not None and path.stat().st_size > limit_mib << 20:
            raise ValueError(f"{path.name} has {path.stat().st_size >> 20} MiB, over {limit_mib}")
        packed.append(path)
    return packed


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Without compiled files, and without who owns what here."""
    if "__pycache__" in info.name:
        return None
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def unpacked(release: Release, folder: Path) -> tuple[str, str]:
    """Where the release and its packages are; from their archives if need be. Raises NotFetched."""
    places = []
    for name in (release.name, release.packages_name):
        place, archive = folder / "unpacked" / name, folder / "parts" / f"{name}.tar.xz"
        if not place.is_dir():
            if not archive.exists():
                raise NotFetched(f"{folder} has neither unpacked/{name} nor parts/{archive.name}")
            part = _part_of(place)
            with tarfile.open(archive) as packed:
                packed.extractall(part, filter="data")
            (part / name).rename(place)
            part.rmdir()
        places.append(str(place))
    return places[0], places[1]
