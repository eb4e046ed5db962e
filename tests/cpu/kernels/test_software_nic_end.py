"""The software NIC, which is ordinary C++, over a stand-in of the CUDA runtime: its end."""

import re
import subprocess
from pathlib import Path

import pytest
from test_build_cuda import NVCC, ROOT, needs_nvcc


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("software_nic") / "end"
    sources = ["tests/native_cuda/software_nic_end.cpp", "csrc/host/software_nic_cuda.cpp"]
    subprocess.run(
        [str(NVCC), "-std=c++20", "-O1", "--cudart", "none", "-I", "csrc", *sources, "-o", made,
         "-Xcompiler", "-pthread"],
        cwd=ROOT, check=True, timeout=300,
    )  # fmt: skip
    return made


def end(program: Path, how: str) -> tuple[int, int, float]:
    """Rows that have come, the word behind them, and seconds."""
    ran = subprocess.run(
        [program, how], check=True, timeout=120, capture_output=True, text=True
    ).stdout
    found = re.fullmatch(r"rows (\d+) of 5003, word (\d+), ([\d.]+) s\n", ran)
    assert found is not None, ran
    return int(found[1]), int(found[2]), float(found[3])


@needs_nvcc
def test_what_was_posted_is_carried_out(program: Path) -> None:
    """A rank whose own part is over destroys its Buffer at once; its peers wait for its rows."""
    assert end(program, "posted")[:2] == (5003, 77)


@needs_nvcc
def test_a_descriptor_that_was_given_up_is_awaited_for_the_deadline(program: Path) -> None:
    rows, word, seconds = end(program, "given_up")
    assert (rows, word) == (5003, 77)
    assert 1.4 < seconds < 30


@needs_nvcc
def test_a_nic_that_has_failed_is_not_awaited(program: Path) -> None:
    rows, word, seconds = end(program, "failing")
    assert rows == 0 and word == 0
    assert seconds < 1.4
