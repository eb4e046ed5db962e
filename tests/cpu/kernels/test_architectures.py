"""DEEP_COMM_CUDA_ARCHS: which flags it becomes, what it refuses, which GPUs its kernels run on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deep_comm.backends.architectures import runs_on

ROOT = Path(__file__).resolve().parents[3]
FUNCTION = ROOT / "cmake" / "DeepCommArchitectures.cmake"
CMAKE = shutil.which(
    "cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
)
needs_cmake = pytest.mark.skipif(CMAKE is None, reason="no cmake")


def evaluate(architectures: str, folder: Path) -> subprocess.CompletedProcess[str]:
    assert CMAKE is not None
    script = folder / "script.cmake"
    script.write_text(
        f'include("{FUNCTION}")\n'
        'deep_comm_architectures("${ARCHS}" flags names)\n'
        'message(STATUS "${names} :${flags}")\n'
    )
    command = [CMAKE, f"-DARCHS={architectures}", "-P", str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@needs_cmake
@pytest.mark.parametrize(
    "architectures, names, codes",
    [
        ("90a", "90a ptx90", ["compute_90,code=[sm_90a,compute_90]"]),
        ("80", "80 ptx80", ["compute_80,code=[sm_80,compute_80]"]),
        ("80-virtual", "ptx80", ["compute_80,code=[compute_80]"]),
        (
            "80-real;90a;100f;120f-real",
            "80 90a ptx90 100f ptx100f 120f",
            [
                "compute_80,code=[sm_80]",
                "compute_90,code=[sm_90a,compute_90]",
                "compute_100f,code=[sm_100f,compute_100f]",
                "compute_120f,code=[sm_120f]",
            ],
        ),
    ],
)
def test_a_list_becomes_flags_of_nvcc(
    architectures: str, names: str, codes: list[str], tmp_path: Path
) -> None:
    answer = evaluate(architectures, tmp_path)
    flags = "".join(f' "-gencode=arch={code}"' for code in codes)
    assert answer.stdout == f"-- {names} :{flags}\n"


@needs_cmake
@pytest.mark.parametrize("wrong", ["75", "90", "90a 80", "sm_90a", "100a", "90a-ptx", "all"])
def test_what_the_kernels_are_not_written_for_is_refused(wrong: str, tmp_path: Path) -> None:
    answer = evaluate(f"80;{wrong}", tmp_path)
    assert answer.returncode != 0
    message = " ".join(answer.stderr.split())
    assert f"DEEP_COMM_CUDA_ARCHS names '{wrong}'" in message
    assert "80, 90a, 100f and 120f" in message


@needs_cmake
def test_an_empty_list_is_refused(tmp_path: Path) -> None:
    assert evaluate("", tmp_path).returncode != 0


@pytest.mark.parametrize(
    "architectures, good, bad",
    [
        ("90a ptx90", [(9, 0), (10, 0), (10, 3), (12, 0)], [(8, 0), (8, 9)]),
        ("90a", [(9, 0)], [(8, 0), (10, 0), (12, 0)]),
        ("80", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0), (10, 0)]),
        ("ptx80", [(8, 0), (8, 9), (9, 0), (12, 1)], [(7, 5)]),
        ("100f", [(10, 0), (10, 3)], [(9, 0), (11, 0), (12, 0)]),
        ("ptx100f", [(10, 0), (10, 3)], [(9, 0), (12, 0)]),
        ("80 120f", [(8, 6), (12, 0), (12, 1)], [(9, 0), (10, 0)]),
        ("", [], [(9, 0)]),
    ],
)
def test_kernels_run_on_the_gpus_that_their_code_suits(
    architectures: str, good: list[tuple[int, int]], bad: list[tuple[int, int]]
) -> None:
    assert all(runs_on(architectures, *capability) for capability in good)
    assert not any(runs_on(architectures, *capability) for capability in bad)


def test_only_code_from_an_architecture_on_may_count() -> None:
    assert runs_on("80 90a ptx80", 9, 0, least=90)
    assert runs_on("80 ptx90", 10, 0, least=90)
    assert not runs_on("80 ptx80", 9, 0, least=90)  # what runs there is made of sm_80's code
    assert not runs_on("90a ptx80", 10, 0, least=90)
