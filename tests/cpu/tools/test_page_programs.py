"""Programs of the README and of the guide's page of the layer run as they are written.
Links, commands and names: test_docs.py.
"""

import re
from pathlib import Path

import warm

from deep_comm.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[3]
README = ROOT / "README.md"
LAYER = ROOT / "docs" / "guide" / "expert-parallel.md"


def program_of(page: Path, word: str) -> str:
    """Its one block of Python with this word."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (program,) = (block for block in blocks if word in block)
    return program


def said_by(program: str, num_ranks: int, folder: Path) -> str:
    """What the ranks print; each says "True" once."""
    script = folder / "program.py"
    script.write_text(program)
    done = warm.run(
        [*warm.torchrun(num_ranks), str(script)],
        capture_output=True, text=True, timeout=240, cwd=folder, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("True") == num_ranks, done.stdout
    return done.stdout


def test_the_example_of_the_readme_runs_and_is_short(tmp_path: Path) -> None:
    example = program_of(README, "deep_comm.Buffer")
    lines = [
        line
        for line in example.splitlines()
        if line.strip() and not line.startswith(("#", "import"))
    ]
    assert len(lines) <= 14, "the README promises a short example"
    all_direct = "assert buffer.stats().dispatch_rings + buffer.stats().combine_rings == 0\n"
    said_by(example + all_direct, 2, tmp_path)


def test_the_program_of_the_layer_runs(tmp_path: Path) -> None:
    assert "The Buffer holds" in said_by(program_of(LAYER, "init_process_group"), 3, tmp_path)


def test_commands_that_the_readme_names_exist() -> None:
    named = set(re.findall(r"`deep_comm (\w+)", README.read_text()))
    assert {"bench", "doctor", "simulate"} <= named <= set(COMMANDS)
