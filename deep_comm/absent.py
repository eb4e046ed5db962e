"""Ranks that a Buffer does without: ``Buffer.reset(without=...)``; docs/design/0043."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from deep_comm import errors
from deep_comm.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from deep_comm.context import Context

_ABSENT = "without rank "


def makers(members: tuple[str, ...], absent: Iterable[int]) -> tuple[str, ...]:
    """Who makes handles: the members, and which of them were absent. As ``members`` if none is."""
    return (*members, *(f"{_ABSENT}{rank}" for rank in sorted(absent)))


def differ_in_absence(first: tuple[str, ...], second: tuple[str, ...]) -> bool:
    """Of makers of handles: the same members, but not the same ranks absent."""
    return first != second and all(
        name.startswith(_ABSENT) for name in set(first).symmetric_difference(second)
    )


def checked(without: Iterable[int], rank: int, num_ranks: int) -> frozenset[int]:
    """The argument of reset(); raises ArgumentError."""
    rule = f"must be ranks of the group, 0..{num_ranks - 1}, and not this one ({rank})"
    try:
        named = frozenset(without)
    except TypeError:
        raise ArgumentError("without", repr(without), rule) from None
    if not all(type(each) is int and 0 <= each < num_ranks and each != rank for each in named):
        raise ArgumentError("without", sorted(named, key=repr), rule)
    return named


def require_low_latency(ctx: Context) -> None:
    """Low-latency calls know of absent ranks only where they have masks."""
    if ctx.absent and not ctx.enable_shrink:
        raise UnsupportedError(
            f"low-latency calls of a Buffer that goes on without ranks {sorted(ctx.absent)} need "
            "enable_shrink=True, so that they can do without ranks, too"
        )


def go_on(ctx: Context, absent: frozenset[int]) -> None:
    """The Buffer's words are as new, on all ranks but ``absent``, of which nothing is wanted from
    now on. Collective over the others; their kernels meet, no group is asked.

    This rank's kernels have ended. If it fails, the record stays: the Buffer needs another reset.
    """
    bits = sum(1 << rank for rank in absent)
    number = ctx.last_meeting + 1 | 1
    while True:
        ctx.engine.clear_error()  # or the meeting would give up at once
        number = _meet(ctx, bits, number)
        # The absent ranks have been told; only a reset of all ranks takes that back.
        ctx.absent = absent
        ctx.engine.do_without(absent=bits)
        found = _meet(ctx, bits, number + 1)
        if found == number + 1:
            return
        number = found | 1  # a peer has begun anew meanwhile


def _meet(ctx: Context, bits: int, number: int) -> int:
    ctx.last_meeting = number
    backend = ctx.backend
    stream = 0 if backend.is_synchronous else backend.comm_stream().cuda_stream
    ctx.engine.meet(absent=bits, number=number, stream=stream)
    backend.synchronize()
    ctx.last_meeting, has_agreed = ctx.engine.meeting()
    record = ctx.engine.poll_error()
    if record is not None:
        raise errors.from_record(record)
    if not has_agreed and ctx.last_meeting == number:
        raise errors.DeepCommError("a meeting ended without a result; report this as a bug")
    return ctx.last_meeting
