#!/usr/bin/env python3
"""Checks that deep_comm/ is layered: imports point downward, and no two modules need each other.

LEVELS lists the modules and packages of deep_comm/ from the lowest to the highest. A module may
import from its own package and from lower levels; those of one level do not see each other. Between
modules there is no cycle at all. Every import counts: at the top of a file, inside a function,
under `if TYPE_CHECKING:`, and importlib.import_module of a literal.

Usage: tools/check_imports.py [root of the checkout]
Prints one line per broken rule; the exit code is 1 if there is one, else 0.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "deep_comm"

# From the lowest to the highest. PACKAGE is its __init__.py, what a user gets from `import
# deep_comm`; what stands above it uses that, as a user does.
LEVELS = (
    ("_core", "_cuda", "_nvshmem", "_version"),
    ("errors", "triton"),
    ("settings",),
    ("events", "local", "log", "processes", "ranks", "trace"),
    ("backends", "config", "launch", "reference"),
    ("handle", "tuning"),
    ("context", "results"),
    ("low_latency", "normal", "symmetric"),
    ("internode", "tp"),
    ("buffer",),
    ("layer",),
    ("_public",),
    (PACKAGE,),
    ("compat", "scale", "simulate"),
    ("bench", "doctor", "integrations"),
    ("demo", "examples", "tune"),
    ("__main__",),
)
LEVEL_OF = {entry: level for level, entries in enumerate(LEVELS) for entry in entries}

Edge = tuple[str, int]  # the module that is imported, and the line


def modules_of(root: Path) -> dict[str, Path]:
    """Every module of the package, by its dotted name; native ones are their stubs."""
    modules = {}
    for path in sorted((root / PACKAGE).rglob("*.py*")):
        if path.suffix in (".py", ".pyi"):
            parts = path.relative_to(root).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def entry_of(module: str) -> str:
    """What stands for a module in LEVELS: the first name below the package."""
    return module.split(".")[1] if "." in module else module


def _targets(node: ast.AST, package: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(module, names from it) of an import; `package`: that relative ones start from."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, ()
    elif isinstance(node, ast.ImportFrom):
        parts = package.split(".")
        base = ".".join(parts[: len(parts) + 1 - node.level]) if node.level else ""
        module = ".".join(part for part in (base, node.module) if part)
        yield module, tuple(alias.name for alias in node.names)
    elif isinstance(node, ast.Call) and node.args:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        literal = node.args[0]
        if name == "import_module" and isinstance(literal, ast.Constant):
            yield str(literal.value), ()


def imports_of(name: str, path: Path, modules: dict[str, Path]) -> Iterator[Edge]:
    """What a module imports of the package. `from package import module` is that module."""
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        for module, names in _targets(node, package):
            if module.split(".")[0] != PACKAGE:
                continue
            below = [f"{module}.{name}" for name in names]
            if not names or any(each not in modules for each in below):
                yield module, node.lineno  # type: ignore[attr-defined]
            for each in below:
                if each in modules:
                    yield each, node.lineno  # type: ignore[attr-defined]


def _check_edge(source: str, target: str, modules: dict[str, Path]) -> str | None:
    if target not in modules:
        return f"imports {target}, which does not exist"
    here, there = entry_of(source), entry_of(target)
    if here == there or LEVEL_OF[there] < LEVEL_OF[here]:
        return None
    direction = "sideways" if LEVEL_OF[there] == LEVEL_OF[here] else "upward"
    return f"imports {target}: from {here} that points {direction}"


def cycles(edges: dict[str, list[Edge]]) -> Iterator[list[str]]:
    """A cycle through each module that leads to one, each once."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> Iterator[list[str]]:
        if module in path:
            yield path[path.index(module) :]
        elif module not in done:
            for target, _ in edges.get(module, []):
                yield from visit(target, [*path, module])
            done.add(module)

    found: set[frozenset[str]] = set()
    for start in edges:
        for cycle in visit(start, []):
            if frozenset(cycle) not in found:
                found.add(frozenset(cycle))
                yield cycle


def check(root: Path) -> list[str]:
    """Every broken rule in the checkout at `root`, one line each."""
    modules = modules_of(root)
    if not modules:
        return [f"{root / PACKAGE}: no modules found"]
    errors = [
        f"{module}: belongs to no level; put {entry_of(module)} into LEVELS"
        for module in modules
        if entry_of(module) not in LEVEL_OF
    ]
    if errors:
        return errors
    edges = {name: list(imports_of(name, path, modules)) for name, path in modules.items()}
    for name, targets in edges.items():
        where = modules[name].relative_to(root).as_posix()
        for target, line in targets:
            if error := _check_edge(name, target, modules):
                errors.append(f"{where}:{line}: {error}")
    for cycle in cycles(edges):
        errors.append(f"a cycle: {' -> '.join([*cycle, cycle[0]])}")
    return errors


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    errors = check(root)
    print("\n".join(errors) if errors else "every import points downward")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
