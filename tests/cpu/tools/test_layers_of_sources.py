"""deep_comm/ and csrc/ are layered (tools/check_imports.py, tools/check_includes.py), and the
checkers notice when they are not."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import tool_modules

ROOT = Path(__file__).resolve().parents[3]

imports = tool_modules.load("check_imports.py")
includes = tool_modules.load("check_includes.py")

# Trees that keep the rules; each case below plants one text in one of their files.
PACKAGE = {
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
SOURCES = {
    "device/arch/types.cuh": "#include <cstdint>\n",
    "device/arch/arch.cuh": '#include "types.cuh"\n#include "cuda.cuh"\n#include "host.cuh"\n',
    "device/arch/host.cuh": '#include "host_site.cuh"\n',
    "device/arch/cuda.cuh": '#include <cuda_fp16.h>\ninline void fence() { asm volatile("x"); }\n',
    "device/arch/host_site.cuh": '#include "simt/executor.hpp"\n',
    "device/layout/workspace.cuh": '#include "device/arch/types.cuh"\n',
    "device/sync/await.cuh": '#include "device/layout/workspace.cuh"\n',
    "device/channel/ring.cuh": '#include "device/sync/await.cuh"\n',
    "device/move/copy.cuh": '#include "device/arch/arch.cuh"\n',
    "device/intranode/dispatch.cuh": (
        '#include "device/channel/ring.cuh"\n#include "device/move/copy.cuh"\n'
    ),
    "device/internode/dispatch.cuh": '#include "device/channel/ring.cuh"\n',
    "simt/executor.hpp": '#include "device/arch/types.cuh"\n#include <ucontext.h>\n',
    "simt/executor.cpp": '#include "executor.hpp"\n',
    "host/engine.hpp": '#include "device/intranode/dispatch.cuh"\n#include "simt/executor.hpp"\n',
    "host/engine_cuda.cu": "#include <cuda_runtime_api.h>\nvoid f() { config.gridDim = 1; }\n",
    "host/calls/combine.cpp": '#include "host/engine.hpp"\n#include "device/arch/types.cuh"\n',
    "bind/torch/reader.hpp": '#include "host/engine.hpp"\n',
    "bind/core.cpp": '#include "host/calls/combine.cpp"\n#include "bind/torch/reader.hpp"\n',
}
TREES = {imports: ("deep_comm", PACKAGE), includes: ("csrc", SOURCES)}
of_both = pytest.mark.parametrize("checker", TREES)


def check_with(checker: ModuleType, tmp_path: Path, file: str = "", text: str = "") -> list[str]:
    folder, tree = TREES[checker]
    for name in {*tree, file} - {""}:
        path = tmp_path / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(tree.get(name, "") + (text + "\n" if name == file else ""))
    errors: list[str] = checker.check(tmp_path)
    return errors


@of_both
def test_this_checkout_keeps_the_layers(checker: ModuleType) -> None:
    assert checker.check(ROOT) == []


@of_both
def test_a_layered_tree_passes(checker: ModuleType, tmp_path: Path) -> None:
    assert check_with(checker, tmp_path) == []


@of_both
def test_an_empty_tree_is_not_a_pass(checker: ModuleType, tmp_path: Path) -> None:
    assert checker.check(tmp_path) != []


@pytest.mark.parametrize(
    ("checker", "file", "text"),
    [
        (imports, "errors.py", "# import deep_comm.bench"),
        (imports, "errors.py", '"""from deep_comm import bench"""'),
        *(
            (includes, "device/channel/ring.cuh", text)
            for text in (
                '// #include "host/engine.hpp"',
                '/*\n#include "host/engine.hpp"\n*/',
                "// asm volatile and threadIdx, in prose",
                'const char* why = "asm volatile, threadIdx";',
            )
        ),
    ],
)
def test_comments_and_strings_are_not_code(
    checker: ModuleType, tmp_path: Path, file: str, text: str
) -> None:
    assert check_with(checker, tmp_path, file, text) == []


# ---- deep_comm/ ----------------------------------------------------------------------------------


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
    errors = [
        error for error in check_with(imports, tmp_path, file, text) if "a cycle" not in error
    ]
    assert len(errors) == 1, errors
    line = (PACKAGE[file] + text).count("\n") + 1
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
    (error,) = check_with(imports, tmp_path, file, text)
    assert error.startswith("a cycle: ")
    path = error.removeprefix("a cycle: ").split(" -> ")
    assert path[0] == path[-1] and {name.rpartition(".")[2] for name in path} == members


def test_a_cycle_over_several_modules_is_found_from_outside_of_it(tmp_path: Path) -> None:
    check_with(imports, tmp_path, "bench/other.py", "from deep_comm.bench import another")
    (tmp_path / "deep_comm/bench/another.py").write_text("from deep_comm.bench import third")
    (tmp_path / "deep_comm/bench/third.py").write_text("from deep_comm.bench import other")
    (error,) = imports.check(tmp_path)
    assert sorted(set(error.split()) - {"a", "cycle:", "->"}) == [
        f"deep_comm.bench.{name}" for name in ("another", "other", "third")
    ]


def test_a_module_without_a_level_is_named(tmp_path: Path) -> None:
    (error,) = check_with(imports, tmp_path, "unheard.py", "import os")
    assert error.startswith("deep_comm.unheard: belongs to no level")


# ---- csrc/ ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("device/arch/types.cuh", '#include "device/layout/workspace.cuh"', "upward"),
        ("device/layout/workspace.cuh", '#include "device/sync/await.cuh"', "upward"),
        ("device/sync/await.cuh", '#include "../channel/ring.cuh"', "upward"),
        ("device/channel/ring.cuh", '#include "device/move/copy.cuh"', "sideways"),
        ("device/move/copy.cuh", '#include "device/channel/ring.cuh"', "sideways"),
        ("device/intranode/dispatch.cuh", '#include "device/internode/dispatch.cuh"', "sideways"),
        ("device/intranode/dispatch.cuh", '#include "host/engine.hpp"', "upward"),
        ("device/intranode/dispatch.cuh", '  #  include "simt/executor.hpp"', "host executor"),
        ("simt/executor.cpp", '#include "device/sync/await.cuh"', "knows no protocol"),
        ("host/engine.hpp", '#include "bind/core.cpp"', "upward"),
        ("host/engine.hpp", '#include "calls/combine.cpp"', "upward"),
        ("host/calls/combine.cpp", '#include "bind/torch/reader.hpp"', "upward"),
        ("device/channel/ring.cuh", "#include <cuda_runtime.h>", "more than C++'s own"),
        ("device/channel/ring.cuh", "#include <cuda/atomic>", "more than C++'s own"),
        ("device/channel/ring.cuh", '#include "device/sync/missing.cuh"', "not in csrc/"),
        ("device/channel/ring.cuh", 'void f() { asm("membar.sys;"); }', "assembly"),
        ("host/engine_cuda.cu", 'void g() { asm("trap;"); }', "assembly"),
        ("device/move/copy.cuh", "int lane() { return threadIdx.x % 32; }", "intrinsic"),
        ("device/sync/await.cuh", "void f() { __threadfence_system(); }", "intrinsic"),
        ("device/move/copy.cuh", "void f(const int* __restrict__ x);", "aliasing"),
        ("device/sync/await.cuh", "int f(volatile int* x);", "aliasing"),
        ("device/unknown/file.cuh", "// nothing", "belongs to no layer"),
    ],
)
def test_a_planted_include_or_word_is_found(
    tmp_path: Path, file: str, line: str, complaint: str
) -> None:
    errors = check_with(includes, tmp_path, file, line)
    assert len(errors) == 1, errors
    assert errors[0].startswith(f"csrc/{file}") and complaint in errors[0]
