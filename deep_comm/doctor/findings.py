"""Facts about the machine and the installation. Each function returns lines and problems. None
raises on purpose; `checkup` in __main__ turns what they raise by accident into a line."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import deep_comm

PACKAGES = (
    "torch",
    "numpy",
    "pybind11",
    "nvshmem4py-cu13",
    "nvidia-nvshmem-cu13",
    "nvidia-nccl-cu13",
)

# Below this a handful of Buffers on the host target fills /dev/shm; containers often get 64 MiB.
ENOUGH_SHARED_MEMORY = 256 << 20


@dataclass
class Section:
    """One part of the report. A problem makes the verdict bad, a warning does not."""

    title: str
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def machine() -> Section:
    section = Section("machine")
    section.lines.append(f"{platform.system()} {platform.release()} {platform.machine()}")
    section.lines.append(f"Python {platform.python_version()}, {os.cpu_count()} cores")
    shared = shutil.disk_usage("/dev/shm")
    section.lines.append(f"/dev/shm: {shared.free >> 20} MiB free of {shared.total >> 20} MiB")
    if shared.free < ENOUGH_SHARED_MEMORY:
        section.warnings.append(
            "/dev/shm is small: ranks that are processes keep their buffers there "
            "(in a container, start it with more, such as --shm-size=2g)"
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limits = ["unlimited" if limit < 0 else f"{limit >> 10} KiB" for limit in (soft, hard)]
    section.lines.append(f"locked memory: {limits[0]} (hard limit {limits[1]})")
    return section


def packages() -> Section:
    section = Section("packages")
    for name in PACKAGES:
        try:
            section.lines.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            section.lines.append(f"{name} not installed")
            if name == "torch":
                section.problems.append(deep_comm.NO_TORCH)
    from deep_comm.compat import installer

    found = installer.existing()
    whose = (
        "" if found is None else ", the drop-in" if installer.is_drop_in(found) else ", not ours"
    )
    section.lines.append(f"import deep_ep: {found if found is not None else 'nothing'}{whose}")
    return section


def modules() -> Section:
    """The native modules: built, loadable, of this version?"""
    section = Section("modules")
    section.lines.append(
        f"deep_comm {deep_comm.__version__} in {os.path.dirname(deep_comm.__file__)}"
    )
    try:
        core = importlib.import_module("deep_comm._core")
        section.lines.append(f"_core {core.version}: the host target")
        if core.version != deep_comm.__version__:
            section.problems.append(f"_core is of version {core.version}; build and install again")
    except ImportError as error:
        section.problems.append(f"_core does not load: {deep_comm.explained(error)}")
    try:
        cuda = importlib.import_module("deep_comm._cuda")
        section.lines.append(f"_cuda for {cuda.architectures}")
    except ImportError as error:
        section.lines.append(f"_cuda not available: {error}")
        if importlib.util.find_spec("torch") is not None and num_devices() > 0:
            section.warnings.append(
                "there are CUDA devices, but no _cuda module: install nvcc and rebuild"
            )
        return section
    section.lines.append(_nvshmem_module())
    return section


def _nvshmem_module() -> str:
    """Whether groups of several hosts can be served."""
    from deep_comm.backends import nvshmem

    try:
        version = nvshmem.load().version
    except Exception as error:  # noqa: BLE001 - a finding, not a failure
        return f"_nvshmem not available, groups stay inside one host: {error}"
    major, rest = divmod(version, 10000)
    return f"_nvshmem for NVSHMEM {major}.{rest // 100}.{rest % 100}: groups of several hosts"


def num_devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def devices() -> Section:
    """CUDA devices and who can reach whose memory."""
    import torch

    from deep_comm.backends import resolve_device

    section = Section("CUDA devices")
    try:  # that of Buffers without device=
        resolve_device(None)
    except deep_comm.errors.DeepCommError as error:
        section.problems.append(str(error))
    count = num_devices()
    if count == 0:
        section.lines.append("none: the host target is used")
        return section
    for device in range(count):
        properties = torch.cuda.get_device_properties(device)
        section.lines.append(
            f"{device}: {properties.name}, sm_{properties.major}{properties.minor}, "
            f"{properties.multi_processor_count} SMs, {properties.total_memory >> 30} GiB"
        )
    try:
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
        ).stdout.split()
        section.lines.append(
            f"driver {driver[0] if driver else 'unknown'}, CUDA {torch.version.cuda}"
        )
    except (OSError, subprocess.TimeoutExpired):
        section.lines.append(f"driver unknown (no nvidia-smi), CUDA {torch.version.cuda}")
    section.lines.append("peer access (row reaches column):")
    section.lines.append("     " + " ".join(f"{device:>3}" for device in range(count)))
    for device in range(count):
        marks = []
        for peer in range(count):
            reaches = device == peer or torch.cuda.can_device_access_peer(device, peer)
            marks.append("self" if device == peer else "yes" if reaches else "NO")
            if not reaches:
                section.warnings.append(f"device {device} cannot reach the memory of device {peer}")
        section.lines.append(f"{device:>3}  " + " ".join(f"{mark:>3}" for mark in marks))
    return section


def environment() -> Section:
    from deep_comm.settings import env

    section = Section("environment variables")
    section.lines.extend(env.describe().splitlines())
    for name in env.unknown():
        section.warnings.append(f"{name} is set, but nothing reads it: a typing error?")
    for variable in env.REGISTRY:
        try:
            variable.get()
        except ValueError as error:
            section.problems.append(str(error))
    section.problems += filter(None, (_trace_problem(), _tune_problem()))
    return section


def _trace_problem() -> str:
    """Why a Buffer could not leave its trace; "" if it can."""
    from deep_comm.settings import env

    folder = env.TRACE_DIR.get()
    if folder is None:
        return ""
    made = Path(folder).absolute()  # with its parents
    there = next(place for place in (made, *made.parents) if place.exists())
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return ""
    return f"{env.TRACE_DIR.name}: {folder} cannot be written"


def _tune_problem() -> str:
    """Why every Buffer would refuse the named file; "" if there is none, or it is there."""
    from deep_comm.settings import env

    path = env.TUNE_FILE.get()
    if path is None or Path(path).is_file():
        return ""
    return f"{env.TUNE_FILE.name}: {path} is not a file; deep_comm tune makes it"
