"""The program of the guide's page of the layer runs. Links, commands and names: test_docs.py."""

import os
import re
import sys
from pathlib import Path

import warm

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "guide" / "expert-parallel.md"


def test_the_program_runs_as_it_is_written(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
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
