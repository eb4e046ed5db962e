"""What one program is, and how it counts what it compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Release:
    """A distribution on PyPI and the modules of it that run as released."""

    project: str
    version: str
    package: str  # the top-level name its modules are imported by
    modules: tuple[str, ...]  # below it; every other one is a stand-in

    @property
    def pin(self) -> str:
        return f"{self.project}=={self.version}"


@dataclass(frozen=True)
class Program:
    """An adapter and what it is put through.

    ``run(group, checks)`` is called on every rank after ``stand_ins()`` was put in place: names
    of modules that do not run as released, and what of them the adapter gets.
    """

    name: str
    adapter: str  # its file, as the release calls it
    release: Release
    run: Callable[[Any, Checks], None]
    stand_ins: Callable[[], Mapping[str, Mapping[str, Any]]] = dict
    ranks: tuple[int, ...] = (2, 4)  # on the host target
    backend: str = "gloo"  # of the group it hands over on GPUs
    variables: Mapping[str, str] = field(default_factory=dict)
    leaves_traces: bool = False  # in its processes, such as operators: others get new ones


class Mismatch(AssertionError):
    """An adapter's result is not the dense layer's."""


class Checks:
    """Comparisons of one rank."""

    def __init__(self) -> None:
        self.num_compared = 0

    def equal(self, got: Tensor, expected: Tensor, what: str) -> None:
        """Bit for bit, after a cast of ``expected`` to the type of ``got``.

        Raises Mismatch, which names the first place.
        """
        if got.shape != expected.shape:
            raise Mismatch(f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
        expected = expected.to(got.device, got.dtype)
        differs = ~((got == expected) | (got.isnan() & expected.isnan()))
        if bool(differs.any()):
            place = tuple(int(index) for index in differs.nonzero()[0])
            raise Mismatch(
                f"{what}: {int(differs.sum())} of {got.numel()} differ, first at {place}: "
                f"{got[place].item()}, expected {expected[place].item()}"
            )
        self.num_compared += 1

    def close(self, got: Tensor, expected: Tensor, share: float, what: str) -> None:
        """Within ``share`` of the largest magnitude expected. Raises Mismatch."""
        if got.shape != expected.shape:
            raise Mismatch(f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
        if got.numel():
            error = (got.float() - expected.float()).abs().max()
            limit = share * float(expected.float().abs().max())
            if not bool(error <= limit):  # NaN is no match either
                raise Mismatch(f"{what}: off by {float(error)}, allowed {limit}")
        self.num_compared += 1

    def agrees(self, got: Tensor, expected: Tensor, share: float, what: str) -> None:
        """:meth:`equal` if ``share`` is 0, else :meth:`close`."""
        if share:
            self.close(got, expected, share, what)
        else:
            self.equal(got, expected, what)

    def true(self, is_so: object, what: str) -> None:
        if not bool(is_so):
            raise Mismatch(what)
        self.num_compared += 1


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
