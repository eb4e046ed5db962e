"""csrc/ is layered (tools/check_includes.py), and the checker notices when it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import tool_modules

ROOT = Path(__file__).resolve().parents[3]


checker = tool_modules.load("check_includes.py")

# A tree that keeps the rules; each case below plants one line in one of its files.
TREE = {
    "device/arch/types.cuh": "#include <cstdint>\n",
    "device/arch/arch.cuh": '#include "types.cuh"\n#include "cuda.cuh"\n#include "host.cuh"\n',
    "device/arch/cuda.cuh": '#include <cuda_fp16.h>\ninline void fence() { asm volatile("x"); }\n',
    "device/arch/host.cuh": '#include "simt/executor.hpp"\n',
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


def check_with(tmp_path: Path, file: str = "", line: str = "") -> list[str]:
    for name, text in TREE.items():
        path = tmp_path / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + (line + "\n" if name == file else ""))
    if file not in TREE and file:
        path = tmp_path / "csrc" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(line + "\n")
    return checker.check(tmp_path)


def test_the_sources_of_this_checkout_keep_the_layers() -> None:
    assert checker.check(ROOT) == []


def test_a_layered_tree_passes(tmp_path: Path) -> None:
    assert check_with(tmp_path) == []


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
def test_a_planted_fault_is_found(tmp_path: Path, file: str, line: str, complaint: str) -> None:
    errors = check_with(tmp_path, file, line)
    assert len(errors) == 1, errors
    assert errors[0].startswith(f"csrc/{file}") and complaint in errors[0]


@pytest.mark.parametrize(
    "line",
    [
        '// #include "host/engine.hpp"',
        '/*\n#include "host/engine.hpp"\n*/',
        "// asm volatile and threadIdx, in prose",
        'const char* why = "asm volatile, threadIdx";',
    ],
)
def test_comments_and_strings_are_not_code(tmp_path: Path, line: str) -> None:
    assert check_with(tmp_path, "device/channel/ring.cuh", line) == []


def test_an_empty_tree_is_not_a_pass(tmp_path: Path) -> None:
    assert checker.check(tmp_path) != []
