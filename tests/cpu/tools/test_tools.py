"""The set-up of tools/demo and tools/test: what it decides, without installing anything."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import tool_modules

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def environment() -> ModuleType:
    return tool_modules.load("lib/environment.py")


def test_fingerprint_follows_the_sources(
    environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "csrc").mkdir()
    source = tmp_path / "csrc" / "a.cpp"
    source.write_text("int a;")
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    interpreter = Path(sys.executable)

    def fingerprint(nvcc: str | None = None) -> str:
        return environment.fingerprint_sources(interpreter, nvcc)

    first = fingerprint()
    assert fingerprint() == first
    assert fingerprint("/somewhere/nvcc") != first
    source.write_text("int b;")
    changed = fingerprint()
    assert changed != first
    source.rename(source.with_name("b.cpp"))
    assert fingerprint() != changed


def test_a_build_with_tests_serves_the_demo_but_not_the_reverse(
    environment: ModuleType, tmp_path: Path
) -> None:
    stamp = tmp_path / "stamp.json"
    assert not environment.is_current(stamp, "f", tests=False)
    stamp.write_text('{"fingerprint": "f", "tests": true}')
    assert environment.is_current(stamp, "f", tests=False)
    assert not environment.is_current(stamp, "g", tests=False)
    stamp.write_text('{"fingerprint": "f", "tests": false}')
    assert not environment.is_current(stamp, "f", tests=True)


def test_missing_requirements_are_found(environment: ModuleType, tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text(
        '[build-system]\nrequires = ["pip>=1", "surely-not-installed-anywhere>=2"]\n'
        "[project]\nname = 'x'\n[project.optional-dependencies]\n"
        "test = ['pytest>=1', 'pytest>=9999', 'other; python_version < \"3\"']\n"
    )
    command = [sys.executable, "-c", environment.MISSING_REQUIREMENTS, str(project), "test"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == '["surely-not-installed-anywhere>=2", "pytest>=9999"]'


def test_an_active_virtual_environment_is_used(
    environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter = tmp_path / "bin" / "python"
    interpreter.parent.mkdir()
    interpreter.write_text("")
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    assert environment.find_interpreter() == interpreter


def test_a_machine_without_a_compiler_is_told_what_to_install(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(environment.SetupError, match="apt-get install g\\+\\+"):
        environment.check_machine()


@pytest.mark.parametrize("tool", ["demo", "test", "test_gpus", "sanitize"])
def test_tools_explain_themselves(tool: str) -> None:
    command = [sys.executable, str(ROOT / "tools" / tool), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "exit code is the verdict" in done.stdout


def run_bare(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """By a Python without packages."""
    command = [sys.executable, "-S", str(ROOT / "tools" / tool), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("arguments", [["--ranks", "0"], ["/no/such/file"], ["--nosuch"]])
def test_the_demo_refuses_before_it_sets_anything_up(arguments: list[str]) -> None:
    done = run_bare("demo", *arguments)
    assert done.returncode == 2 and "Python environment" not in done.stdout, done.stdout
    assert done.stderr.startswith("deep_comm demo: error: ")


@pytest.mark.parametrize("tool", ["released_adapters", "rival_tests"])
def test_tools_that_build_nothing_say_where_to_run_them(tool: str) -> None:
    done = run_bare(tool, "--help")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f".venv/bin/python tools/{tool}" in done.stderr


def test_continuous_integration_calls_the_test_tool() -> None:
    text = (ROOT / ".ci" / "run").read_text()
    assert "tools/test" in text
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=True)
