"""How many tokens each rank has in a step, told from host to host.

Ranks of one host share a page. Every decode exchange of "auto" tells all ranks the same number by
way of the GPUs (Buffer.wait_low_latency_num_tokens), which is sure but takes a launch and two trips
over buses; here it is there when the slowest rank has launched its dispatch, as a rule long before
this one asks. Whoever does not find it here asks there: the numbers are the same.

A word is written whole and holds all there is to know, so that nothing needs an order: the number
of the exchange, which the ranks count alike, and the tokens. There are two of a rank, for even and
odd exchanges: a rank ends one when all have told of it, so that none can be two ahead of one that
still reads. Whose word is gone all the same (a mode was named for the exchange between) is not
found, never taken for another.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from deep_comm import _core

if TYPE_CHECKING:
    from deep_comm.rendezvous import Rendezvous

_LINE_WORDS = 16  # 128 bytes: each rank writes lines of its own
_NUM_LOOKS = 64  # some tens of microseconds
_COUNT_BITS = 32
_MOST_TOKENS = (1 << _COUNT_BITS) - 1


class HostWords:
    """Of one rank."""

    def __init__(self, segment: _core.Segment, rank: int, num_ranks: int) -> None:
        self._segment = segment  # holds the memory
        num_words = segment.num_bytes // 8
        self._words = (ctypes.c_uint64 * num_words).from_address(segment.address)
        self._own = [(parity * num_ranks + rank) * _LINE_WORDS for parity in range(2)]
        self._all = [
            [(parity * num_ranks + peer) * _LINE_WORDS for peer in range(num_ranks)]
            for parity in range(2)
        ]

    @classmethod
    def create(cls, rendezvous: Rendezvous) -> HostWords | None:
        """None, on all ranks, where they do not share memory. Collective."""
        rank, num_ranks = rendezvous.rank, rendezvous.size
        num_bytes = 2 * num_ranks * _LINE_WORDS * 8
        segment: _core.Segment | None = None
        try:
            if rank == 0:
                segment = _core.Segment.create(num_bytes)
        except (OSError, RuntimeError):
            pass
        name = rendezvous.all_gather_object(None if segment is None else segment.name)[0]
        try:
            if rank != 0 and name is not None:
                segment = _core.Segment.attach(name, num_bytes)
        except (OSError, RuntimeError):  # another host, or another container's memory
            pass
        has_come = rendezvous.all_gather_object(segment is not None)
        if rank == 0 and segment is not None:
            segment.unlink()
        if segment is None or not all(has_come):
            return None
        return cls(segment, rank, num_ranks)

    def tell(self, exchange: int, num_tokens: int) -> None:
        """Behind this rank's launch: what raises before it is no exchange."""
        self._words[self._own[exchange & 1]] = exchange << _COUNT_BITS | num_tokens

    def most(self, exchange: int) -> int | None:
        """That any rank has told of this one; None: not all have, after some time."""
        words, missing, most = self._words, list(self._all[exchange & 1]), 0
        for _ in range(_NUM_LOOKS):
            while missing:
                word = words[missing[-1]]
                if word >> _COUNT_BITS != exchange:
                    break
                most = max(most, word & _MOST_TOKENS)
                missing.pop()
            if not missing:
                return most
        return None
