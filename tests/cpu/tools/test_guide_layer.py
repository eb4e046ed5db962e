"""The guide pages of the layer and of launching: their program runs, their commands and links
exist."""

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest
import warm

ROOT = Path(__file__).resolve().parents[3]
PAGES = ("expert-parallel.md", "launching.md")


def text_of(page: str) -> str:
    return (ROOT / "docs" / "guide" / page).read_text()


def test_the_program_runs_as_it_is_written(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", text_of("expert-parallel.md"), re.DOTALL)
    (program,) = (block for block in blocks if "init_process_group" in block)
    script = tmp_path / "layer.py"
    script.write_text(program)
    done = warm.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone",
         "--nproc-per-node", "3", str(script)],
        capture_output=True, text=True, timeout=240, cwd=tmp_path, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("True") == 3, done.stdout
    assert "The Buffer holds" in done.stdout


@pytest.mark.parametrize("page", PAGES)
def test_links_and_modules_exist(page: str) -> None:
    text = text_of(page)
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / "docs" / "guide" / link).exists(), link
    for module in re.findall(r"python -m (deep_comm(?:\.\w+)+)", text):
        assert importlib.util.find_spec(module) is not None, module
    for path in re.findall(r"`(deep_comm/[\w/]+\.py)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_python_is_python(page: str) -> None:
    for block in re.findall(r"```python\n(.*?)```", text_of(page), re.DOTALL):
        compile(block, page, "exec")


def test_variables_named_in_the_pages_are_registered() -> None:
    from deep_comm.settings import env

    known = {variable.name for variable in env.REGISTRY}
    for page in PAGES:
        assert set(re.findall(r"DEEP_COMM_\w+", text_of(page))) <= known
