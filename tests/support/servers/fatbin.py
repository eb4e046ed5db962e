"""Machine code of one GPU architecture in a linked extension module.

The section .nv_fatbin holds containers, and each container holds entries: machine code or PTX of
one architecture. Containers are rewritten in place, with zeros for what they lose, so offsets stay
valid and a compressed archive is small. A container is registered when the module is loaded, so
none may be empty: one without code for the architecture gets the smallest entry of another.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_MAGIC = 0xBA55ED50
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of header, bytes of entries
_MACHINE_CODE = 2


@dataclass(frozen=True)
class Entry:
    start: int
    num_bytes: int  # with its header
    kind: int
    arch: int


@dataclass(frozen=True)
class Container:
    start: int
    entries: int  # where they start
    num_bytes: int  # of all entries


@dataclass(frozen=True)
class Trimmed:
    containers: int
    bytes_before: int
    bytes_kept: int
    without_code: int  # containers that have nothing for the architecture


def section(data: bytes | bytearray, name: str) -> tuple[int, int] | None:
    """Where a section of a 64-bit ELF file starts and ends."""
    if data[:4] != b"\x7fELF":
        return None
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", data, 0x3A)

    def header(index: int) -> tuple[int, ...]:
        return struct.unpack_from("<IIQQQQIIQQ", data, table + index * entry_bytes)

    names = header(names_index)[4]
    for index in range(count):
        label, _, _, _, start, num_bytes, *_ = header(index)
        if data[names + label : data.index(b"\0", names + label)] == name.encode():
            return start, start + num_bytes
    return None


def containers(data: bytes | bytearray) -> Iterator[Container]:
    found = section(data, ".nv_fatbin")
    start, end = found or (0, 0)
    while start + _CONTAINER.size <= end:
        magic, _, header_bytes, num_bytes = _CONTAINER.unpack_from(data, start)
        if magic != _MAGIC:
            if any(data[start : start + 8]):
                raise ValueError(f"no container at {start:#x} of .nv_fatbin")
            start += 8  # padding
            continue
        yield Container(start, start + header_bytes, num_bytes)
        start += header_bytes + num_bytes


def entries(data: bytes | bytearray, container: Container) -> Iterator[Entry]:
    start, end = container.entries, container.entries + container.num_bytes
    while start < end:
        kind, _, header_bytes, num_bytes = struct.unpack_from("<HHIQ", data, start)
        (arch,) = struct.unpack_from("<I", data, start + 28)
        yield Entry(start, header_bytes + num_bytes, kind, arch)
        start += header_bytes + num_bytes
    if start != end:
        raise ValueError(f"entries of the container at {container.start:#x} end at {start:#x}")


def trim(data: bytearray, arch: int | None) -> Trimmed:
    """Keep the machine code of ``arch``; None: of nothing, for a module that is only imported."""
    found = {container: list(entries(data, container)) for container in containers(data)}
    others = [
        entry for inside in found.values() for entry in inside
        if entry.kind == _MACHINE_CODE and entry.arch != arch
    ]  # fmt: skip
    smallest = min(others, key=lambda entry: entry.num_bytes, default=None)
    filler = bytes(data[smallest.start : smallest.start + smallest.num_bytes]) if smallest else b""
    kept = without_code = 0
    for container, inside in found.items():
        chosen = [one for one in inside if one.kind == _MACHINE_CODE and one.arch == arch]
        blob = b"".join(bytes(data[one.start : one.start + one.num_bytes]) for one in chosen)
        if not chosen and inside:
            without_code += 1
            own = min(inside, key=lambda entry: entry.num_bytes)
            blob = bytes(data[own.start : own.start + own.num_bytes])
            if 0 < len(filler) <= container.num_bytes:
                blob = filler
        end = container.entries + container.num_bytes
        data[container.entries : end] = blob + bytes(container.num_bytes - len(blob))
        struct.pack_into("<Q", data, container.start + 8, len(blob))
        kept += len(blob)
    before = sum(container.num_bytes for container in found)
    return Trimmed(len(found), before, kept, without_code)
