"""Dispatch of one micro-batch beside combine of another: two Buffers over one
group (docs/design/0010).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import expanded
import forked
import pytest
from cases import Case
from roundtrip import call_once, run_case, verify

import deep_comm
from deep_comm import local, simulate

LEFT = Case((12, 7, 20), experts=6, topk=2, seed=1, calls=12, num_sms=4, slots=3, send_chunk=2)
RIGHT = Case(
    (3, 25, 0), experts=9, topk=3, hidden=256, seed=2, calls=12, fused_layout=True, biases=1
)


def _both(fns: list[Callable[[], Any]]) -> list[Any]:
    """Run them at once, in threads; raise the first error."""
    with ThreadPoolExecutor(len(fns)) as pool:
        return [future.result() for future in [pool.submit(fn) for fn in fns]]


def two_at_once(
    group: Any, left: Case, right: Case, call_once: Callable[..., Any] = call_once
) -> list[Any]:
    """All calls of both cases, each in a thread and a Buffer of its own,
    without any order between them.
    """
    with (
        deep_comm.Buffer(
            group, left.nvl_bytes, num_direct_bytes=left.direct_bytes, device="cpu", timeout_s=60
        ) as one,
        deep_comm.Buffer(
            group, right.nvl_bytes, num_direct_bytes=right.direct_bytes, device="cpu", timeout_s=60
        ) as two,
    ):

        def calls(buffer: deep_comm.Buffer, case: Case) -> list[Any]:
            return [call_once(buffer, case, call) for call in range(case.calls)]

        return _both([lambda: calls(one, left), lambda: calls(two, right)])


@pytest.mark.parametrize("direct_bytes", [0, 8 << 20])
def test_two_operations_in_flight_in_threads(direct_bytes: int) -> None:
    left = dataclasses.replace(LEFT, direct_bytes=direct_bytes)
    right = dataclasses.replace(RIGHT, direct_bytes=direct_bytes)
    results = local.run(lambda group: two_at_once(group, left, right), 3, timeout_s=120)
    verify(left, [pair[0] for pair in results])
    verify(right, [pair[1] for pair in results])


def test_two_expanded_dispatches_in_flight() -> None:
    """Neither waits beside its dispatch: it could hold the SMs that the other's peers wait for."""
    left = dataclasses.replace(LEFT, direct_bytes=8 << 20)
    right = dataclasses.replace(RIGHT, direct_bytes=8 << 20, num_sms=1, slots=1, send_chunk=1)
    results = local.run(
        lambda group: two_at_once(group, left, right, expanded.call_once), 3, timeout_s=120
    )
    expanded.verify(left, [pair[0] for pair in results])
    expanded.verify(right, [pair[1] for pair in results])


def test_two_operations_in_flight_in_processes() -> None:
    right = dataclasses.replace(RIGHT, direct_bytes=8 << 20)
    results = forked.run(two_at_once, 3, LEFT, right, timeout_s=120)
    verify(LEFT, [pair[0] for pair in results])
    verify(right, [pair[1] for pair in results])


class _Half:
    """One of two Buffers' ranks: the machine simulates both, under one scheduler."""

    in_process = True

    def __init__(self, group: simulate.SimulatedGroup, num_ranks: int) -> None:
        self._group = group
        self._num_ranks = num_ranks
        self.which, self._rank = divmod(group.rank(), num_ranks)
        self.simulation = group.simulation
        self.machine_rank = group.rank()

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._num_ranks

    def all_gather_object(self, payload: Any) -> list[Any]:
        first = self.which * self._num_ranks
        return self._group.all_gather_object(payload)[first : first + self._num_ranks]


@pytest.mark.parametrize("seed", range(40))
def test_two_operations_in_flight_under_every_schedule(seed: int) -> None:
    """Each rank's kernels of both Buffers are interleaved thread by thread."""
    shapes = dict(hidden=16, num_sms=2, slots=2, send_chunk=1, nvl_bytes=1 << 18, calls=2)
    pair = (
        Case(
            (5, 0, 7), experts=4, topk=2, seed=seed, direct_bytes=(0, 1 << 17)[seed % 2], **shapes
        ),
        Case(
            (2, 6, 1),
            experts=7,
            topk=3,
            seed=seed + 1,
            fused_layout=True,
            direct_bytes=1 << 17,
            **shapes,
        ),
    )

    def rank_main(group: simulate.SimulatedGroup) -> Any:
        half = _Half(group, 3)
        return run_case(half, pair[half.which])

    results = simulate.run(rank_main, 6, seed, timeout_s=60)
    verify(pair[0], results[:3])
    verify(pair[1], results[3:])
