"""Set-up shared by tools/demo and tools/test: a Python environment with deep_comm built and
installed.

Runs on a bare python3 (3.10 or newer) with nothing but the standard library; everything that needs
a package runs inside the environment it makes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OLDEST_PYTHON = (3, 10)

# The version the CPU-only tests are run with. On a machine with a CUDA driver torch is left to pip,
# whose default build brings CUDA.
CPU_TORCH = "torch==2.13.0"

# Asked for by the user; see CMakeLists.txt.
CUDA_IS_OFF = os.environ.get("DEEP_COMM_CUDA", "").upper() == "OFF"

# What decides whether an installed build is still current.
SOURCES = (
    "CMakeLists.txt",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "cmake",
    "csrc",
    "deep_comm",
    "tests/native",
)

# Likewise, in the environment.
NOT_IN_SOURCES = ("CMAKE_ARGS", "DEEP_COMM_FIND_RACES", "DEEP_COMM_CUDA_ARCHS")

# Runs inside the environment: which of pyproject.toml's requirements are not met there?
MISSING_REQUIREMENTS = """
import importlib.metadata, json, sys
try:
    import tomllib
except ImportError:
    from pip._vendor import tomli as tomllib
from pip._vendor.packaging.requirements import Requirement

def met(requirement):
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return True
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True)

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)
wanted = list(project["build-system"]["requires"])
for extra in sys.argv[2:]:
    wanted += project["project"]["optional-dependencies"][extra]
print(json.dumps([text for text in wanted if not met(Requirement(text))]))
"""

DESCRIBE_INSTALL = """
import importlib, json
import deep_comm, deep_comm._core as core
facts = {"version": core.version, "package": deep_comm.__file__, "cuda": None}
try:
    facts["cuda"] = importlib.import_module("deep_comm._cuda").architectures
except ImportError as error:
    facts["cuda_error"] = str(error)
print(json.dumps(facts))
"""


class SetupError(Exception):
    """Something the user has to install or repair; the message says what."""


@dataclass(frozen=True)
class Environment:
    python: Path
    cuda_architectures: str | None  # of the installed _cuda module; None: it was not built
    nvcc: str | None
    num_devices: int  # CUDA devices

    def variables(self) -> dict[str, str]:
        """The process environment for commands that run in it."""
        variables = dict(os.environ)
        variables["PATH"] = f"{self.python.parent}{os.pathsep}{variables.get('PATH', '')}"
        return variables

    def describe_cuda(self) -> str:
        if self.cuda_architectures is not None:
            return (
                f"CUDA module compiled for sm_{self.cuda_architectures} with {self.nvcc or 'nvcc'}"
            )
        if CUDA_IS_OFF:
            return "CUDA module not compiled: DEEP_COMM_CUDA=OFF"
        if self.nvcc is None:
            return (
                "CUDA module not compiled: no nvcc on this machine; the host target alone is used"
            )
        return f"CUDA module not compiled although {self.nvcc} exists: see the build output"


def say(text: str) -> None:
    print(f"[deep_comm] {text}", flush=True)


def prepare(*, tests: bool, python: str | None = None) -> Environment:
    """An environment with deep_comm of this checkout; with the test modules if `tests`."""
    started = time.monotonic()
    check_machine()
    nvcc = find_nvcc()
    num_devices = count_devices()
    say(f"1/4 Python environment ({num_devices} CUDA device(s), nvcc: {nvcc or 'not found'})")
    interpreter = Path(python).absolute() if python else find_interpreter()
    say(f"    {interpreter}")
    say("2/4 requirements")
    install_requirements(interpreter, extras=("test",) if tests else ())
    install_torch(interpreter, with_cuda=num_devices > 0)
    say("3/4 build and install")
    install_package(interpreter, tests=tests, nvcc=nvcc)
    say("4/4 check the installation")
    facts = describe_install(interpreter)
    environment = Environment(interpreter, facts["cuda"], nvcc, num_devices)
    say(f"    deep_comm {facts['version']}; {environment.describe_cuda()}")
    # The demo can do without; for the tests a CUDA module that does not compile is a failure.
    if tests and facts["cuda"] is None and nvcc is not None and not CUDA_IS_OFF:
        raise SetupError(
            f"nvcc exists, but the CUDA module does not import: {facts.get('cuda_error')}"
        )
    say(f"    ready after {time.monotonic() - started:.0f} s")
    return environment


def run_command(
    name: str, arguments: Sequence[str], check: Callable[[Sequence[str]], object] | None = None
) -> int:
    """`deep_comm NAME`, in an environment that is made first unless --python names one. What
    `check` refuses ends the process before that.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--python")
    own, passed_on = parser.parse_known_args(list(arguments))
    try:
        check_machine()
        if check is not None:  # setting up takes minutes
            check(passed_on)
        environment = prepare(tests=False, python=own.python)
    except SetupError as error:
        say(f"set-up failed: {error}")
        return 1
    say(f"running: deep_comm {' '.join([name, *passed_on])}")
    command = [str(environment.python), "-m", "deep_comm", name, *passed_on]
    code = subprocess.run(command, env=environment.variables()).returncode
    say(f"{name}: OK" if code == 0 else f"{name}: FAILED (exit code {code})")
    return 0 if code == 0 else 1


def require_modules() -> None:
    """Of tools that build nothing: end the process if this interpreter lacks torch or deep_comm."""
    try:
        import torch  # noqa: F401

        import deep_comm._core  # noqa: F401
    except ImportError as error:
        tool = Path(sys.argv[0]).name
        sys.exit(
            f"{tool}: {error}\nRun it in an environment that has torch and deep_comm, such as the "
            f"one that tools/test makes: .venv/bin/python tools/{tool}"
        )


def check_machine() -> None:
    if sys.version_info < OLDEST_PYTHON:
        have = ".".join(map(str, sys.version_info[:3]))
        raise SetupError(f"python3 is {have}, but deep_comm needs Python 3.10 or newer")
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None and shutil.which("c++") is None:
        raise SetupError(f"no C++ compiler ({compiler}); on Debian or Ubuntu: apt-get install g++")


def find_nvcc() -> str | None:
    for candidate in (os.environ.get("CUDACXX"), shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    return None


def count_devices() -> int:
    """CUDA devices that a driver shows; 0 without a driver."""
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return listing.stdout.count("GPU ") if listing.returncode == 0 else 0


def find_interpreter() -> Path:
    """The active virtual environment's interpreter, or that of .venv in the checkout."""
    if sys.prefix != sys.base_prefix:
        return Path(sys.executable)
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        active = os.environ.get(variable)
        if active and (Path(active) / "bin" / "python").exists():
            return Path(active) / "bin" / "python"
    folder = ROOT / ".venv"
    interpreter = folder / "bin" / "python"
    if interpreter.exists() and runs(interpreter, "import pip"):
        return interpreter
    make_virtual_environment(folder)
    return interpreter


def make_virtual_environment(folder: Path) -> None:
    # A torch that the machine already has is used, not downloaded again.
    share = runs(Path(sys.executable), "import torch")
    say(f"    making {folder.name}" + (" (sees the machine's torch)" if share else ""))
    command = [sys.executable, "-m", "venv", "--clear", str(folder)]
    if share:
        command.insert(3, "--system-site-packages")
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode != 0:
        shutil.rmtree(folder, ignore_errors=True)
        version = ".".join(map(str, sys.version_info[:2]))
        raise SetupError(
            "python3 -m venv failed; on Debian or Ubuntu: "
            f"apt-get install python3-venv (or python{version}-venv)\n{made.stdout}{made.stderr}"
        )


def runs(interpreter: Path, code: str) -> bool:
    return (
        subprocess.run([str(interpreter), "-c", code], capture_output=True, cwd="/").returncode == 0
    )


def pip_install(interpreter: Path, *arguments: str, **variables: str) -> None:
    command = [
        str(interpreter),
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "-q",
        *arguments,
    ]
    environment = Environment(interpreter, None, None, 0).variables() | variables
    if subprocess.run(command, cwd=ROOT, env=environment).returncode != 0:
        raise SetupError(f"failed: pip install {' '.join(arguments)}")


def install_requirements(interpreter: Path, *, extras: Sequence[str]) -> None:
    query = [str(interpreter), "-c", MISSING_REQUIREMENTS, str(ROOT / "pyproject.toml"), *extras]
    answer = subprocess.run(query, capture_output=True, text=True, cwd="/")
    if answer.returncode != 0:
        raise SetupError(f"cannot read the environment's packages:\n{answer.stderr}")
    missing = json.loads(answer.stdout)
    # The build runs without isolation (fast, and no network once the requirements are there), so
    # its cmake and ninja must be here too, unless the machine has good ones.
    for tool, oldest in (("cmake", (3, 28)), ("ninja", (1, 10))):
        if tool_version(interpreter, tool) < oldest:
            missing.append(f"{tool}>={'.'.join(map(str, oldest))}")
    if missing:
        say(f"    installing {', '.join(missing)}")
        pip_install(interpreter, *missing)


def tool_version(interpreter: Path, tool: str) -> tuple[int, ...]:
    path = os.pathsep.join([str(interpreter.parent), os.environ.get("PATH", "")])
    found = shutil.which(tool, path=path)
    if found is None:
        return (0,)
    answer = subprocess.run([found, "--version"], capture_output=True, text=True)
    words = answer.stdout.split()
    number = next((word for word in words if word[0].isdigit()), "0")
    return tuple(int(part) for part in number.split(".")[:2] if part.isdigit())


def install_torch(interpreter: Path, *, with_cuda: bool) -> None:
    if runs(interpreter, "import torch"):
        return
    torch = "torch" if with_cuda else CPU_TORCH
    say(f"    installing {torch} (a large download)")
    # numpy: torch warns at import without it.
    pip_install(interpreter, torch, "numpy")


def install_package(interpreter: Path, *, tests: bool, nvcc: str | None) -> None:
    fingerprint = fingerprint_sources(interpreter, nvcc)
    stamp = site_packages(interpreter) / "deep_comm_build.json"
    if is_current(stamp, fingerprint, tests=tests) and runs(interpreter, "import deep_comm._core"):
        say("    up to date")
        return
    stamp.unlink(missing_ok=True)
    started = time.monotonic()
    say("    building, which takes minutes the first time")
    variables = {"DEEP_COMM_TESTS": "ON" if tests else "OFF"}
    if nvcc is not None:
        variables["CUDACXX"] = nvcc
    # Editable, because commands are run from the checkout, where a plain install would be shadowed
    # by the source folder of the same name, which has no native modules.
    pip_install(interpreter, "--no-build-isolation", "--no-deps", "-e", ".", **variables)
    stamp.write_text(json.dumps({"fingerprint": fingerprint, "tests": tests}))
    say(f"    built in {time.monotonic() - started:.0f} s")


def is_current(stamp: Path, fingerprint: str, *, tests: bool) -> bool:
    try:
        installed = json.loads(stamp.read_text())
    except (OSError, ValueError):
        return False
    # A build with the test modules serves the demo as well.
    return installed["fingerprint"] == fingerprint and (installed["tests"] or not tests)


def site_packages(interpreter: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    answer = subprocess.run(
        [str(interpreter), "-c", code], capture_output=True, text=True, check=True
    )
    return Path(answer.stdout.strip())


def fingerprint_sources(interpreter: Path, nvcc: str | None) -> str:
    options = [os.environ.get(name) for name in NOT_IN_SOURCES]
    digest = hashlib.sha256(f"{interpreter}\0{nvcc}\0{options}\0{CUDA_IS_OFF}".encode())
    for name in SOURCES:
        path = ROOT / name
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(f"\0{file.relative_to(ROOT)}\0".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


def describe_install(interpreter: Path) -> dict:
    answer = subprocess.run(
        [str(interpreter), "-c", DESCRIBE_INSTALL], capture_output=True, text=True, cwd="/"
    )
    if answer.returncode != 0:
        raise SetupError(f"deep_comm was installed but does not import:\n{answer.stderr}")
    return json.loads(answer.stdout.splitlines()[-1])
