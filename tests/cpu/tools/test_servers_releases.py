"""Releases: wheels that are checked, trimmed and packed."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import zipfile
from pathlib import Path

import pytest
from server_stand_ins import (
    hook_module,
)
from servers import fatbin, fetch
from servers.combinations import ROWS
from servers.releases import RELEASES, Release, Wheel

MACHINE_CODE, PTX = 2, 1


def entry(kind: int, arch: int, payload: bytes) -> bytes:
    header = struct.pack("<HHIQ", kind, 1, 64, len(payload)) + bytes(12) + struct.pack("<I", arch)
    return header + bytes(64 - len(header)) + payload


def container(*entries: bytes) -> bytes:
    inside = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(inside)) + inside


def elf(fatbin_section: bytes) -> bytes:
    """An ELF file of that section, and the section of names."""
    names = b"\0.nv_fatbin\0.shstrtab\0"
    start = 64
    table = start + len(fatbin_section) + len(names)
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    struct.pack_into("<Q", header, 0x28, table)
    struct.pack_into("<HHH", header, 0x3A, 64, 3, 2)

    def section(name: int, offset: int, size: int) -> bytes:
        return struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, offset, size, 0, 0, 8, 0)

    sections = bytes(64) + section(1, start, len(fatbin_section))
    sections += section(12, start + len(fatbin_section), len(names))
    return bytes(header) + fatbin_section + names + sections


OLD, NEW = entry(MACHINE_CODE, 80, b"8" * 40), entry(MACHINE_CODE, 90, b"9" * 48)
TEXT = entry(PTX, 90, b"p" * 64)


def inside(data: bytes | bytearray) -> list[list[tuple[int, int]]]:
    return [
        [(one.kind, one.arch) for one in fatbin.entries(data, which)]
        for which in fatbin.containers(data)
    ]


def test_only_code_of_one_architecture_is_kept() -> None:
    all_three = (OLD, NEW, TEXT)
    data = bytearray(elf(container(*all_three) + bytes(8) + container(OLD) + container(TEXT)))
    before = len(data)
    trimmed = fatbin.trim(data, 90)
    num_bytes = sum(map(len, (*all_three, OLD, TEXT)))
    assert trimmed == fatbin.Trimmed(3, num_bytes, len(NEW) + 2 * len(OLD), 2)
    assert len(data) == before
    # The second and third can be registered, and never run here.
    assert inside(data) == [[(MACHINE_CODE, 90)], [(MACHINE_CODE, 80)], [(MACHINE_CODE, 80)]]
    assert b"9" * 48 in data and b"p" * 64 not in data


def test_a_module_that_is_only_imported_keeps_the_smallest_entry_everywhere() -> None:
    data = bytearray(elf(container(NEW, NEW) + container(OLD, NEW)))
    assert fatbin.trim(data, None).without_code == 2
    assert inside(data) == [[(MACHINE_CODE, 80)], [(MACHINE_CODE, 80)]]


def test_what_is_not_a_fatbin_is_refused_or_left_alone() -> None:
    data = bytearray(b"no ELF file, but long enough to look into")
    assert fatbin.trim(data, 90).containers == 0
    with pytest.raises(ValueError, match="no container at"):
        fatbin.trim(bytearray(elf(b"garbage!" * 4)), 90)
    spoilt = bytearray(elf(container(OLD)))
    struct.pack_into("<Q", spoilt, 64 + 16 + 8, 1000)
    with pytest.raises(ValueError, match="entries of the container"):
        fatbin.trim(spoilt, 90)


def packed_wheel(folder: Path, project: str, files: dict[str, str]) -> Wheel:
    named = project.replace("-", "_")
    path = folder / "wheels" / "some-server-1.0" / f"{named}-1.0-py3-none-any.whl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(f"{named}/{name}", text)
    return Wheel(f"{project}==1.0", "any", hashlib.sha256(path.read_bytes()).hexdigest())


def packed_release(folder: Path) -> Release:
    """Of two wheels, the name of one of which begins as the other's."""
    server = packed_wheel(
        folder, "some-server", {"__init__.py": "VALUE = 3\n", "bench/big.json": ""}
    )
    kernels = packed_wheel(folder, "some-server-kernels", {"__init__.py": "VALUE = 4\n"})
    return Release("some-server", "1.0", (server, kernels), (), ("some_server/bench/*",))


def test_a_release_is_trimmed_packed_and_unpacked_elsewhere(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    release = packed_release(here)
    assert fetch.trim(release, here) == []
    packages = here / "unpacked" / release.packages_name
    (packages / "__pycache__").mkdir(parents=True)
    (packages / "__pycache__" / "x.pyc").touch()
    (packages / "requirements.txt").touch()
    packed = fetch.pack(release, here, limit_mib=1)
    there.mkdir()
    (there / "parts").mkdir()
    for path in packed:
        path.rename(there / "parts" / path.name)
    package, others = fetch.unpacked(release, there)
    assert (Path(package) / "some_server" / "__init__.py").read_text() == "VALUE = 3\n"
    assert not (Path(package) / "some_server" / "bench").exists()
    kernels = Path(package) / "some_server_kernels" / "__init__.py"
    assert kernels.read_text() == "VALUE = 4\n"
    assert [path.name for path in Path(others).iterdir()] == ["requirements.txt"]
    assert fetch.unpacked(release, there) == (package, others)  # once
    with pytest.raises(fetch.NotFetched, match="neither"):
        fetch.unpacked(release, tmp_path)


def test_another_wheel_than_the_tables_is_refused(tmp_path: Path) -> None:
    release = packed_release(tmp_path)
    server, kernels = release.wheels
    assert len(fetch.wheels_of(release, tmp_path)) == 2
    other = dataclasses.replace(kernels, sha256="0" * 64)
    with pytest.raises(fetch.NotFetched, match="some_server_kernels.*of the table"):
        fetch.trim(dataclasses.replace(release, wheels=(server, other)), tmp_path)
    with pytest.raises(fetch.NotFetched, match="has no wheel of some-server==1.0"):
        fetch.wheels_of(release, tmp_path / "elsewhere")


def test_the_table_of_releases_names_each_once_with_a_hash() -> None:
    assert len({release.name for release in RELEASES}) == len(RELEASES)
    for release in RELEASES:
        assert release.wheels[0].pin == f"{release.project}=={release.version}"
        assert all(len(bytes.fromhex(wheel.sha256)) == 32 for wheel in release.wheels)
    assert {row.server for row in ROWS if not row.lacks} == {one.server for one in RELEASES}
    bridges = hook_module().BRIDGES
    assert all(set(release.hooks) <= set(bridges) for release in RELEASES)
    backends = {row.backend for row in ROWS}
    assert all(set(release.absent) <= backends for release in RELEASES)
