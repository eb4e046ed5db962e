"""deep_comm/ is layered (tools/check_imports.py), and the checker notices when it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import tool_modules

ROOT = Path(__file__).resolve().parents[3]


checker = tool_modules.load("check_imports.py")

# A tree that keeps the rules; each case below plants one text in one of its files.
TREE = {
    "__init__.py": "from deep_comm.buffer import Buffer\nfrom deep_comm import errors\n",
    "_core.pyi": "import torch\n",
    "errors.py": "def load():\n    from deep_comm._core import ErrorRecord\n",
    "settings/__init__.py": "",
    "settings/env.py": "import os\nfrom deep_comm import errors\nfrom .checks import tensor\n",
    "settings/checks.py": "from torch import Tensor\nfrom ..errors import ArgumentError\n",
    "ranks/__init__.py": "from deep_comm.ranks import topology\n",
    "ranks/topology.py": "from deep_comm.settings import checks, env\n",
    "trace/__init__.py": "import deep_comm._core\n",
    "buffer.py": "from deep_comm.ranks.topology import Topology\n",
    "bench/__init__.py": "",
    "bench/__main__.py": "from deep_comm import Buffer\nfrom deep_comm.bench import tables\n",
    "bench/tables.py": "import deep_comm\n",
}


def check_with(tmp_path: Path, file: str = "", text: str = "") -> list[str]:
    for name in {*TREE, file} - {""}:
        path = tmp_path / "deep_comm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TREE.get(name, "") + (text + "\n" if name == file else ""))
    errors: list[str] = checker.check(tmp_path)
    return errors


def test_the_package_of_this_checkout_keeps_the_levels() -> None:
    assert checker.check(ROOT) == []


def test_a_layered_tree_passes(tmp_path: Path) -> None:
    assert check_with(tmp_path) == []


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("errors.py", "from deep_comm.settings import env", "env: from errors that points upward"),
        ("errors.py", "from deep_comm import settings", "upward"),
        ("settings/env.py", "import deep_comm.ranks.topology", "upward"),
        ("settings/env.py", "from ..ranks.topology import Topology", "upward"),
        ("settings/env.py", "from .. import buffer", "upward"),
        ("ranks/topology.py", "from deep_comm import Buffer", "imports deep_comm: from ranks"),
        ("ranks/topology.py", "import deep_comm", "upward"),
        ("ranks/topology.py", "from deep_comm import trace", "sideways"),
        ("trace/__init__.py", "def f():\n    from deep_comm.buffer import Buffer", "upward"),
        ("buffer.py", "if TYPE_CHECKING:\n    from deep_comm.bench import tables", "upward"),
        ("buffer.py", "if TYPE_CHECKING:\n    from deep_comm import Buffer", "upward"),
        ("buffer.py", "importlib.import_module('deep_comm.bench.tables')", "upward"),
        ("buffer.py", "from deep_comm.ranks.missing import x", "which does not exist"),
        ("_core.pyi", "from deep_comm.errors import ArgumentError", "upward"),
    ],
)
def test_a_planted_import_is_found(tmp_path: Path, file: str, text: str, complaint: str) -> None:
    errors = [error for error in check_with(tmp_path, file, text) if "a cycle" not in error]
    assert len(errors) == 1, errors
    line = (TREE[file] + text).count("\n") + 1
    assert errors[0].startswith(f"deep_comm/{file}:{line}: ") and complaint in errors[0]


@pytest.mark.parametrize(
    ("file", "text", "members"),
    [
        ("settings/checks.py", "from deep_comm.settings import env", {"env", "checks"}),
        ("settings/checks.py", "def f():\n    from .env import get", {"env", "checks"}),
        (
            "bench/tables.py",
            "if TYPE_CHECKING:\n    from deep_comm.bench.__main__ import main",
            {"__main__", "tables"},
        ),
        ("ranks/topology.py", "from deep_comm.ranks import size", {"ranks", "topology"}),
        ("bench/tables.py", "from deep_comm.bench.tables import align", {"tables"}),
    ],
)
def test_a_planted_cycle_is_found(tmp_path: Path, file: str, text: str, members: set[str]) -> None:
    (error,) = check_with(tmp_path, file, text)
    assert error.startswith("a cycle: ")
    path = error.removeprefix("a cycle: ").split(" -> ")
    assert path[0] == path[-1] and {name.rpartition(".")[2] for name in path} == members


def test_a_cycle_over_several_modules_is_found_from_outside_of_it(tmp_path: Path) -> None:
    check_with(tmp_path, "bench/other.py", "from deep_comm.bench import another")
    (tmp_path / "deep_comm/bench/another.py").write_text("from deep_comm.bench import third")
    (tmp_path / "deep_comm/bench/third.py").write_text("from deep_comm.bench import other")
    (error,) = checker.check(tmp_path)
    assert sorted(set(error.split()) - {"a", "cycle:", "->"}) == [
        f"deep_comm.bench.{name}" for name in ("another", "other", "third")
    ]


def test_a_module_without_a_level_is_named(tmp_path: Path) -> None:
    (error,) = check_with(tmp_path, "unheard.py", "import os")
    assert error.startswith("deep_comm.unheard: belongs to no level")


@pytest.mark.parametrize("text", ["# import deep_comm.bench", '"""from deep_comm import bench"""'])
def test_comments_and_strings_are_not_code(tmp_path: Path, text: str) -> None:
    assert check_with(tmp_path, "errors.py", text) == []


def test_an_empty_tree_is_not_a_pass(tmp_path: Path) -> None:
    assert checker.check(tmp_path) != []
