"""What tools/released_adapters rests on, without a network: files as released, stand-ins that
cannot pass for the real thing, comparisons that fail.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import warm
from released import fetch, kernels, package, ranks
from released.program import Checks, Mismatch, Release

RELEASE = Release("some-adapter", "1.0", "some_adapter", ("inner.real", "inner"))
REAL = """
from some_adapter.far import Base, limit, use
from some_adapter import near
from some_adapter.inner import NAME

class Derived(Base):
    def __init__(self):
        self.value = near.number

def annotated(x: Base | None, y: use.Deeper[int]) -> Base: ...

def calls():
    return use(1)

def asks():
    return 1 if limit else 2
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "some-adapter-1.0"
    lines = []
    for name, text in (("inner/real.py", REAL), ("inner/__init__.py", "NAME = 'inner'\n")):
        file = place / "some_adapter" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        lines.append(f"some_adapter/{name},sha256={digest.decode()}\n")
    (place / "RECORD").write_text("".join(lines))
    return tmp_path


@pytest.fixture
def real(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(package, "_finder", None)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    given = {"some_adapter.near": {"number": 3}}
    package.install("some_adapter", fetch.files_of(RELEASE, folder), given)
    yield package.released("some_adapter.inner.real")
    for name in [name for name in sys.modules if name.partition(".")[0] == "some_adapter"]:
        del sys.modules[name]


def test_released_modules_run_from_their_files(real, folder: Path) -> None:
    assert Path(real.__file__).is_relative_to(folder) and real.NAME == "inner"
    assert real.Derived().value == 3


def test_what_has_no_stand_in_can_be_named_but_not_used(real) -> None:
    assert real.annotated.__annotations__
    with pytest.raises(package.NotThere, match=r"some_adapter\.far\.use"):
        real.calls()
    with pytest.raises(package.NotThere, match=r"some_adapter\.far\.limit"):
        real.asks()
    with pytest.raises(package.NotThere, match=r"some_adapter\.anything\.at_all"):
        importlib.import_module("some_adapter.anything").at_all()


def test_a_release_is_taken_from_its_wheel(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By pip, from a folder in the place of PyPI: the modules asked for and nothing else."""
    shelf, taken = tmp_path / "shelf", tmp_path / "taken"
    shelf.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    with pytest.raises(fetch.NotFetched, match=r"some-adapter==1\.0: .*No matching distribution"):
        fetch.fetch(RELEASE, taken)
    place, info = folder / "some-adapter-1.0", "some_adapter-1.0.dist-info"
    with zipfile.ZipFile(shelf / "some_adapter-1.0-py3-none-any.whl", "w") as wheel:
        for file in place.rglob("*.py"):
            wheel.write(file, str(file.relative_to(place)))
        wheel.writestr("some_adapter/other.py", "")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: some-adapter\nVersion: 1.0"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        hashes = [f"{line}," for line in (place / "RECORD").read_text().splitlines()]
        wheel.writestr(f"{info}/RECORD", "\n".join([*hashes, "some_adapter/other.py,,", ""]))
    fetch.fetch(RELEASE, taken)
    assert set(fetch.files_of(RELEASE, taken)) == {"some_adapter.inner", "some_adapter.inner.real"}
    assert len(list(taken.rglob("*.py"))) == 2
    (taken / "some-adapter-1.0/some_adapter/inner/real.py").unlink()
    with pytest.raises(fetch.NotFetched, match=r"inner/real\.py is not in"):
        fetch.files_of(RELEASE, taken)
    fetch.fetch(RELEASE, taken)  # mends it
    assert len(fetch.files_of(RELEASE, taken)) == 2


def test_a_file_that_is_not_as_released_is_refused(folder: Path) -> None:
    file = folder / "some-adapter-1.0/some_adapter/inner/real.py"
    file.write_text(file.read_text() + "\n")
    with pytest.raises(fetch.NotFetched, match=r"inner/real\.py is not what was released"):
        fetch.files_of(RELEASE, folder)


def test_a_release_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(fetch.NotFetched, match=r"some-adapter==1\.0 is not in"):
        fetch.files_of(RELEASE, tmp_path)


def test_comparisons_fail_by_one_bit_and_by_nan() -> None:
    checks = Checks()
    x = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)
    checks.equal(x, x.float(), "same")
    with pytest.raises(Mismatch, match=r"off: 1 of 2 differ, first at \(0, 1\)"):
        checks.equal(x, torch.tensor([[1.0, 2.015625]]), "off")
    with pytest.raises(Mismatch, match="shape"):
        checks.equal(x, x[0], "shape")
    with pytest.raises(Mismatch, match="nan"):
        checks.close(torch.full_like(x, float("nan")), x, 0.5, "nan")
    with pytest.raises(Mismatch, match="no"):
        checks.true(False, "no")
    assert checks.num_compared == 1


def test_kernels_of_adapters_run_on_the_host() -> None:
    tl, triton = kernels.tl, kernels.triton

    @triton.jit
    def kernel(out, source, count, n, SIZE: tl.constexpr):
        place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        mask = place < n
        value = tl.load(source + place, mask=mask, other=-1)
        tl.store(out + place, tl.where(place < tl.load(count + 1 - 1), value, -1), mask=mask)

    source, out = torch.arange(10), torch.zeros(10, dtype=torch.int64)
    kernel[(triton.cdiv(10, 4),)](out, source, torch.tensor([7]), 10, SIZE=4)
    assert out.tolist() == [0, 1, 2, 3, 4, 5, 6, -1, -1, -1]


def test_every_program_has_a_name_and_a_pinned_release() -> None:
    programs = ranks.programs()
    assert len({program.name for program in programs}) == len(programs)
    for program in programs:
        assert program.release.pin.count("==") == 1
        assert all(name.partition(".")[0] for name in program.stand_ins())


def tool(*words: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, str(root / "tools/released_adapters"), *words]
    return warm.run(command, capture_output=True, text=True, timeout=60)


def test_the_tool_lists_what_runs_and_what_stands_in() -> None:
    listed = tool("--list", "sglang-v2")
    assert listed.returncode == 0, listed.stderr
    assert "sglang.srt.layers.moe.token_dispatcher.deepep_v2" in listed.stdout
    assert "deep_gemm_wrapper: DEEPGEMM_BLACKWELL" in listed.stdout


def test_the_tool_fails_where_a_release_is_not_there(tmp_path: Path) -> None:
    for words in (("--from", str(tmp_path)), ("--from", str(tmp_path), "--device", "cuda")):
        done = tool(*words, "lmdeploy")
        assert done.returncode == 1
        assert "lmdeploy==0.18.0 is not in" in done.stdout
    assert tool("no-such-program").returncode == 2
