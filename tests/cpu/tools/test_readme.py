"""The README's example runs, and its commands exist."""

import re
import subprocess
from pathlib import Path

import warm

from deep_comm.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text()


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    (example,) = (block for block in code_blocks("python") if "deep_comm.Buffer" in block)
    lines = [
        line
        for line in example.splitlines()
        if line.strip() and not line.startswith(("#", "import"))
    ]
    assert len(lines) <= 14, "the README promises a short example"
    script = tmp_path / "example.py"
    all_direct = "assert buffer.stats().dispatch_rings + buffer.stats().combine_rings == 0\n"
    script.write_text(example + all_direct)
    done = subprocess.run(
        [*warm.torchrun(2), str(script)], capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("True") == 2, done.stdout


def test_commands_that_it_names_exist() -> None:
    named = set(re.findall(r"`deep_comm (\w+)", README))
    assert {"bench", "doctor", "simulate"} <= named <= set(COMMANDS)
