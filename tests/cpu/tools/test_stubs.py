"""The .pyi of a native module has nothing that the module has not, and _core's leaves nothing out;
_cuda's leaves out what _core's has described.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest

import deep_comm

PACKAGE = Path(deep_comm.__file__).parent


def described(body: list[ast.stmt], is_wanted: Any) -> set[str]:
    names = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if is_wanted(name)}


def is_public(name: str) -> bool:
    return not name.startswith("_")


@pytest.mark.parametrize("name", ["_core", "_cuda", "_nvshmem"])
def test_a_stub_describes_what_its_module_has(name: str) -> None:
    try:
        module = importlib.import_module(f"deep_comm.{name}")
    except ImportError as missing:
        pytest.skip(str(missing))
    tree = ast.parse((PACKAGE / f"{name}.pyi").read_text())
    # Types that the module does not name are written down as classes of the stub alone.
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    stub_only = {node.name for node in classes if not hasattr(module, node.name)}
    in_stub = described(tree.body, is_public) - stub_only
    at_runtime = set(filter(is_public, dir(module)))
    assert in_stub <= at_runtime
    assert name == "_cuda" or in_stub == at_runtime
    for node in classes:
        if node.name in stub_only:
            continue
        found = {member for member in vars(getattr(module, node.name)) if is_public(member)}
        members = described(node.body, is_public)
        assert members <= found, node.name
        assert name == "_cuda" or members == found, node.name
