"""The one registry of the environment variables that deep_comm reads.

Code asks a variable here and nowhere else, so that its name, type, default and meaning stand in one
place: ``env.TIMEOUT_S.get()``. Variables are read when asked, never at import.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from deep_comm.errors import ArgumentError

T = TypeVar("T")

PREFIX = "DEEP_COMM_"
RAILS = ("simulated", "software", "nvshmem")
"""What may join nodes; see deep_comm.ranks.rail."""


class Kind(NamedTuple):
    """What a variable may hold."""

    rule: str
    parse: Callable[[str], Any]  # raises ValueError


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


def _parse_level(text: str) -> str:
    if text.lower() not in ("warning", "info", "debug"):
        raise ValueError(text)
    return text.lower()


def _matching(rule: str, pattern: str) -> Kind:
    def parse(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ValueError(text)
        return text

    return Kind(rule, parse)


def _at_least(smallest: int) -> Kind:
    def parse(text: str) -> int:
        value = int(text)
        if value < smallest:
            raise ValueError(text)
        return value

    return Kind(f"a number of at least {smallest}", parse)


_FLAG = Kind("0 or 1", _parse_flag)


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable: ``doc`` says in a short sentence what for, ``more`` the rest."""

    name: str
    kind: Kind
    default: T
    doc: str
    more: str = ""

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
            value: T = self.kind.parse(text)
        except ValueError:
            raise ArgumentError(self.name, repr(text), f"must be {self.kind.rule}") from None
        return value


TIMEOUT_S: Variable[float] = Variable(
    "DEEP_COMM_TIMEOUT_S",
    Kind("a positive number of seconds", _parse_positive_float),
    30.0,
    "How long a kernel waits for a peer before it gives up.",
    "Buffer(timeout_s=) overrides it.",
)
NUM_SMS: Variable[int | None] = Variable(
    "DEEP_COMM_NUM_SMS",
    _at_least(1),
    None,
    "SMs of calls without a Config.",
    "Read when a Buffer is built. Unset: as docs/guide/sms.md says on GPUs, 1 on the host target.",
)
EARLY_LAUNCHES: Variable[bool] = Variable(
    "DEEP_COMM_EARLY_LAUNCHES",
    _FLAG,
    True,
    "Low-latency launches, dispatches with new routing and copies of expanded ones may take SMs "
    "while the launch before them still runs.",
    "Read when a Buffer is built. Set 0 where collectives of other libraries run beside them on "
    "other streams, or ranks share a GPU through MPS.",
)
NUM_DIRECT_BYTES: Variable[int | None] = Variable(
    "DEEP_COMM_NUM_DIRECT_BYTES",
    _at_least(0),
    None,
    "Receive region of Buffers that are built without num_direct_bytes=.",
    "Equal on all ranks. Unset: from 128 MiB on, what num_nvl_bytes has beyond 64 MiB. With 0, "
    "outputs of dispatch are torch's own memory, which is slower: for programs that resize their "
    "storage or rely on record_stream.",
)
REGION_TOKENS: Variable[int] = Variable(
    "DEEP_COMM_REGION_TOKENS",
    _at_least(0),
    4096,
    "Tokens per rank for which Config.get_nvl_buffer_size_hint leaves room in the receive region.",
    "With 0 rows go through rings.",
)
DEVICE: Variable[str | None] = Variable(
    "DEEP_COMM_DEVICE",
    _matching("a torch device such as 'cpu', 'cuda' or 'cuda:0'", r"(cpu|cuda)(:\d+)?"),
    None,
    "Device of Buffers that are built without device=.",
    "Unset: CUDA when available, else the host target.",
)
RANKS_PER_NODE: Variable[int | None] = Variable(
    "DEEP_COMM_RANKS_PER_NODE",
    _at_least(1),
    None,
    "Ranks per node, or per logical node.",
    "Unset: counted from host names.",
)
HOST_NAME: Variable[str | None] = Variable(
    "DEEP_COMM_HOST_NAME",
    Kind("any text", str),
    None,
    "What this process calls its machine.",
    "Processes of one machine with different names act as those of different hosts. So several "
    "hosts can be tried on one. Unset: the host name.",
)
RAIL: Variable[str | None] = Variable(
    "DEEP_COMM_RAIL",
    _matching("nvshmem, software (CUDA devices) or simulated (host target)", "|".join(RAILS)),
    None,
    "What joins the nodes of a group.",
    "Buffer(rail=) overrides it. Unset: nvshmem between hosts, software between the logical nodes"
    " of one host, simulated on the host target.",
)
RAIL_NEAR: Variable[bool | None] = Variable(
    "DEEP_COMM_RAIL_NEAR",
    _FLAG,
    None,
    "Whether rows are stored, instead of put, where stores reach the other node.",
    "Unset: over nvshmem, where NVLink joins the nodes. 0: never. 1: on the host target too, "
    "where no network then stands between the nodes.",
)
NIC_GB_PER_S: Variable[float | None] = Variable(
    "DEEP_COMM_NIC_GB_PER_S",
    Kind("a positive number", _parse_positive_float),
    None,
    "What the software NIC carries at most, in 10^9 bytes per second.",
    "Unset: no limit except the speed of the copy engines.",
)
TUNE_FILE: Variable[str | None] = Variable(
    "DEEP_COMM_TUNE_FILE",
    Kind("a path", str),
    None,
    "The file that deep_comm tune writes and Buffers read.",
    "Unset: deep_comm/tune.json in the cache folder.",
)
POISON: Variable[bool] = Variable(
    "DEEP_COMM_POISON",
    _FLAG,
    False,
    "Fill every output with 0xA5 bytes before the kernels run.",
    "Values that no kernel has written then stand out.",
)
TRACE: Variable[int] = Variable(
    "DEEP_COMM_TRACE",
    _at_least(0),
    0,
    "The number of last kernels of a Buffer whose steps are kept (docs/guide/tracing.md).",
    "Buffer(trace=) overrides it. 0 costs nothing.",
)
TRACE_DIR: Variable[str | None] = Variable(
    "DEEP_COMM_TRACE_DIR",
    Kind("a path", str),
    None,
    "Where a Buffer that traces leaves its steps.",
    "The Buffer writes the file when it is destroyed, and when a call times out.",
)
LOG: Variable[str | None] = Variable(
    "DEEP_COMM_LOG",
    Kind("warning, info or debug", _parse_level),
    None,
    "Level of Python's logger deep_comm (docs/guide/troubleshooting.md).",
    "Read when a Buffer is built. info logs a line for each Buffer, debug every call. Unset: as "
    "the program has it.",
)
DEEP_EP_FULL_RDMA: Variable[bool] = Variable(
    "DEEP_COMM_DEEP_EP_FULL_RDMA",
    _FLAG,
    False,
    "Of the drop-in deep_ep: allocate all of num_rdma_bytes.",
    "For programs that use the memory themselves. Unset: what low-latency calls need for the "
    "shape that has this size hint.",
)
DECODE_TOKENS: Variable[int | None] = Variable(
    "DEEP_COMM_DECODE_TOKENS",
    _at_least(0),
    None,
    "The most tokens that a rank may have in a decode step.",
    "Equal on all ranks. Unset: in ExpertParallel what was measured (docs/guide/tuning.md), else "
    "128; in the vLLM adapter 128. 0: in the vLLM adapter no step is a decode step.",
)
VLLM: Variable[bool] = Variable(
    "DEEP_COMM_VLLM",
    _FLAG,
    False,
    "Let deep_comm's vLLM plugin replace vLLM's DeepEP backends.",
)

REGISTRY: tuple[Variable[Any], ...] = tuple(
    each for each in globals().values() if isinstance(each, Variable)
)


def require_valid() -> None:
    """Before ranks meet: one that fails alone, later, would let the others wait.

    Raises:
        ArgumentError: a variable that is set does not parse.
    """
    for each in REGISTRY:
        each.get()


# Read by the build, not by the package; listed so that unknown() does not call them typos.
# Name: (default, meaning).
BUILD_VARIABLES: dict[str, tuple[str, str]] = {
    "DEEP_COMM_CUDA": ("AUTO", "the CUDA module: AUTO (built when nvcc is found), ON or OFF"),
    "DEEP_COMM_CUDA_ARCHS": (
        "90a",
        "the GPUs it is built for (docs/guide/status.md): 80, 90a, 100f, 120f, with semicolons "
        "between",
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
        rows.append(
            (
                variable.name,
                value,
                default,
                f"{variable.doc} {variable.more} ({variable.kind.rule})",
            )
        )
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
