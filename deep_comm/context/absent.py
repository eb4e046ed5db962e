"""Ranks that a Buffer does without: ``Buffer.reset(without=...)``; docs/design/0043."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from deep_comm import errors
from deep_comm._core import Engine
from deep_comm.backends import Backend
from deep_comm.errors import ArgumentError, HandleMismatch

_ABSENT = "without rank "
SINCE_THE_RESET = "must be of a dispatch since the last reset(without=...), or reset() of all ranks"


def membership(members: tuple[str, ...], absent: Iterable[int]) -> tuple[str, ...]:
    """Who makes handles: the members, and which of them were absent. As ``members`` if none is."""
    return (*members, *(f"{_ABSENT}{rank}" for rank in sorted(absent)))


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


class Absence:
    """Ranks that one Buffer does without, and how the others agree on them.

    Native calls hold it: it holds no Context. ``ranks``: the absent ones, as the last reset said.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.last_shrink_barrier = 0  # number of the last barrier of the ranks that go on
        self.ranks: frozenset[int] = frozenset()

    def require_present(self, rank_prefix_matrix: Tensor) -> None:
        """Raise HandleMismatch if rows of a handle go to absent ranks, or come from them: such a
        call would wait for those.

        Of handles that do not say who made them, a sequence of tensors; these are looked at, so
        that the host waits for the device, but not while a graph is captured.
        """
        if self._backend.is_capturing():
            return
        self._backend.synchronize()  # an asynchronous dispatch may still write it
        until = rank_prefix_matrix.cpu()
        sent = torch.cat((until[:1], until.diff(dim=0)))
        for rank in sorted(self.ranks):
            if sent[rank].any() or sent[:, rank].any():
                raise HandleMismatch("handle", f"one with rows of rank {rank}", SINCE_THE_RESET)

    def end(self) -> None:
        """All ranks are there, and their Buffers' words as new."""
        self.last_shrink_barrier = 0
        self.ranks = frozenset()

    def go_on(self, engine: Engine, absent: frozenset[int]) -> None:
        """The Buffer's words are as new, on all ranks but ``absent``, of which nothing is wanted
        from now on. Collective over the others; a kernel agrees with its peers, no group is asked.

        This rank's kernels have ended. If it fails, the record stays: the Buffer needs another
        reset.
        """
        bits = sum(1 << rank for rank in absent)
        number = self.last_shrink_barrier + 1 | 1
        while True:
            engine.clear_error()  # or the barrier would give up at once
            number = self._shrink_barrier(engine, bits, number)
            # The absent ranks have been told; only a reset of all ranks takes that back.
            self.ranks = absent
            engine.do_without(absent=bits)
            found = self._shrink_barrier(engine, bits, number + 1)
            if found == number + 1:
                return
            number = found | 1  # a peer has begun anew meanwhile

    def _shrink_barrier(self, engine: Engine, bits: int, number: int) -> int:
        self.last_shrink_barrier = number
        backend = self._backend
        stream = 0 if backend.is_synchronous else backend.comm_stream().cuda_stream
        engine.shrink_barrier(absent=bits, number=number, stream=stream)
        backend.synchronize()
        self.last_shrink_barrier, has_agreed = engine.shrink_barrier_result()
        record = engine.poll_error()
        if record is not None:
            raise errors.from_record(record)
        if not has_agreed and self.last_shrink_barrier == number:
            raise errors.DeepCommError(
                "a shrink barrier ended without a result; report this as a bug"
            )
        return self.last_shrink_barrier
