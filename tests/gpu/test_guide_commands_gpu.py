"""Commands and programs of the guide and the README, executed as written where there are GPUs."""

import subprocess
from pathlib import Path

import pytest
import torch
from guide import BLOCKS, INLINE, PROGRAMS_OF_PAGES, checked, environment, run_script

# By a word of theirs: how many GPUs they take, and what they must say, if they are run here.
BLOCKS_HERE = {
    "moe_transformer": (4, "on 4 ranks (cuda)"),
    "decode_graph": (2, ""),
    "examples overlap": (2, "all ways give the same results"),
}
COMMANDS_HERE = {
    "deep_comm.doctor": (2, ""),
    "dispatch_combine --ranks 3": (3, ""),
    "--mode nodes --ranks-per-node 2": (4, "every bit and every byte as it should be"),
    "deep_comm bench --quick": (4, "targets on 4 GPUs"),
}
# What else takes minutes: deep_comm bench without --quick, over all layer sizes.


def _chosen(texts: list[tuple[str, str]], here: dict[str, tuple[int, str]]) -> list[object]:
    return [
        pytest.param(page, text, said, marks=pytest.mark.gpu(num_devices=needed), id=word)
        for word, (needed, said) in here.items()
        for page, text in texts
        if word in text and "nvshmem" not in text
    ]


@pytest.mark.parametrize(("page", "block", "said"), _chosen(BLOCKS, BLOCKS_HERE))
def test_blocks(page: str, block: str, said: str, tmp_path: Path) -> None:
    assert said in run_script(page, checked(block), tmp_path)


@pytest.mark.parametrize(("page", "command", "said"), _chosen(INLINE, COMMANDS_HERE))
def test_commands_in_the_text(page: str, command: str, said: str, tmp_path: Path) -> None:
    assert said in run_script(page, command, tmp_path)


@pytest.mark.parametrize("name", PROGRAMS_OF_PAGES)
def test_programs(name: str, tmp_path: Path) -> None:
    """With as many GPUs as the page says, or as there are; nodes.py asks for the host target."""
    program = PROGRAMS_OF_PAGES[name]
    (tmp_path / name).write_text(program)
    wanted = 2 if name in ("by_hand.py", "decode.py") else 4
    if name != "nodes.py":
        wanted = min(wanted, torch.cuda.device_count())
    done = subprocess.run(
        ["torchrun", "--standalone", "--nproc-per-node", str(wanted), name],
        capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment(tmp_path),
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("True") == wanted, done.stdout
