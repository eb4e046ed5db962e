"""Commands of the guide and the README, executed as written where this machine can."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from guide import BENCHES, BLOCKS, INLINE, SAID, checked, run_script

from deep_comm.bench import options

# By a word that only they have, and why not here. What is not named here runs.
ELSEWHERE = {
    "tools/demo    #": "builds an environment of its own; test_demo.py runs the program",
    "HOST:29500": "two machines; the block of nodes.md runs the same on one",
    "127.0.0.1:29500": "test_many_hosts.py, with a port that is free",
    "#SBATCH": "Slurm; launching.md says where both scripts ran",
    "sglang": "a server and its model",
    "vllm serve": "a server and its model",
    "tools/released_adapters": "files from PyPI; test_released.py has the tool's words",
    "tools/servers": "released servers and two GPUs; test_servers_*.py test its parts",
    "tools/rival_tests": "DeepEP's tests, by git; test_rival.py tests what it relies on",
    "DEEP_COMM_FIND_RACES": "a build; test_simt_races.py runs fewer schedules in it",
    "tools/mutate": "minutes on 32 cores; test_mutate.py",
    "pip install .": "a build; test_wheel.py",
}
INLINE_ELSEWHERE = {
    "HOST:29500": "two machines",
    "tools/": "builds an environment of its own",
    "your_program.py": "a name for the reader's",
    "torchrun --nproc-per-node 4 example.py": "test_page_programs.py",
    "torchrun --nproc-per-node 4 layer.py": "test_page_programs.py",
    "--seed S": "S is the reader's; the block of testing.md has a number",
    "deep_comm tune": "minutes; test_bench.py runs it with fewer sizes",
    "deep_comm bench": "minutes here; test_bench*.py run it with fewer sizes",
}


def _reason(text: str, table: dict[str, str]) -> str | None:
    return next((reason for word, reason in table.items() if word in text), None)


def _marks(text: str) -> list[pytest.MarkDecorator]:
    long = any(word in text for word in ("moe_transformer", "examples overlap", "decode_graph"))
    return [pytest.mark.slow] if long else []


def _parameters(texts: list[tuple[str, str]], table: dict[str, str]) -> list[object]:
    return [
        pytest.param(page, text, marks=_marks(text), id=f"{page}-{number}")
        for number, (page, text) in enumerate(texts)
        if _reason(text, table) is None
    ]


@pytest.mark.parametrize(("page", "block"), _parameters(BLOCKS, ELSEWHERE))
def test_blocks_run_as_written(page: str, block: str, tmp_path: Path) -> None:
    said = run_script(page, checked(block), tmp_path)
    for words in SAID.get(page, []):
        assert words in said, said


@pytest.mark.parametrize(("page", "command"), _parameters(INLINE, INLINE_ELSEWHERE))
def test_commands_in_the_text_run_as_written(page: str, command: str, tmp_path: Path) -> None:
    run_script(page, command, tmp_path)


@pytest.mark.parametrize("block", [block for _, block in BLOCKS])
def test_blocks_are_shell(block: str) -> None:
    done = subprocess.run(["bash", "-n", "-c", block], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("module", "arguments"), BENCHES, ids=lambda part: " ".join(part))
def test_benches_know_their_arguments(module: str, arguments: tuple[str, ...]) -> None:
    """What takes minutes to run, or GPUs: every word is one that the bench has."""
    if module == "bench.tables":
        assert arguments and all(word.endswith(".json") for word in arguments)
    elif "--from" in arguments:  # of what the block around it has measured, which runs above
        assert len(arguments) == 4 and "--plot" in arguments
    else:
        assert module == "bench"
        options.parse(["--device", "cuda", *arguments])


def test_benches_were_found() -> None:
    """The performance page's lines that run over two of its own are among them."""
    assert len(BENCHES) >= 15
    assert any("combine expanded" in arguments[-1] for _, arguments in BENCHES if arguments)
    with pytest.raises(SystemExit):
        options.parse(["--no-such-word"])


def test_reasons_are_needed_and_programsrun_script() -> None:
    for table, texts in ((ELSEWHERE, BLOCKS), (INLINE_ELSEWHERE, INLINE)):
        for word in table:
            assert any(word in text for _, text in texts), f"{word}: nothing is left out for it"
    assert len(_parameters(BLOCKS, ELSEWHERE)) >= 6
