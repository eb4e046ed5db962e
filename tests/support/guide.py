"""Commands of the guide and the README: what they are, and how they are executed as written."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import site
import subprocess
import venv
from pathlib import Path

import warm

ROOT = Path(__file__).resolve().parents[2]
_DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *sorted((_DOCS / "guide").glob("*.md")),
    *sorted((_DOCS / "recipes").glob("*.md")),
    _DOCS / "design" / "testing.md",
]

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
            r"`((?:deep_comm |python -m deep_comm|torchrun |tools/)[^`]*)`", page.read_text()
        )
        if " " in command
    }.items()
)
INLINE = [(page, command) for command, page in _PAGE_OF]


def _bench_calls(text: str) -> list[tuple[str, str]]:
    """Of blocks line by line, of code in the text from quote to quote."""
    call = r"^[^#]*?(?:-m deep_comm\.|deep_comm )(bench(?:\.\w+)?)(\s[^`]*)?$"
    parts = text.split("```")
    lines = [line for block in parts[1::2] for line in block.replace("\\\n", "").splitlines()]
    quoted = [code for part in parts[::2] for code in part.split("`")[1::2]]
    return [found.groups("") for code in (*lines, *quoted) if (found := re.search(call, code))]


# Arguments of every call of a bench, on the performance pages as well: (module, arguments).
BENCHES = sorted(
    {
        (module, tuple(shlex.split(arguments, comments=True)))
        for page in [*PAGES, *sorted(_DOCS.glob("performance*.md"))]
        for module, arguments in _bench_calls(page.read_text())
    }
)

# Whole programs, by the name under which their page says to save them.
PROGRAMS_OF_PAGES = {
    name: block
    for page in PAGES
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    if "init_process_group" in block and "deep_comm." in block
    for name in re.findall(r"torchrun --nproc-per-node \d+ (\w+\.py)", block + page.read_text())[:1]
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


def environment(folder: Path) -> dict[str, str]:
    """An environment that a command may install into; packages are found where they are."""
    venv.create(folder / "env", symlinks=True)
    binaries = folder / "env" / "bin"
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (packages / "here.pth").write_text("\n".join([*lines, str(ROOT)]) + "\n")
    return _with_commands(binaries)


def warm_environment(folder: Path) -> dict[str, str]:
    """The same for commands that install nothing, and sooner."""
    binaries = folder / "bin"
    binaries.mkdir()
    (binaries / "python").symlink_to(warm.python())
    return _with_commands(binaries)


def _with_commands(binaries: Path) -> dict[str, str]:
    """What pip installs as scripts."""
    for name, module in (("torchrun", "torch.distributed.run"), ("deep_comm", "deep_comm")):
        script = binaries / name
        script.write_text(f'#!/bin/sh\nexec {binaries}/python -m {module} "$@"\n')
        script.chmod(0o755)
    return _variables(binaries)


def _variables(binaries: Path) -> dict[str, str]:
    return {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def run_script(page: str, script: str, folder: Path) -> str:
    shutil.copy(ROOT / "README.md", folder)
    (folder / "program.py").write_text(PROGRAMS.get(page, PROGRAM))
    installs = "compat" in script or "pip" in script
    make = environment if installs or not warm.is_offered() else warm_environment
    done = subprocess.run(
        ["bash", "-e", "-u", "-c", script], capture_output=True, text=True, timeout=280,
        cwd=folder, check=False, env=make(folder),
    )  # fmt: skip
    assert done.returncode == 0, (script, done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout + done.stderr


def checked(block: str) -> str:
    """The block; commands that say "must fail" must, those in the background must not."""
    lines, background = [], False
    for line in block.replace("\\\n", "").splitlines():
        command = line.split("  #")[0].strip()
        if "must fail" in line:
            command = f"! {command}\n[ $? = 0 ]"
        if command.endswith("&"):
            background = True
        lines.append(command)
    return "\n".join([*lines, "wait $!" if background else ""])
