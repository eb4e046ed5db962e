#!/usr/bin/env python3
"""Checks that csrc/ is layered: includes point downward, and the hardware is behind one door.

    arch -> layout -> sync -> {channel, move} -> {intranode, internode, low_latency, tp,
    bench, examples} -> host -> host/calls -> bind

A file may include its own folder and the folders to its left. Folders in one pair of braces do not
see each other. The host executor, csrc/simt, sees only itself and arch, and is seen only by
device/arch/host_site.cuh, host and bind. Below host nothing but arch includes a vendor's header,
writes assembly or names an intrinsic.

Usage: tools/check_includes.py [root of the checkout]
Prints one line per broken rule; the exit code is 1 if there is one, else 0.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

# Folder of csrc/ -> its place in the order. Equal places do not see each other.
LEVELS = {
    "device/arch": 0,
    "device/layout": 1,
    "device/sync": 2,
    "device/channel": 3,
    "device/move": 3,
    "device/intranode": 4,
    "device/internode": 4,
    "device/low_latency": 4,
    "device/tp": 4,
    "device/bench": 4,
    "device/examples": 4,
    "host": 5,
    "host/calls": 6,
    "bind": 7,
}
SIMT = "simt"
SIMT_USERS = ("host", "host/calls", "bind", SIMT)
SIMT_DOOR = "device/arch/host_site.cuh"

SUFFIXES = {".cuh", ".cu", ".hpp", ".cpp", ".h", ".S"}

# A header of the C++ standard library; a vendor's has a folder or a suffix.
STANDARD_HEADER = re.compile(r"[a-z_0-9]+")

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)
COMMENT_OR_STRING = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL
)

ASSEMBLY = re.compile(r"\b(?:asm|__asm|__asm__)\b")
INTRINSIC = re.compile(
    # Not after a dot: fields of the launch configuration have such names too.
    r"(?<![.>])\b(?:threadIdx|blockIdx|blockDim|gridDim|warpSize"
    r"|__syncthreads\w*|__syncwarp|__threadfence\w*|__activemask|__trap|__nanosleep|clock64"
    r"|__(?:shfl|ballot|any|all|match|reduce|vote)\w*_sync"
    r"|__ld(?:g|cg|ca|cs|lu|cv)|__st(?:wb|cg|cs|wt)|atomic[A-Z]\w*"
    r"|__popc(?:ll)?|__ffs(?:ll)?|__clz(?:ll)?"
    r"|__nvvm\w*|__cvta\w*|__bfloat16\w*|__half\w*)\b"
)
# Hides from the compiler that a peer may write, or promises that it does not: see arch.cuh.
ALIASING = re.compile(r"\b(?:volatile|__restrict__|__restrict)\b")


def without_comments(text: str) -> str:
    """The code alone: comments and the contents of literals blanked, lines kept."""
    return COMMENT_OR_STRING.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def layer_of(path: str) -> str | None:
    """The layer of a path relative to csrc/: "device/sync", "host", "simt", or None.

    A folder that is no layer of its own belongs to the one it lies in.
    """
    parts = Path(path).parts[:-1]
    for depth in (2, 1):
        layer = "/".join(parts[:depth])
        if layer == SIMT or layer in LEVELS:
            return layer
    return None


def _resolve(csrc: Path, including: Path, included: str) -> str | None:
    for folder in (including.parent, csrc):
        path = (folder / included).resolve()
        if path.is_file() and path.is_relative_to(csrc):
            return path.relative_to(csrc).as_posix()
    return None


def _check_edge(source: str, target: str) -> str | None:
    source_layer, target_layer = layer_of(source), layer_of(target)
    if target_layer is None:
        return f"includes {target}, which belongs to no layer"
    if source_layer == target_layer:
        return None
    if target_layer == SIMT:
        if source_layer in SIMT_USERS or source == SIMT_DOOR:
            return None
        return f"includes {target}: only {SIMT_DOOR}, host and bind may see the host executor"
    if source_layer == SIMT:
        if target_layer == "device/arch":
            return None
        return f"includes {target}: the host executor knows no protocol, only device/arch"
    assert source_layer is not None
    if LEVELS[target_layer] < LEVELS[source_layer]:
        return None
    direction = "sideways" if LEVELS[target_layer] == LEVELS[source_layer] else "upward"
    return f"includes {target}: from {source_layer} that points {direction}"


def _check_file(csrc: Path, path: Path) -> Iterator[str]:
    name = path.relative_to(csrc).as_posix()
    layer = layer_of(name)
    if layer is None:
        yield f"csrc/{name}: belongs to no layer; the layers are {', '.join(LEVELS)}, {SIMT}"
        return
    text = path.read_text()
    code = without_comments(text)
    is_below_host = layer in LEVELS and LEVELS[layer] < LEVELS["host"]
    is_door = layer == "device/arch"

    for match in INCLUDE.finditer(text):
        where = f"csrc/{name}:{text.count(chr(10), 0, match.start()) + 1}"
        quoted, system = match[1], match[2]
        if code[match.start() : match.end()].strip() == "":
            continue  # inside a comment
        if system is not None:
            if is_below_host and not is_door and not STANDARD_HEADER.fullmatch(system):
                yield f"{where}: includes <{system}>; only device/arch may see more than C++'s own"
            continue
        target = _resolve(csrc, path, quoted)
        if target is None:
            yield f'{where}: includes "{quoted}", which is not in csrc/'
        elif error := _check_edge(name, target):
            yield f"{where}: {error}"

    if is_door or path.suffix == ".S":
        return
    patterns = [(ASSEMBLY, "assembly"), (INTRINSIC, "a CUDA intrinsic")]
    if is_below_host:
        patterns.append((ALIASING, "a promise about aliasing"))
    for pattern, what in patterns:
        for match in pattern.finditer(code):
            line = code.count("\n", 0, match.start()) + 1
            yield f"csrc/{name}:{line}: {match[0]} is {what}; only device/arch may use one"


def check(root: Path) -> list[str]:
    """Every broken rule in the checkout at `root`, one line each."""
    csrc = (root / "csrc").resolve()
    files = sorted(path for path in csrc.rglob("*") if path.suffix in SUFFIXES)
    if not files:
        return [f"{csrc}: no sources found"]
    return [error for path in files for error in _check_file(csrc, path)]


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    errors = check(root)
    print("\n".join(errors) if errors else "every include points downward")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
