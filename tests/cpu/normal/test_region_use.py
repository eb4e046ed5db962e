"""Buffer.stats(), and the warning of calls whose rows have no room in the receive region."""

import functools
import sys
import warnings
from typing import Any

import pytest
import torch
from on_buffers import on_buffers

from deep_comm import Buffer, BufferStats, PerformanceWarning, local

RANKS, EXPERTS, TOKENS, HIDDEN = 2, 8, 500, 5120  # 10 MiB of rows: worth a warning


def exchange(buffer: Buffer, num_tokens: int) -> None:
    """A dispatch with new routing, a cached one, and a combine."""
    x = torch.full((num_tokens, HIDDEN), float(buffer.rank + 1)).bfloat16()
    idx = torch.arange(num_tokens)[:, None] % EXPERTS
    idx = torch.cat((idx, (idx + EXPERTS // RANKS) % EXPERTS), dim=1)  # to every rank
    rows, _, _, _, handle, _ = buffer.dispatch(x, topk_idx=idx, num_experts=EXPERTS)
    again = buffer.dispatch(x, handle=handle)[0]
    assert torch.equal(rows, again)
    del again
    combined = buffer.combine(rows, handle)[0]
    assert torch.equal(combined, RANKS * x)


def stats_of(
    group: Any, num_nvl_bytes: int, num_tokens: int = TOKENS, **options: Any
) -> tuple[BufferStats, list[str]]:
    with Buffer(group, num_nvl_bytes, 32 << 20, device="cpu", timeout_s=60, **options) as buffer:
        seen: list[str] = []
        context = buffer._context
        note = functools.partial(_noted, seen, context.num_nvl_bytes, context.num_direct_bytes)
        if options.get("num_direct_bytes") != 0:
            context.native_calls.warn_without_room(note)
        for _ in range(2):
            exchange(buffer, num_tokens)
        return buffer.stats(), seen


def _noted(seen: list[str], *sizes: int) -> None:
    """Warnings of threads are not caught apart, so each rank notes its own."""
    from deep_comm.context.stats import warn_without_room

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_without_room(*sizes)
    assert [each.category for each in caught] == [PerformanceWarning]
    seen += [str(each.message) for each in caught]


@pytest.mark.parametrize("ranks_per_node", [None, 1], ids=["node", "nodes"])
def test_calls_with_room_are_direct_and_warn_nobody(ranks_per_node: int | None) -> None:
    run = functools.partial(stats_of, num_nvl_bytes=192 << 20, ranks_per_node=ranks_per_node)
    for stats, seen in local.run(run, RANKS):
        assert (stats.dispatch_direct, stats.dispatch_rings, stats.missing_bytes) == (4, 0, 0)
        assert (stats.combine_direct, stats.combine_rings) == (2, 0)
        assert (stats.receive_region_bytes, seen) == (128 << 20, [])


@pytest.mark.parametrize("ranks_per_node", [None, 1], ids=["node", "nodes"])
def test_calls_without_room_warn_once_and_the_size_they_name_is_enough(
    ranks_per_node: int | None,
) -> None:
    run = functools.partial(stats_of, ranks_per_node=ranks_per_node)
    for stats, seen in local.run(functools.partial(run, num_nvl_bytes=32 << 20), RANKS):
        assert (stats.dispatch_direct, stats.dispatch_rings) == (0, 4)
        assert (stats.combine_direct, stats.combine_rings) == (0, 2)
        assert stats.missing_bytes >= RANKS * TOKENS * HIDDEN * 2 or ranks_per_node == 1
        (text,) = seen
        assert "num_nvl_bytes=" in text and f"instead of {32 << 20}" in text
        enough = int(text.split("num_nvl_bytes=")[1].split()[0])
    for stats, seen in local.run(
        functools.partial(run, num_nvl_bytes=max(enough, 128 << 20)), RANKS
    ):
        assert (stats.dispatch_rings, stats.combine_rings, seen) == (0, 0, [])


def test_small_calls_and_buffers_that_ask_for_rings_warn_nobody() -> None:
    for options in (dict(num_tokens=20), dict(num_direct_bytes=0)):
        for stats, seen in local.run(
            functools.partial(stats_of, num_nvl_bytes=32 << 20, **options), RANKS
        ):
            assert (stats.dispatch_rings, stats.combine_rings, seen) == (4, 2, [])


def test_a_warning_that_raises_does_not_end_a_call_that_peers_are_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(unraisable.exc_value))

    def main(buffer: Buffer) -> BufferStats:
        exchange(buffer, TOKENS)
        return buffer.stats()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(
            stats.dispatch_rings == 2 for stats in on_buffers(main, RANKS, 32 << 20, timeout_s=60)
        )
    assert [type(error) for error in told] == RANKS * [PerformanceWarning]
