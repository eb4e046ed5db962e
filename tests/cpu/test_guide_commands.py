"""Commands of the guide and the README, executed as written where this machine can."""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]

BLOCKS = [
    (page.name, block)
    for page in PAGES
    for block in re.findall(r"```(?:sh|bash)\n(.*?)```", page.read_text(), re.DOTALL)
]
_PAGE_OF = sorted(  # each once
    {
        " ".join(command.split()): page.name
        for page in PAGES
        for command in re.findall(
            r"`((?:python -m deep_comm|torchrun |tools/)[^`]*)`", page.read_text()
        )
        if " " in command
    }.items()
)
INLINE = [(page, command) for command, page in _PAGE_OF]

# By a word that only they have, and why not here. What is not named here runs.
ELSEWHERE = {
    "tools/demo    #": "builds an environment of its own; tests/cpu/test_demo.py runs the program",
    "HOST:29500": "two machines; the block of nodes.md runs the same on one",
    "127.0.0.1:29500": "tests/cpu/test_many_hosts.py, with a port that is free",
    "#SBATCH": "Slurm",
    "sglang": "a server and its model",
    "vllm serve": "a server and its model",
    "pip install .": "a build; tests/cpu/test_wheel.py",
}
INLINE_ELSEWHERE = {
    "HOST:29500": "two machines",
    "tools/": "builds an environment of its own",
    "your_program.py": "a name for the reader's",
    "torchrun --nproc-per-node 4 example.py": "tests/cpu/test_readme.py",
    "torchrun --nproc-per-node 4 layer.py": "tests/cpu/test_guide_layer.py",
    "--seed S": "S is the reader's; the block of testing.md has a number",
    "-m deep_comm.bench": "minutes here; tests/cpu/test_bench*.py run it with fewer sizes",
}

PROGRAM = """
import sys, torch.distributed as dist, deep_comm
dist.init_process_group("gloo")
with deep_comm.Buffer(dist.group.WORLD, 1 << 20, device="cpu") as buffer:
    # In one write: ranks share the pipe.
    sys.stdout.write(f"rank {buffer.rank} of {buffer.group_size}\\n")
    dist.barrier()
"""
# What programs of the blocks are; else PROGRAM.
PROGRAMS = {"from-deepep.md": "import deep_ep; print(deep_ep.Buffer, deep_ep.__file__)\n"}
# What they must say.
SAID = {
    "from-deepep.md": ["deep_comm.compat.legacy.Buffer"],
    "launching.md": [f"rank {rank} of 8" for rank in range(8)],
}


def _reason(text: str, table: dict[str, str]) -> str | None:
    return next((reason for word, reason in table.items() if word in text), None)


def _marks(text: str) -> list[pytest.MarkDecorator]:
    long = any(word in text for word in ("moe_transformer", "examples.overlap", "decode_graph"))
    return [pytest.mark.xdist_group("processes"), *([pytest.mark.slow] if long else [])]


def _parameters(texts: list[tuple[str, str]], table: dict[str, str]) -> list[object]:
    return [
        pytest.param(page, text, marks=_marks(text), id=f"{page}-{number}")
        for number, (page, text) in enumerate(texts)
        if _reason(text, table) is None
    ]


def _environment(folder: Path) -> dict[str, str]:
    """An environment that a command may install into; packages are found where they are."""
    venv.create(folder / "env", symlinks=True)
    binaries = folder / "env" / "bin"
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (packages / "here.pth").write_text("\n".join([*lines, str(ROOT)]) + "\n")
    torchrun = binaries / "torchrun"
    torchrun.write_text(f'#!/bin/sh\nexec {binaries}/python -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    return {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def _run(page: str, script: str, folder: Path) -> str:
    shutil.copy(ROOT / "README.md", folder)
    (folder / "program.py").write_text(PROGRAMS.get(page, PROGRAM))
    done = subprocess.run(
        ["bash", "-e", "-u", "-c", script], capture_output=True, text=True, timeout=280,
        cwd=folder, env=_environment(folder), check=False,
    )  # fmt: skip
    assert done.returncode == 0, (script, done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout + done.stderr


def _checked(block: str) -> str:
    """The block; commands that say "must fail" must, those in the background must not."""
    lines, background = [], False
    for line in block.replace("\\\n", " ").splitlines():
        command = line.split("  #")[0].strip()
        if "must fail" in line:
            command = f"! {command}\n[ $? = 0 ]"
        if command.endswith("&"):
            background = True
        lines.append(command)
    return "\n".join([*lines, "wait $!" if background else ""])


@pytest.mark.parametrize(("page", "block"), _parameters(BLOCKS, ELSEWHERE))
def test_blocks_run_as_written(page: str, block: str, tmp_path: Path) -> None:
    said = _run(page, _checked(block), tmp_path)
    for words in SAID.get(page, []):
        assert words in said, said


@pytest.mark.parametrize(("page", "command"), _parameters(INLINE, INLINE_ELSEWHERE))
def test_commands_in_the_text_run_as_written(page: str, command: str, tmp_path: Path) -> None:
    _run(page, command, tmp_path)


@pytest.mark.parametrize("block", [block for _, block in BLOCKS])
def test_blocks_are_shell(block: str) -> None:
    done = subprocess.run(["bash", "-n", "-c", block], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_reasons_are_needed_and_programs_run() -> None:
    for table, texts in ((ELSEWHERE, BLOCKS), (INLINE_ELSEWHERE, INLINE)):
        for word in table:
            assert any(word in text for _, text in texts), f"{word}: nothing is left out for it"
    assert len(_parameters(BLOCKS, ELSEWHERE)) >= 6
