"""How many SMs a call gets that names none: measured on this machine if it has been, else a model.

Every rank must come to the same number, while ranks may have different numbers of tokens; so the
choice depends on what they share: the row's bytes and the number of ranks. Tokens drop out anyway:
the time on the links and the time on the SMs both grow with them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deep_comm.config import (
    Config,
    host_default,
    recommended_combine_config,
    recommended_dispatch_config,
)
from deep_comm.errors import ArgumentError
from deep_comm.settings import env

PRODUCT_METHODS = ("unfused", "decomposed", "fused")
"""Of products in deep_comm.tp."""

TOLERANCE = 0.03
"""SMs are worth more to the experts than this part of a call's time is to the caller."""

FEWEST_SMS, MOST_SMS = 8, 32

FEW_ROWS_SMS, FEW_ROWS_GAIN_US = 48, 5.0
"""Combine: so many SMs spare a call so much, or a greater part (table in docs/guide/sms.md)."""

MORE_SUMS = 1.5
"""Combine: so many times the SMs of the plain call, where an SM has more to add (the same page)."""


@dataclass(frozen=True)
class Model:
    """t = fixed + (linkᵖ + (sm / SMs)ᵖ)^(1/p): the slower of the links and the SMs, and a little
    more where they are alike, the less so the greater p. All times in µs.

    Attributes:
        sm_us_per_row: time of one SM for a row, of a rank's own ones too, whatever its size.
        sm_us_per_byte: and for its bytes.
    """

    fixed_us: float
    sm_us_per_row: float
    sm_us_per_byte: float
    sharpness: float

    def us(self, num_rows: float, row_bytes: int, num_ranks: int, num_sms: float) -> float:
        """Time of a call that moves ``num_rows`` rows of every rank, its own ones among them."""
        return self.fixed_us + self._moving_us(num_rows, row_bytes, num_ranks, num_sms)

    def num_sms(self, row_bytes: int, num_ranks: int, max_sms: int | None = None) -> int:
        """The fewest SMs that are within the tolerance of the links' own time.

        Args:
            row_bytes: of payload and scales.
            max_sms: of the device.
        """
        most = MOST_SMS if max_sms is None else min(MOST_SMS, max_sms)
        wanted_us = (1 + TOLERANCE) * _link_us(1.0, row_bytes, num_ranks)
        for num_sms in range(min(FEWEST_SMS, most), most):
            if self._moving_us(1.0, row_bytes, num_ranks, num_sms) <= wanted_us:
                return num_sms
        return most

    def _moving_us(self, num_rows: float, row_bytes: int, num_ranks: int, num_sms: float) -> float:
        link_us = _link_us(num_rows, row_bytes, num_ranks)
        sm_us = num_rows * (self.sm_us_per_row + self.sm_us_per_byte * row_bytes) / num_sms
        slower, faster = max(link_us, sm_us), min(link_us, sm_us)
        return float(slower * (1 + (faster / slower) ** self.sharpness) ** (1 / self.sharpness))


def _link_us(num_rows: float, row_bytes: int, num_ranks: int) -> float:
    """One GPU's NVLink, in one direction."""
    bytes_per_us = _LINK_BYTES_PER_US[2 if num_ranks <= 2 else 4]
    return num_rows * row_bytes * (num_ranks - 1) / num_ranks / bytes_per_us


# What rows leave at where SMs are enough, by ranks: 2 × H200 and 4 × H200, 2026-11-21.
_LINK_BYTES_PER_US = {2: 362e3, 4: 353e3}

# Cached dispatch in direct mode, 2 × H200, 2026-11-21, 4096 tokens, top-8 of 256 experts, eager,
# rows of 14336, 7392 (FP8 and scales) and 4096 bytes, 16 numbers of SMs of each (table in
# docs/guide/sms.md). The slower of links and SMs, without a bend. With 4 GPUs 8 SMs take 4 % longer
# than this says.
DISPATCH = Model(fixed_us=8.7, sm_us_per_row=0.0016, sm_us_per_byte=19.5e-6, sharpness=64)
# Combine, staged, the same machine and tokens, rows of 14336 bytes, 8 to 96 SMs: six times, within
# 3.5 %. 4 × H200, 2026-11-22: within 4 %, 8 to 128 SMs; at 1024 tokens up to 8 % less than this.
COMBINE = Model(fixed_us=28.0, sm_us_per_row=0.0, sm_us_per_byte=31.5e-6, sharpness=10)


@functools.cache  # some 40 µs, in the first call of a form of every Buffer
def modelled_num_sms(row_bytes: int, num_ranks: int, max_sms: int | None = None) -> int:
    """Of a dispatch and of the combine of its handle, which runs on as many: what the one of them
    wants that wants more.

    Args:
        row_bytes: of the dispatch, payload and scales.
        max_sms: of the device.
    """
    return max(model.num_sms(row_bytes, num_ranks, max_sms) for model in (DISPATCH, COMBINE))


def few_rows(row_bytes: int, num_ranks: int, max_sms: int | None = None) -> tuple[int, int]:
    """A combine that returns up to so many rows, its rank's own ones among them, runs on so many
    SMs if nobody has said how many, since what they spare is more than the tolerance of such a
    call. It need not have as many as its dispatch, nor as the other ranks.
    """
    link_us = FEW_ROWS_GAIN_US / TOLERANCE - COMBINE.fixed_us
    most_rows = int(link_us / _link_us(1.0, row_bytes, max(2, num_ranks)))
    return most_rows, FEW_ROWS_SMS if max_sms is None else min(FEW_ROWS_SMS, max_sms)


FILE_VERSION = 1
# A measurement holds for rows of up to this factor of its own bytes, either way.
_NEAR = 1.5


Entry = Mapping[str, Any]  # operation, row_bytes, num_sms, send, recv, mean_us


def tune_file() -> Path:
    """DEEP_COMM_TUNE_FILE, else deep_comm/tune.json in the user's cache folder."""
    named = env.TUNE_FILE.get()
    if named is not None:
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "deep_comm" / "tune.json"


def machine_key(device: torch.device, num_ranks: int) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "host target"
    return f"{name} x {num_ranks}"


def read(device: torch.device, num_ranks: int) -> list[Entry]:
    """What was measured on machines like this one; empty if nothing was.

    The host target reads only a file that DEEP_COMM_TUNE_FILE names: its default is meant
    for tests. Raises ArgumentError if such a file cannot be read; the one in the cache
    folder is then passed over.
    """
    return _read(device, num_ranks, "entries", _config_of)


def read_decode_tokens(device: torch.device, num_ranks: int) -> list[Entry]:
    """Measured thresholds of layers (hidden, num_experts, num_topk,
    decode_tokens); else as read().
    """
    return _read(device, num_ranks, "layers", _decode_tokens_of)


def read_products(device: torch.device, num_ranks: int) -> list[Entry]:
    """The fastest methods of deep_comm.tp's products (op, rows of a rank, depth, columns, dtype,
    method); else as read().
    """
    return _read(device, num_ranks, "products", _product_of)


def _read(
    device: torch.device, num_ranks: int, section: str, check: Callable[[Entry], object]
) -> list[Entry]:
    is_named = env.TUNE_FILE.get() is not None
    if device.type != "cuda" and not is_named:
        return []
    path = tune_file()
    try:
        document = json.loads(path.read_text())
        if document["version"] != FILE_VERSION:
            raise ValueError(f"version {document['version']}, this package reads {FILE_VERSION}")
        entries = document["machines"].get(machine_key(device, num_ranks), {}).get(section, [])
        for entry in entries:
            check(entry)
        return list(entries)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if is_named:
            rule = f"must be a file that deep_comm tune wrote ({type(error).__name__}: {error})"
            raise ArgumentError(env.TUNE_FILE.name, str(path), rule) from error
        return []


def store(path: Path, key: str, date: str, entries: Sequence[Entry]) -> None:
    """Replace what ``path`` says of one machine's calls for rows of these sizes; all else stays."""
    size_of = lambda entry: (entry["operation"], entry["row_bytes"])
    _replace(path, key, "entries", entries, size_of, date=date)


def store_decode_tokens(path: Path, key: str, entry: Entry) -> None:
    """Replace what ``path`` says of one machine's layers of this shape; all else stays."""
    _replace(path, key, "layers", [entry], _layer_shape)


def store_products(path: Path, key: str, entries: Sequence[Entry]) -> None:
    """Replace what ``path`` says of one machine's products of these shapes; all else stays."""
    _replace(path, key, "products", entries, _product_of)


def _replace(
    path: Path,
    key: str,
    section: str,
    entries: Sequence[Entry],
    shape_of: Callable[[Entry], object],
    **of_machine: str,
) -> None:
    shapes = {shape_of(entry) for entry in entries}

    def update(machine: dict[str, Any]) -> None:
        others = [other for other in machine.get(section, []) if shape_of(other) not in shapes]
        machine[section] = [*others, *map(dict, entries)]
        machine.update(of_machine)

    _update(path, key, update)


def _product_of(entry: Entry) -> tuple[str, str, int, int, int]:
    extents = (int(entry["rows"]), int(entry["depth"]), int(entry["columns"]))
    if min(extents) < 1 or entry["method"] not in PRODUCT_METHODS:
        raise ValueError(f"product {dict(entry)}")
    return (str(entry["op"]), str(entry["dtype"]), *extents)


def product_method(
    entries: Sequence[Entry], op: str, dtype: torch.dtype, extents: tuple[int, int, int]
) -> str | None:
    """Of the measured product most like this one (rows of a rank, depth, columns); None if none is
    like it in every extent.
    """
    best: tuple[float, str] | None = None
    for entry in entries:
        found, name, *measured = _product_of(entry)
        if found != op or f"torch.{name}" != str(dtype) or min(extents) < 1:
            continue
        far = [abs(math.log(there / here)) for there, here in zip(measured, extents, strict=True)]
        if max(far) <= math.log(_NEAR) and (best is None or sum(far) < best[0]):
            best = sum(far), str(entry["method"])
    return None if best is None else best[1]


@contextlib.contextmanager
def without_an_absent_file() -> Iterator[None]:
    """While a command measures what it will store: a Buffer refuses a file that DEEP_COMM_TUNE_FILE
    names and that is not there."""
    name, path = env.TUNE_FILE.name, env.TUNE_FILE.get()
    is_absent = path is not None and not Path(path).exists()
    if is_absent:
        del os.environ[name]
    try:
        yield
    finally:
        if is_absent:
            os.environ[name] = str(path)


def _update(path: Path, key: str, update: Callable[[dict[str, Any]], None]) -> None:
    document: dict[str, Any] = {"version": FILE_VERSION, "machines": {}}
    try:
        known = json.loads(path.read_text())
        if known["version"] == FILE_VERSION and isinstance(known["machines"], dict):
            document = known
    except (OSError, ValueError, KeyError, TypeError):
        pass
    update(document["machines"].setdefault(key, {}))
    if env.TUNE_FILE.get() is None:  # a folder that somebody names may be a typing error
        path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.{os.getpid()}")
    written.write_text(json.dumps(document, indent=2) + "\n")
    written.replace(path)  # ranks may be reading


_LAYER_SHAPE = ("hidden", "num_topk", "num_experts")


def _layer_shape(entry: Entry) -> tuple[int, ...]:
    return tuple(int(entry[name]) for name in _LAYER_SHAPE)


def _decode_tokens_of(entry: Entry) -> int:
    if min(_layer_shape(entry)) < 1:
        raise ValueError(f"shape {_layer_shape(entry)}")
    decode_tokens = int(entry["decode_tokens"])
    if not 1 <= decode_tokens < 1 << 16:
        raise ValueError(f"decode_tokens {decode_tokens}")
    return decode_tokens


def decode_tokens(
    device: torch.device, num_ranks: int, hidden: int, num_topk: int, num_experts: int
) -> int | None:
    """Measured for the layer most like this one; None if none is like it
    in hidden size and top-k.
    """
    wanted = (hidden, num_topk, num_experts)
    best: tuple[list[float], int] | None = None
    for entry in read_decode_tokens(device, num_ranks):
        pairs = zip(_layer_shape(entry), wanted, strict=True)
        far = [abs(math.log(there / here)) for there, here in pairs]
        if max(far[:2]) <= math.log(_NEAR) and (best is None or far < best[0]):
            best = far, _decode_tokens_of(entry)
    return None if best is None else best[1]


def _config_of(entry: Entry) -> Config:
    return Config(int(entry["num_sms"]), int(entry["send"]), int(entry["recv"]))


class DefaultConfig:
    """The Config of calls without one, once their rows are known. Compared by identity.

    ``max_sms``: of the device; None: the host target, which the model of GPUs says nothing about.
    """

    def __init__(
        self,
        operation: str,
        recommended: Callable[[int, int], Config],
        entries: Sequence[Entry],
        num_ranks: int,
        max_sms: int | None,
    ) -> None:
        self._recommended = recommended
        self._num_ranks = num_ranks
        self._max_sms = max_sms
        self._measured = [
            (int(entry["row_bytes"]), _config_of(entry))
            for entry in entries
            if entry["operation"] == operation
            and (max_sms is None or int(entry["num_sms"]) <= max_sms)
        ]

    def __call__(self, row_bytes: int) -> Config:
        """``row_bytes``: of payload and scales."""
        near = [
            (abs(math.log(measured / row_bytes)), config)
            for measured, config in self._measured
            if row_bytes / _NEAR <= measured <= row_bytes * _NEAR
        ]
        if near:
            return min(near, key=lambda pair: pair[0])[1]
        if self._max_sms is None:
            return host_default()
        return self._recommended(
            self._num_ranks, modelled_num_sms(row_bytes, self._num_ranks, self._max_sms)
        )

    def combine_sms(self, row_bytes: int, num_channels: int) -> tuple[int, int, int]:
        """As few_rows, then the SMs of a combine that adds more: float32 rows, weights, biases.
        Zeros where that is no more than ``num_channels``, its handle's."""
        if self._max_sms is None:
            return 0, 0, 0
        most_rows, num_sms = few_rows(row_bytes, self._num_ranks, self._max_sms)
        more_sums = min(math.ceil(MORE_SUMS * num_channels), self._max_sms)
        few = (most_rows, num_sms) if num_sms > num_channels else (0, 0)
        return (*few, more_sums if more_sums > num_channels else 0)


class _DefaultNumSms(int):
    """Tells "nobody has chosen" from the same number chosen."""


DEFAULT_NUM_SMS = _DefaultNumSms(20)
RECOMMENDED = {
    "dispatch": recommended_dispatch_config,
    "combine": recommended_combine_config,
}


class Defaults:
    """What calls of one Buffer get without a Config, in the order of docs/guide/sms.md.

    ``num_sms``: the Buffer's; DEFAULT_NUM_SMS: nobody has set it.
    """

    def __init__(
        self,
        device: torch.device,
        entries: Sequence[Entry],
        num_ranks: int,
        max_sms: int | None,
        is_internode: bool,
    ) -> None:
        """``entries``: what read() gave."""
        self._env_num_sms = env.NUM_SMS.get()
        self._is_host = device.type == "cpu"
        self._num_ranks, self._max_sms, self._is_internode = num_ranks, max_sms, is_internode
        self.can_choose = self._env_num_sms is None and (not self._is_host or bool(entries))
        self._of_rows = {
            operation: DefaultConfig(operation, recommended, entries, num_ranks, max_sms)
            for operation, recommended in RECOMMENDED.items()
        }

    def choose(self, operation: str, num_sms: int) -> tuple[Config | DefaultConfig, bool]:
        """Of a "dispatch" or "combine"; and whether somebody has said how many SMs it may have."""
        names_sms = not self.can_choose or num_sms is not DEFAULT_NUM_SMS
        if names_sms or self._is_internode:
            return self.config_of_any_rows(operation, num_sms), names_sms
        return self._of_rows[operation], False

    def config_of_any_rows(self, operation: str, num_sms: int) -> Config:
        """The Config of an operation whose rows are not known."""
        if self._is_host:
            return host_default(self._env_num_sms)
        if self._env_num_sms is not None:
            num_sms = self._env_num_sms
        elif self._max_sms is not None:
            num_sms = min(num_sms, self._max_sms)
        return RECOMMENDED[operation](self._num_ranks, num_sms)
