"""What hosts and other tools read of the repository: it parses, and says what the project says."""

from __future__ import annotations

import ast
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import tool_modules
import yaml

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parents[3]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def read_yaml(*parts: str) -> Any:
    return yaml.safe_load(ROOT.joinpath(*parts).read_text())


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def hooks() -> dict[str, dict[str, Any]]:
    (repository,) = read_yaml(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    return {hook["id"]: hook for hook in repository["hooks"]}


@pytest.fixture(scope="module")
def lint() -> dict[str, Any]:
    """The constants of tools/lint."""
    constants = {}
    for node in ast.parse((ROOT / "tools" / "lint").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            assert isinstance(node.targets[0], ast.Name)
            constants[node.targets[0].id] = ast.literal_eval(node.value)
    return constants


def test_pre_commit_runs_the_versions_of_tools_lint(
    hooks: dict[str, dict[str, Any]], pyproject: dict[str, Any]
) -> None:
    wanted = {
        re.split(r"[=<>]", requirement)[0]: requirement
        for requirement in pyproject["project"]["optional-dependencies"]["lint"]
    }
    found = [hook for hook in hooks.values() if hook["language"] == "python"]
    for hook in found:
        assert hook["additional_dependencies"] == [wanted[hook["entry"].split()[0]]], hook["id"]
    # mypy looks at the package as a whole, with what it imports.
    assert {hook["entry"].split()[0] for hook in found} == wanted.keys() - {"mypy"}
    assert hooks["lint"]["entry"] == "tools/lint"
    assert hooks["lint"]["stages"] == ["pre-push"]


def test_pre_commit_formats_the_files_that_tools_lint_formats(
    hooks: dict[str, dict[str, Any]], lint: dict[str, Any]
) -> None:
    pattern = re.compile(hooks["clang-format"]["files"])
    files = [path for path in (ROOT / "csrc", ROOT / "tests") for path in path.rglob("*.*")]
    native = {
        path
        for folder in lint["FOLDERS"]
        for kind in lint["NATIVE"]
        for path in (ROOT / folder).rglob(kind)
    }
    assert {path for path in files if pattern.search(str(path.relative_to(ROOT)))} == native


def test_lint_reads_every_program_of_tools(lint: dict[str, Any]) -> None:
    """pre-commit finds them by their first line."""
    files = [path for path in (ROOT / "tools").iterdir() if path.is_file() and not path.suffix]
    programs = {path.name for path in files if path.read_text().startswith("#!")}
    assert set(lint["PROGRAMS"]) == programs


def test_ci_runs_the_commands_of_the_readme_on_every_python_that_the_package_takes(
    pyproject: dict[str, Any],
) -> None:
    versions = [
        name.rsplit(" ", 1)[1]
        for name in pyproject["project"]["classifiers"]
        if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", name)
    ]
    assert pyproject["project"]["requires-python"] == f">={versions[0]}"
    jobs = read_yaml(".github", "workflows", "ci.yml")["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == versions
    wheels = [f"cp3{version.split('.')[1]}-*" for version in versions]
    assert pyproject["tool"]["cibuildwheel"]["build"].split() == wheels
    readme = (ROOT / "README.md").read_text()
    assert f"Python {versions[0]} to {versions[-1]}" in readme
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert sorted(runs) == ["tools/docs", "tools/lint", "tools/test"]
    assert "\ntools/test " in readme
    for program in runs:
        assert (ROOT / program).stat().st_mode & stat.S_IXUSR


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_has_what_a_host_asks_for(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    triggers = workflow[True]  # YAML 1.1 reads the key "on" as true
    assert triggers
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["runs-on"] == "ubuntu-24.04"
        assert 0 < job["timeout-minutes"] <= 90
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            assert "@" in step.get("uses", "@")


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_an_issue_form_asks_questions(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        assert form == {"blank_issues_enabled": True}
        return
    assert form["name"] and form["description"]
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids) >= 2
    for field in form["body"]:
        assert field["type"] in ("input", "textarea")
        assert field["attributes"]["label"]


def test_the_citation_is_of_this_project(pyproject: dict[str, Any]) -> None:
    citation = read_yaml("CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert citation["title"] == pyproject["project"]["name"]
    assert citation["license"] == pyproject["project"]["license"]
    assert citation["abstract"].rstrip(".") == pyproject["project"]["description"]
    assert citation["message"] and citation["authors"][0]["name"]


def test_every_place_that_names_the_version_names_the_same(pyproject: dict[str, Any]) -> None:
    """The first one of the changes is that of pyproject.toml, or not released yet."""
    version, text = pyproject["project"]["version"], (ROOT / "CHANGELOG.md").read_text()
    citation = read_yaml("CITATION.cff")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert f"{citation['version']} ({citation['date-released']})" in headings[:2]
    assert citation["version"] == version
    assert headings[0] == "Unreleased" or headings[0].startswith(f"{version} (")
    # Written nowhere else: the package and the native module are told by the build.
    sources = [
        *ROOT.glob("deep_comm/**/*.py"),
        *ROOT.glob("csrc/**/*.cpp"),
        ROOT / "CMakeLists.txt",
    ]
    assert not [path for path in sources if f'"{version}"' in path.read_text()]


def test_images_install_the_package_as_the_readme_does() -> None:
    assert [path.name for path in DOCKERFILES] == ["cpu.Dockerfile", "cuda.Dockerfile"]
    tested = tool_modules.load("lib/environment.py").CPU_TORCH
    assert f'"{tested}"' in DOCKERFILES[0].read_text()
    default = re.search(r'set\(DEEP_COMM_CUDA_ARCHS "(\w+)"', (ROOT / "CMakeLists.txt").read_text())
    assert default is not None
    assert f"\nARG CUDA_ARCHS={default[1]}\n" in DOCKERFILES[1].read_text()
    for path in DOCKERFILES:
        text = path.read_text()
        assert "pip install --no-cache-dir /src" in text
        assert text.endswith('CMD ["python", "-m", "deep_comm.doctor"]\n')
