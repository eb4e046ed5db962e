"""The litmus tests of the simulated memory, run on a GPU: it shows nothing that PTX forbids."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import litmus
import pytest
import torch
from litmus import Litmus
from torch.utils.cpp_extension import CUDA_HOME

ROOT = Path(__file__).resolve().parents[2]
NUM_LAUNCHES = 1000  # of 64 runs


@pytest.fixture(scope="module", params=["primitives of this GPU", "primitives of sm_80"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    own = "{}{}".format(*torch.cuda.get_device_capability())
    output = tmp_path_factory.mktemp("litmus") / "litmus"
    return compiled(output, "80" if "sm_80" in request.param else own, own)


def compiled(output: Path, virtual: str, real: str) -> Path:
    """Which primitives: what the PTX is compiled for says it (device/arch/cuda.cuh)."""
    subprocess.run(
        [f"{CUDA_HOME}/bin/nvcc", "-std=c++20", "-O3"]
        + [f"-gencode=arch=compute_{virtual},code=sm_{real}"]
        + ["--expt-relaxed-constexpr", f"-I{ROOT / 'csrc'}", "-o", str(output)]
        + [str(ROOT / "tests" / "native_cuda" / "litmus.cu")],
        check=True,
        timeout=240,
    )
    return output


def outcomes(program: Path, tests: Sequence[Litmus]) -> list[list[list[int]]]:
    """By test: words 8, 10, ... 22 of the memory, and how many runs have left these."""
    lines = [" ".join(map(str, (*test[:1], *test[2:], *test.params))) for test in tests]
    ended = subprocess.run(
        [program, str(NUM_LAUNCHES)],
        input="\n".join(lines) + "\n",
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(found) == len(tests)
    assert all(sum(seen[-1] for seen in one) == 64 * NUM_LAUNCHES for one in found)
    return found


def test_a_gpu_shows_nothing_that_ptx_forbids(program: Path) -> None:
    found = outcomes(program, litmus.FORBIDDEN)
    stale = {str(test): one for test, one in zip(litmus.FORBIDDEN, found, strict=True)}
    assert {name: one for name, one in stale.items() if any(seen[0] for seen in one)} == {}


def test_a_gpu_shows_a_missing_acquire(program: Path) -> None:
    """Otherwise the tests above would prove little. The readers' L1 caches hold old values."""
    tests = litmus.messages([(litmus.RELEASE_SYS, litmus.OTHER_BLOCK, litmus.RELAXED, 0)])
    assert any(seen[0] for seen in outcomes(program, tests)[0])


def test_words_and_their_readers_agree(program: Path) -> None:
    """Coherence; what a thread has read, it passes on; a store that loses a race."""
    alone = {"num_threads": 32}
    tests = [
        Litmus("coherence", [60], 2, 2, **alone),
        Litmus("reads_passed_on", [0], 3, **alone),
        Litmus("racing_stores", [], 3, **alone),
    ]
    for one in outcomes(program, tests):
        assert not any(any(seen[4:7]) for seen in one)  # words 16, 18, 20


def test_no_load_comes_late(program: Path) -> None:
    """PTX allows it; the simulation, whose threads run in order, cannot show it."""
    (seen,) = outcomes(program, [Litmus("load_buffering", [])])
    both_later = (2, 2)
    assert both_later not in {tuple(one[:2]) for one in seen}
