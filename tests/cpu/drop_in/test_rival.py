"""What tools/rival_tests rests on, without a network: files as published, verdicts that fail."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
import tool_modules
import warm
from rival import files, run
from rival.parts import PARTS, Part

PROGRAM = """
import sys, time
import deep_ep
from deep_ep.utils.helper import answer
assert answer == 42 and sys.argv[1:3] == ["--num-processes", "2"]
print("asked", flush=True)
if "--fail" in sys.argv:
    raise AssertionError("not equal")
while "--endless" in sys.argv:
    print("round", flush=True)
    time.sleep(0.05)
"""


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> files.Release:
    """Of a repository with one test and one helper, whose files are in tmp_path / "fetched"."""
    texts = {"tests/test_it.py": PROGRAM, "deep_ep/utils/helper.py": "answer = 42\n"}
    repository = tmp_path / "repository"
    for path, text in texts.items():
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_text(text)

    def git(*command: str) -> str:
        named = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(
            ["git", *named, *command], cwd=repository, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "one")
    hashes = {path: hashlib.sha256(text.encode()).hexdigest() for path, text in texts.items()}
    made = files.Release(git("rev-parse", "HEAD"), hashes)
    monkeypatch.setattr(run, "V2", made)
    files.fetch(made, tmp_path / "fetched", str(repository))
    return made


def verdict(tmp_path: Path, part: Part, limit_s: float) -> run.Verdict:
    site = tmp_path / "site"
    run.make_site(tmp_path / "fetched", site)
    return run.run(part, tmp_path / "fetched", site, "cpu", 2, limit_s, tmp_path / "log")


def test_a_test_runs_over_the_drop_in_with_its_helpers(release, tmp_path: Path) -> None:
    assert verdict(tmp_path, Part("it", release, "tests/test_it.py"), 60).failure is None


def test_a_test_that_fails_is_a_failure_with_its_words(release, tmp_path: Path) -> None:
    failure = verdict(tmp_path, Part("it", release, "tests/test_it.py", ("--fail",)), 60).failure
    assert failure is not None and "AssertionError: not equal" in failure and "[1]" in failure


@pytest.mark.parametrize("wanted, passes", [(2, True), (10**6, False)])
def test_a_test_without_end_must_have_come_far_enough(
    wanted: int, passes: bool, release, tmp_path: Path
) -> None:
    part = Part("it", release, "tests/test_it.py", ("--endless",), endless=("round", wanted))
    ended = verdict(tmp_path, part, 60 if passes else 5)
    assert (ended.failure is None) == passes
    assert (ended.seconds < 60) or not passes


def test_a_test_that_does_not_end_is_a_failure(release, tmp_path: Path) -> None:
    part = Part("it", release, "tests/test_it.py", ("--endless",))
    failure = verdict(tmp_path, part, 3).failure
    assert failure is not None and "had not ended after 3 s" in failure


def test_files_are_those_that_were_published(release, tmp_path: Path) -> None:
    folder = tmp_path / "fetched"
    files.files_of(release, folder)
    changed = folder / release.short / "tests/test_it.py"
    changed.write_text(PROGRAM + "\n")
    with pytest.raises(files.NotFetched, match="not what was published"):
        files.files_of(release, folder)
    changed.unlink()
    with pytest.raises(files.NotFetched, match="is not in"):
        files.files_of(release, folder)
    with pytest.raises(files.NotFetched, match="git"):
        files.fetch(release, folder, str(tmp_path))


def test_parts_have_names_of_their_own_and_files_that_are_pinned() -> None:
    assert len({part.name for part in PARTS}) == len(PARTS)
    for part in PARTS:
        assert part.program in part.release.hashes
    for release in files.RELEASES:
        assert all(len(digest) == 64 for digest in release.hashes.values())


def test_the_tool_refuses_what_it_does_not_know() -> None:
    command = [sys.executable, str(tool_modules.TOOLS / "rival_tests"), "nothing"]
    done = warm.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "no test nothing" in done.stderr


def test_the_last_lines_say_what_became_of_each_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tool_modules.TOOLS))
    loader = SourceFileLoader("rival_tests_tool", str(tool_modules.TOOLS / "rival_tests"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    tool = importlib.util.module_from_spec(spec)
    loader.exec_module(tool)
    monkeypatch.setattr(run, "make_site", lambda *given: None)
    monkeypatch.setattr(
        run, "run", lambda part, *given: run.Verdict(1.0, part.name if part.name == "b" else None)
    )
    parts = [
        Part("a", files.V1, "p"),
        Part("b", files.V1, "p"),
        Part("c", files.V1, "p", least_ranks=6),
        Part("d", files.V1, "p", least_ranks=16, num_nodes=2),
    ]
    options = argparse.Namespace(ranks=2, device="cuda", limit_s=1.0)
    assert not tool.run_all(parts, tmp_path, options)
    *lines, last = capsys.readouterr().out.splitlines()[-5:]
    became = ["passed", "FAILED", "needs 6 GPUs", "needs 16 GPUs of 2 hosts"]
    assert [line.split(maxsplit=1) for line in lines] == [
        [part.name, word] for part, word in zip(parts, became, strict=True)
    ]
    assert last == "rival tests on cuda: 1 passed, 1 failed, 2 need more"
    assert tool.run_all(parts[:1], tmp_path, options)
