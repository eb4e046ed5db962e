"""Many operations in a row: generations do not drift, wrap around, and leave nothing behind."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import expanded
import forked
import pytest
import roundtrip
import torch
from cases import Case
from long_runs import make_and_destroy, many_calls
from schedules import some_of

import deep_comm
from deep_comm import local, simulate

LAST = 0xFFFFFFFF

FORMS = pytest.mark.parametrize("form", [roundtrip, expanded], ids=["plain", "expanded"])


def rounds_from(group: Any, form: Any, case: Case, generation: int) -> list[Any]:
    """All calls of a case, as if ``generation`` kernels had run before."""
    with deep_comm.Buffer(
        group, case.nvl_bytes, num_direct_bytes=case.direct_bytes, device="cpu", timeout_s=60
    ) as buffer:
        group.barrier()
        assert buffer.runtime is not None
        buffer.runtime.set_generation(generation)
        group.barrier()
        return [form.call_once(buffer, case, call) for call in range(case.calls)]


# Four generations a round, five of expanded calls: each role meets the last number once, and the
# first ones after it.
@pytest.mark.parametrize("before_wrap", range(9))
@pytest.mark.parametrize("direct_bytes", [0, 8 << 20])
@FORMS
def test_generations_wrap_around(form: Any, before_wrap: int, direct_bytes: int) -> None:
    case = Case(
        (7, 0, 12), experts=9, topk=3, num_sms=4, slots=2, send_chunk=1, calls=4,
        direct_bytes=direct_bytes, fused_layout=before_wrap % 2 == 0, biases=1,
    )  # fmt: skip
    generation = LAST - before_wrap
    results = local.run(lambda g: rounds_from(g, form, case, generation), 3, timeout_s=60)
    form.verify(case, results)


@pytest.mark.parametrize("seed", some_of(range(24)))
@FORMS
def test_generations_wrap_around_under_every_schedule(form: Any, seed: int) -> None:
    case = Case(
        (5, 0, 4), hidden=16, experts=4, topk=2, slots=2, send_chunk=1, num_sms=2, calls=3,
        nvl_bytes=1 << 18, direct_bytes=(0, 1 << 17)[seed % 2], seed=seed,
    )  # fmt: skip
    generation = LAST - seed % 8
    results = simulate.run(lambda g: rounds_from(g, form, case, generation), 3, seed, timeout_s=60)
    form.verify(case, results)


@pytest.mark.parametrize(
    ("generation", "num_calls"), [(0, 900), (0x7FFFFFFF - 200, 400), (LAST - 200, 400)]
)
def test_hundreds_of_calls_in_a_row(generation: int, num_calls: int) -> None:
    """Through the counter's middle and its end: comparisons of signed distances change there."""
    sums = local.run(
        lambda group: many_calls(group, torch.device("cpu"), num_calls, generation),
        2,
        timeout_s=280,
    )
    assert sums == [num_calls] * 2


def _rss_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def _cycles(group: Any) -> tuple[list[str], list[int]]:
    """20 Buffers one after the other: what is left in /dev/shm, and the
    resident memory after each.
    """
    rss = []
    for _ in range(20):
        make_and_destroy(group, torch.device("cpu"))
        gc.collect()
        rss.append(_rss_bytes())
    left = [path.name for path in Path("/dev/shm").glob(f"deep_comm.*.{os.getpid()}.*")]
    return left, rss


def test_twenty_buffers_leave_no_memory_behind() -> None:
    for left, rss in forked.run(_cycles, 2, timeout_s=200):
        assert left == []
        # Each touches 24 MiB; the first ones load and fill what stays.
        assert max(rss[10:]) - rss[4] < 12 << 20, rss
