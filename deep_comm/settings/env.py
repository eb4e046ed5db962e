"""The one registry of the environment variables that deep_comm reads.

Code asks a variable here and nowhere else, so that its name, type, default and meaning stand in one
place: ``env.TIMEOUT_S.get()``. Variables are read when asked, never at import.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from deep_comm.errors import ArgumentError

T = TypeVar("T")

PREFIX = "DEEP_COMM_"


def _parse_flag(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "on", "yes"):
        return True
    if lowered in ("0", "false", "off", "no", ""):
        return False
    raise ValueError(text)


def _parse_positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


def _parse_count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def _parse_positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _parse_level(text: str) -> str:
    if text.lower() not in ("warning", "info", "debug"):
        raise ValueError(text)
    return text.lower()


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable: ``name``, ``kind`` (its rule, in words), ``default``, ``doc``."""

    name: str
    kind: str
    default: T
    doc: str
    parse: Callable[[str], Any]

    def is_set(self) -> bool:
        return self.name in os.environ

    def set(self, text: str) -> None:
        """For this process, and what it starts."""
        os.environ[self.name] = text

    def get(self) -> T:
        """The value now. Raises ArgumentError naming the variable if it does not parse."""
        text = os.environ.get(self.name)
        if text is None:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise ArgumentError(self.name, repr(text), f"must be {self.kind}") from None


TIMEOUT_S: Variable[float] = Variable(
    "DEEP_COMM_TIMEOUT_S",
    "a positive number of seconds",
    30.0,
    "how long a kernel waits for a peer before it gives up; Buffer(timeout_s=) overrides it",
    _parse_positive_float,
)
NUM_SMS: Variable[int | None] = Variable(
    "DEEP_COMM_NUM_SMS",
    "a number of at least 1",
    None,
    "SMs of calls without a Config, of Buffers built from then on; unset: docs/guide/sms.md on "
    "GPUs, 1 on the host",
    _parse_positive_int,
)
EARLY_LAUNCHES: Variable[bool] = Variable(
    "DEEP_COMM_EARLY_LAUNCHES",
    "0 or 1",
    True,
    "launches of low-latency calls and of expanded dispatches, of Buffers built from then on, may "
    "take SMs while the one before them still runs; 0: never, where collectives of other libraries "
    "run beside them on other streams, or ranks share a GPU through MPS",
    _parse_flag,
)
NUM_DIRECT_BYTES: Variable[int | None] = Variable(
    "DEEP_COMM_NUM_DIRECT_BYTES",
    "a number of at least 0",
    None,
    "receive region of Buffers built without num_direct_bytes=, equal on all ranks; 0: what "
    "dispatch returns is torch's own memory, for programs that resize its storage or count on "
    "record_stream; slower; unset: what num_nvl_bytes has beyond 64 MiB, from 128 MiB on",
    _parse_count,
)
REGION_TOKENS: Variable[int] = Variable(
    "DEEP_COMM_REGION_TOKENS",
    "a number of at least 0",
    4096,
    "tokens per rank whose rows have room in the receive region of Buffers sized by "
    "Config.get_nvl_buffer_size_hint; 0: rings alone",
    _parse_count,
)
DEVICE: Variable[str | None] = Variable(
    "DEEP_COMM_DEVICE",
    "a torch device such as 'cpu', 'cuda' or 'cuda:0'",
    None,
    "device of Buffers built without device=; unset: CUDA when available, else the host",
    str,
)
RANKS_PER_NODE: Variable[int | None] = Variable(
    "DEEP_COMM_RANKS_PER_NODE",
    "a number of at least 1",
    None,
    "ranks per (logical) node; unset: counted from host names",
    _parse_positive_int,
)
HOST_NAME: Variable[str | None] = Variable(
    "DEEP_COMM_HOST_NAME",
    "any text",
    None,
    "what this process calls its machine; processes of one machine with different names act as "
    "those of different hosts, to try set-ups of several; unset: the host name",
    str,
)
RAIL: Variable[str | None] = Variable(
    "DEEP_COMM_RAIL",
    "nvshmem, software (CUDA devices) or simulated (host target)",
    None,
    "what joins the nodes of a group; Buffer(rail=) overrides it; unset: nvshmem between hosts, "
    "software between the logical nodes of one, simulated on the host",
    str,
)
RAIL_NEAR: Variable[bool | None] = Variable(
    "DEEP_COMM_RAIL_NEAR",
    "0 or 1",
    None,
    "whether rows for nodes whose memory this rank's stores reach are stored there, instead of "
    "put: unset: over nvshmem (NVLink); 0: never; 1: on the host target, too, where no network "
    "then stands between the nodes",
    _parse_flag,
)
NIC_GB_PER_S: Variable[float | None] = Variable(
    "DEEP_COMM_NIC_GB_PER_S",
    "a positive number",
    None,
    "the software NIC carries this many 1e9 bytes a second at most; unset: what the copy engines "
    "do",
    _parse_positive_float,
)
TUNE_FILE: Variable[str | None] = Variable(
    "DEEP_COMM_TUNE_FILE",
    "a path",
    None,
    "what deep_comm tune has measured and Buffers read; unset: deep_comm/tune.json in the cache "
    "folder",
    str,
)
POISON: Variable[bool] = Variable(
    "DEEP_COMM_POISON",
    "0 or 1",
    False,
    "fill every output with 0xA5 bytes before the kernels run, to find what they do not write",
    _parse_flag,
)
DECODE_TOKENS: Variable[int | None] = Variable(
    "DEEP_COMM_DECODE_TOKENS",
    "a number of at least 1",
    None,
    "the most tokens a rank may have in a decode step, equal on all ranks; unset: what was "
    "measured (docs/guide/tuning.md), else 128, in ExpertParallel; in the vLLM adapter no step "
    "is one",
    _parse_positive_int,
)

TRACE: Variable[int] = Variable(
    "DEEP_COMM_TRACE",
    "a number of at least 0",
    0,
    "of how many last kernels of a Buffer the steps of every block are kept "
    "(docs/guide/tracing.md); Buffer(trace=) overrides it; 0: none, which costs nothing",
    _parse_count,
)
TRACE_DIR: Variable[str | None] = Variable(
    "DEEP_COMM_TRACE_DIR",
    "a path",
    None,
    "where a Buffer that traces leaves its steps when it is destroyed, and when a call times out",
    str,
)
LOG: Variable[str | None] = Variable(
    "DEEP_COMM_LOG",
    "warning, info or debug",
    None,
    "level of Python's logger deep_comm, read when a Buffer is built: info for a line for each "
    "Buffer, debug for every call (docs/guide/troubleshooting.md); unset: as the program has it",
    _parse_level,
)
DEEP_EP_FULL_RDMA: Variable[bool] = Variable(
    "DEEP_COMM_DEEP_EP_FULL_RDMA",
    "0 or 1",
    False,
    "drop-in deep_ep: allocate all of num_rdma_bytes, for programs that use the memory themselves; "
    "unset: what low-latency calls need for the shape whose size hint that is",
    _parse_flag,
)

VLLM: Variable[bool] = Variable(
    "DEEP_COMM_VLLM",
    "0 or 1",
    False,
    "vLLM plugin: put deep_comm in the place of vLLM's DeepEP backends",
    _parse_flag,
)

REGISTRY: tuple[Variable[Any], ...] = (
    TIMEOUT_S, NUM_SMS, EARLY_LAUNCHES, NUM_DIRECT_BYTES, REGION_TOKENS, DEVICE, RANKS_PER_NODE,
    HOST_NAME, RAIL, RAIL_NEAR, NIC_GB_PER_S, TUNE_FILE, POISON, TRACE, TRACE_DIR,
    LOG, DEEP_EP_FULL_RDMA, DECODE_TOKENS, VLLM,
)  # fmt: skip

# Read by the build, not by the package; listed so that unknown() does not call them typos.
# Name: (default, meaning).
BUILD_VARIABLES: dict[str, tuple[str, str]] = {
    "DEEP_COMM_CUDA": ("AUTO", "the CUDA module: AUTO (built when nvcc is found), ON or OFF"),
    "DEEP_COMM_CUDA_ARCHS": (
        "90a",
        "the GPUs it is built for, 80, 90a, 100f and 120f, with semicolons between; each may end "
        "in -real (no PTX) or -virtual (PTX alone)",
    ),
    "DEEP_COMM_NVSHMEM": ("AUTO", "the NVSHMEM module: AUTO (built when both are found), ON, OFF"),
    "DEEP_COMM_TESTS": ("OFF", "the module of native tests"),
    "DEEP_COMM_FIND_RACES": (
        "OFF",
        "simulations can find races in shared memory (docs/design/testing.md)",
    ),
    "DEEP_COMM_TRACE_LOW_LATENCY": (
        "OFF",
        "low-latency kernels on GPUs note their steps, too (docs/guide/tracing.md)",
    ),
    "DEEP_COMM_PTXAS_REPORT": ("OFF", "ptxas prints registers, stack and spills of every kernel"),
}


def set_foreign_defaults(wanted: dict[str, str]) -> list[tuple[str, str, bool]]:
    """Set variables of a library that this process is about to start, unless they are set.

    Returns name, value now, and whether it was set before.
    """
    found = [(name, name in os.environ) for name in wanted]
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    return [(name, os.environ[name], was_set) for name, was_set in found]


def describe() -> str:
    """A table of every variable: name, value now, default, meaning."""
    rows = [("variable", "value", "default", "meaning")]
    for variable in REGISTRY:
        value = os.environ.get(variable.name, "(unset)")
        default = "-" if variable.default is None else str(variable.default)
        rows.append((variable.name, value, default, f"{variable.doc} ({variable.kind})"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        + "  "
        + row[3]
        for row in rows
    )


def unknown() -> list[str]:
    """Set variables that carry our prefix and that nobody reads: probably typing errors."""
    known = {variable.name for variable in REGISTRY} | set(BUILD_VARIABLES)
    return sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)
