"""Documentation says what the code says: generated pages are current, links
lead somewhere, programs run.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import tool_modules
import warm

import deep_comm
from deep_comm import errors
from deep_comm.settings import env

ROOT = Path(__file__).resolve().parents[3]
GUIDE = ROOT / "docs" / "guide"
API = {  # page -> what it describes
    page.stem: re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    for page in sorted((ROOT / "docs" / "api").glob("*.md"))
}
PAGES = [
    *sorted(GUIDE.glob("*.md")),
    *sorted((ROOT / "docs" / "recipes").glob("*.md")),
    ROOT / "docs" / "design" / "testing.md",
]
DESIGN = ROOT / "docs" / "design"
ALL_PAGES = sorted((ROOT / "docs").rglob("*.md"))


builder = tool_modules.load("lib/pages.py")
pictures = tool_modules.load("lib/pictures.py")


@pytest.mark.parametrize("name", sorted(builder.PAGES))
def test_generated_page_is_current(name: str) -> None:
    written = (GUIDE / name).read_text()
    assert written == builder.PAGES[name](), f"docs/guide/{name}: run tools/docs --pages"


@pytest.mark.parametrize("name", sorted(pictures.PICTURES))
def test_picture_is_current(name: str) -> None:
    drawn = pictures.PICTURES[name]().svg()
    assert (pictures.FOLDER / name).read_text() == drawn, f"{name}: run tools/docs --pages"
    ElementTree.fromstring(drawn)


def test_bars_have_the_figures_of_the_performance_page() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    for panel in json.loads((pictures.FOLDER / "times.json").read_text())["panels"]:
        commit = panel["setting"].split()[-1]
        assert commit in page
        for row in panel["rows"]:
            for figure in (row["us"], row["rival_us"], row.get("limit_us", row["us"])):
                assert re.search(rf"(?<![\d.]){figure:g}(?!\d)", page), (row["name"], figure)


def test_error_catalogue_is_complete() -> None:
    page = (GUIDE / "errors.md").read_text()
    classes = [
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, errors.DeepCommError)
    ]
    assert len(classes) >= 13
    for cls in classes:
        assert f"## {cls.__name__}\n" in page
        remedy = (cls.__doc__ or "").partition("What to do:")[2]
        assert len(remedy.split()) >= 5, f"{cls.__name__} does not say what to do about it"


def test_every_error_that_the_package_raises_is_in_the_catalogue() -> None:
    """Classes of errors that are defined elsewhere would be missing from it."""
    strays = []
    for path in (ROOT / "deep_comm").rglob("*.py"):
        if path.name != "errors.py":
            for name, base in re.findall(r"^class (\w+)\((.*)\):", path.read_text(), re.MULTILINE):
                if base.endswith("Error") or "DeepCommError" in base:
                    strays.append(f"{path.relative_to(ROOT)}: {name}")
    # How a tool ended, not what a Buffer raises.
    allowed = {"RankFailed", "InstallError", "WrongResult", "WrongLinkResult"}
    assert not [stray for stray in strays if stray.split(": ")[1] not in allowed], strays


def _found(path: str) -> Any:
    """What a page of the API describes: a module, or what is in one."""
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        return getattr(importlib.import_module(module), name)


def test_api_reference_has_every_public_name() -> None:
    described = {id(_found(path)) for paths in API.values() for path in paths}
    for name in deep_comm.__all__:
        value = getattr(deep_comm, name)
        is_error = inspect.isclass(value) and issubclass(value, errors.DeepCommError)
        if inspect.isclass(value) and not is_error:  # errors have a catalogue
            assert id(value) in described, name


def _public(module: Any) -> list[Any]:
    """What a module offers: __all__, else what it defines itself without an underscore."""
    names = getattr(module, "__all__", None)
    if names is not None:
        return [getattr(module, name) for name in names]
    return [
        value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def _members(cls: type) -> dict[str, Any]:
    """Public methods and properties, those of deep_comm's own base classes too."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.split(".")[0] != "deep_comm":
            continue
        for name, value in vars(base).items():
            raw = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            if not name.startswith("_") and (inspect.isfunction(raw) or isinstance(raw, property)):
                found[name] = value
    return found


# Pages whose classes are deep_comm's own design; others implement interfaces described elsewhere.
OWN_PAGES = ("buffer", "compat", "config", "events", "handles", "launchers", "layer")


@pytest.mark.parametrize("page", OWN_PAGES)
def test_public_classes_and_methods_have_docstrings(page: str) -> None:
    missing = []
    for path in API[page]:
        found = _found(path)
        for value in _public(found) if inspect.ismodule(found) else [found]:
            is_native = getattr(value, "__module__", None) == "deep_comm._core"
            if is_native or not (inspect.isclass(value) or inspect.isfunction(value)):
                continue
            if not inspect.getdoc(value):
                missing.append(f"{path}: {value}")
            for member, raw in _members(value).items() if inspect.isclass(value) else ():
                # Properties whose name and type say all there is have none.
                if not isinstance(raw, property) and not inspect.getdoc(getattr(value, member)):
                    missing.append(f"{path}: {value}.{member}")
    assert not missing, missing


def _described(doc: str) -> set[str]:
    """Names of arguments that a docstring's Args describe."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n|\n)*)", inspect.cleandoc(doc) + "\n", re.MULTILINE)
    lines = section[1].splitlines() if section else []
    # A line of the section's own depth: "a, b: what they are".
    heads = [line.strip().partition(":")[0] for line in lines if re.match(r" {4}\w[\w, ]*:", line)]
    return {name.strip() for head in heads for name in head.split(",")}


WHOLE = {  # every argument is described
    "Buffer": {
        "__init__", "get_dispatch_layout", "dispatch", "combine", "low_latency_dispatch",
        "low_latency_combine", "get_low_latency_rdma_size_hint", "get_local_buffer_tensor",
        "low_latency_update_mask_buffer", "low_latency_query_mask_buffer",
    },
    "ExpertParallel": {"__init__", "forward", "combine"},
    "Config": {"get_nvl_buffer_size_hint"},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_docstrings_describe_the_arguments_that_there_are(name: str) -> None:
    cls = getattr(deep_comm, name)
    for method in ["__init__", *_members(cls)]:
        raw = getattr(cls, method)
        if not inspect.isfunction(raw):
            continue
        given = set(inspect.signature(raw).parameters) - {"self"}
        described = _described(raw.__doc__ or "")
        assert described <= given, f"{name}.{method}: {described - given}"
        if method in WHOLE[name]:
            assert described == given, f"{name}.{method}: {given - described}"


@pytest.mark.parametrize("page", [ROOT / "README.md", *ALL_PAGES], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / link).exists(), f"{page.name}: {link}"


def _anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.strip().lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", [ROOT / "README.md", *ALL_PAGES], ids=lambda page: page.name)
def test_links_into_pages_name_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
        assert anchor in _anchors(page.parent / target if target else page), f"{target}#{anchor}"


def test_the_index_of_design_notes_names_them_all() -> None:
    listed = re.findall(r"\* \[(\d{4})\]\((\S+)\) (.+)", (DESIGN / "README.md").read_text())
    notes = [
        (path.name[:4], path.name, path.read_text().splitlines()[0].removeprefix("# "))
        for path in sorted(DESIGN.glob("0*.md"))
    ]
    assert sorted(listed) == notes


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_and_files_that_commands_name_exist(page: Path) -> None:
    text = page.read_text()
    for module in re.findall(r"python -m (deep_comm(?:\.\w+)*)", text):
        spec = importlib.util.find_spec(module)
        assert spec is not None, module
        if spec.submodule_search_locations is not None:
            assert importlib.util.find_spec(f"{module}.__main__") is not None, module
    for path in re.findall(r"`((?:tests|tools|docs|deep_comm)/[\w/.-]+)`", text):
        assert (ROOT / path).exists(), path
    known = {variable.name for variable in env.REGISTRY}
    for variable in re.findall(r"DEEP_COMM_\w+", text):
        assert variable in known or variable in env.BUILD_VARIABLES, variable


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_python_is_python(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        compile(block, page.name, "exec")


PROGRAMS = [
    (page.name, program)
    for page in PAGES
    for program in re.findall(
        r"```python\n(# torchrun [^\n]+\n.*?)```", page.read_text(), re.DOTALL
    )
]


@pytest.mark.parametrize(
    ("page", "program"), PROGRAMS, ids=[f"{page}-{n}" for n, (page, _) in enumerate(PROGRAMS)]
)
def test_programs_of_the_guide_run_as_written(page: str, program: str, tmp_path: Path) -> None:
    if "import triton" in program:
        pytest.importorskip("triton")
    command = shlex.split(program.splitlines()[0].removeprefix("# torchrun "))
    (tmp_path / command[-1]).write_text(program)
    # A file a rank: written to one pipe, the lines of ranks run into each other.
    logs = tmp_path / "logs"
    done = warm.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--redirects", "3",
         "--log-dir", str(logs), *command],
        capture_output=True, text=True, timeout=240, cwd=tmp_path,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    written = {str(file): file.read_text() for file in logs.rglob("std*.log")}
    assert done.returncode == 0, (done.stdout, done.stderr, written)
    ranks = int(command[command.index("--nproc-per-node") + 1])
    outputs = [text for name, text in written.items() if name.endswith("stdout.log")]
    assert len(outputs) == ranks
    assert all(text.count("equal: True") == 1 for text in outputs), written


def test_there_are_programs_to_run() -> None:
    assert len(PROGRAMS) >= 2
