"""The console command: every command says what it takes and refuses what cannot work, at once."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import deep_comm
from deep_comm import __main__ as cli
from deep_comm.examples.__main__ import index
from deep_comm.settings import command_line

ROOT = Path(__file__).resolve().parents[3]

# What stands for a machine without torch.
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; "
RUN = "from deep_comm.__main__ import main; sys.exit(main(sys.argv[1:]))"


def run(*arguments: str, before: str = "import sys; ") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", before + RUN, *arguments],
        capture_output=True, text=True, timeout=120, check=False, cwd="/",
    )  # fmt: skip


def test_pip_makes_the_command() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.scripts]\ndeep_comm = "deep_comm.__main__:main"\n' in text


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_it_lists_its_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in cli.COMMANDS)


def test_version_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"deep_comm {deep_comm.__version__}\n"
    assert cli.main(["benhc"]) == 2
    assert "no command 'benhc'; did you mean bench?" in capsys.readouterr().err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_needs_no_torch_and_shows_an_example(name: str) -> None:
    done = run(name, "--help", before=WITHOUT_TORCH)
    assert done.returncode == 0, done.stderr
    assert f"usage: deep_comm {name}" in done.stdout and f"  deep_comm {name}" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor", "machine"], ["bench", "--tokens", "0"], ["bench", "--hidden", "7"],
        ["bench", "--ranks", "9"], ["bench", "--ranks", "4", "--ranks-per-node", "3"],
        ["bench", "--mode", "tp", "--quick"],
        ["tune", "--out", "/no/such/folder/x"], ["tune", "--topk", "99"],
        ["trace", "/no/such/file"], ["trace", "/", "--last", "0"], ["simulate", "--ranks", "0"],
        ["simulate", "--fault", "foo"], ["demo", "--ranks", "0"], ["demo", "--tokens", "x"],
        ["demo", "--ranks", "9"], ["demo", "/no/such/file"], ["demo", "/dev/null"],
        ["compat", "list"], ["examples", "no_such_example"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_bad_values_are_refused_before_torch_is_imported(arguments: list[str]) -> None:
    done = run(*arguments, before=WITHOUT_TORCH)
    assert done.returncode == 2, done.stderr
    assert done.stderr and not any(word in done.stderr for word in ("Traceback", "torch: "))
    if arguments[0] != "examples":  # which lists them
        told = done.stderr.splitlines()  # not hidden below a screen of usage
        assert len(told) == 2 and told[0].startswith(f"deep_comm {arguments[0]}: error: ")
        # The help of the bench depends on the mode.
        chosen = " ".join(arguments[: 3 if "--mode" in arguments else 1])
        assert told[1] == f"`deep_comm {chosen} --help` says what it takes."


@pytest.mark.parametrize(
    ("arguments", "words"),
    [("dispatch_combine --ranks 9", "--ranks: must be at most 8; got 9"),
     ("decode_graph --hidden 12", "--hidden: must be a multiple of 8; got 12"),
     ("overlap --hidden 4", "--hidden: must be at least 8; got 4")],
)  # fmt: skip
def test_examples_refuse_bad_values_before_ranks_start(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["examples", *arguments.split()])
    told = capsys.readouterr().err
    assert words in told and "starting" not in told


@pytest.mark.parametrize("name", ["bench", "demo", "tune"])
def test_a_command_that_needs_torch_says_how_to_get_it(name: str) -> None:
    done = run(name, before=WITHOUT_TORCH)
    assert done.returncode == 1
    assert done.stderr == f"deep_comm {name}: {deep_comm.NO_TORCH}\n"


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_the_doctor_prints_without_torch(arguments: list[str]) -> None:
    done = run("doctor", *arguments, before=WITHOUT_TORCH)
    assert done.returncode == 1, done.stderr
    if arguments:
        found = json.loads(done.stdout)
        assert found["problems"] == [deep_comm.NO_TORCH] and found["verdict"] == "1 problem(s)"
        assert [section["title"] for section in found["sections"]][:2] == ["machine", "packages"]
    else:
        assert "== environment variables" in done.stdout and "/dev/shm" in done.stdout
        assert done.stdout.endswith(f"PROBLEM: {deep_comm.NO_TORCH}\nverdict: 1 problem(s)\n")


IMPORTS = ("from deep_comm import Buffer", "import deep_comm; deep_comm.Buffer",
           "import deep_comm.local, deep_comm; deep_comm.processes; deep_comm.buffer")  # fmt: skip


@pytest.mark.parametrize("code", IMPORTS)
def test_imports_without_torch_say_how_to_get_it(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + code], capture_output=True, text=True, cwd="/"
    )
    assert done.stderr.splitlines()[-1] == f"ImportError: {deep_comm.NO_TORCH}"


@pytest.fixture(scope="module")
def unbuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout in which nobody has built anything."""
    root = tmp_path_factory.mktemp("unbuilt")
    shutil.copytree(ROOT / "deep_comm", root / "deep_comm",
                    ignore=shutil.ignore_patterns("*.so", "__pycache__"))  # fmt: skip
    return root


@pytest.mark.parametrize("code", [*IMPORTS[:2], "from deep_comm import simulate"])
def test_an_unbuilt_checkout_says_what_to_run(code: str, unbuilt: Path) -> None:
    # -S: without site, so that no installed deep_comm is found; torch is, by its path.
    torch_path = str(Path(importlib.import_module("torch").__file__ or "").parents[1])
    before = f"import sys; sys.path.append({torch_path!r}); "
    done = subprocess.run(
        [sys.executable, "-S", "-c", before + code], capture_output=True, text=True, cwd=unbuilt
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: deep_comm is not built: it has no native module beside "
                           f"{unbuilt / 'deep_comm'}")  # fmt: skip
    assert "pip install -e ." in last


def test_names_are_there_at_first_use_and_others_are_not() -> None:
    code = (
        "import sys, deep_comm; assert 'torch' not in sys.modules; "
        "assert deep_comm.Config and 'torch' in sys.modules; "
        "assert deep_comm.local.run and deep_comm.errors.DeepCommError; "
        "assert 'Buffer' in dir(deep_comm) and 'Buffer' in deep_comm.__all__; "
        "assert not hasattr(deep_comm, 'Bufer') and not hasattr(deep_comm, '_nothing')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


def test_examples_are_listed_with_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["examples"]) == 0
    said = capsys.readouterr().out
    files = {file.stem for file in (ROOT / "deep_comm/examples").glob("[a-z]*.py")}
    assert set(index()) == files and len(files) == 7  # nothing but examples lies there
    for name, text in index().items():
        assert name in said and text in said and len(text.split()) >= 5
        assert hasattr(importlib.import_module(f"deep_comm.examples.{name}"), "main")
    assert "torchrun" in said
    assert cli.main(["examples", "dispatch"]) == 2
    assert "no example 'dispatch'" in capsys.readouterr().err


@pytest.mark.parametrize("name", index())
def test_examples_explain_themselves_and_refuse_bad_values(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["examples", name, "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and f"  deep_comm examples {name}" in said
    flag = next(each for each in ("--ranks", "--tokens", "--seeds") if each in said)
    with pytest.raises(SystemExit) as ended:
        cli.main(["examples", name, flag, "0", *(["/dev/null"] if "file" in said else [])])
    assert ended.value.code == 2
    assert f"{flag}: must be at least 1; got 0" in capsys.readouterr().err


def test_demo_and_compat_write_json(tmp_path: Path) -> None:
    done = run("compat", "status", "--json", "--target", str(tmp_path))
    found = json.loads(done.stdout)
    assert found["installed"] is False and found["target"] == str(tmp_path)
    done = run("demo", "--tokens", "40", "--ranks", "2", "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["verdict"] == "OK" and found["problems"] == []
    assert sum(row["tokens"] for row in found["ranks"]) == 40


def test_progress_is_said_every_two_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(command_line.time, "monotonic", lambda: now[0])
    progress = command_line.Progress()
    for second in (1.0, 2.5, 3.0, 4.6):
        now[0] = second
        progress.step(f"at {second}")
    progress.reset()
    assert list(progress.over([7, 8], "things")) == [7, 8]
    command_line.Progress(is_on=False).step("not said")
    assert capsys.readouterr().err == "... at 2.5 (2 s)\n... at 4.6 (5 s)\n"
