"""How many tokens each rank has in a step, told from host to host.

Ranks of one host share a page. Every decode exchange of "auto" brings all ranks the same numbers
by way of the GPUs, which is sure but takes a launch and a trip over a bus; here they are there when
the slowest rank is about to launch its dispatch, as a rule long before this one asks. Whoever does
not find them here looks at what the exchange has brought: the numbers are the same. The kernel does
not tell the host of its own accord then (Buffer.wait_low_latency_num_tokens): one that stores to
the host's memory ends later.

A word is written whole and holds all there is to know, so that nothing needs an order: the number
of the exchange, which the ranks count alike, and the tokens. There are two of a rank, for even and
odd exchanges: a rank ends one when all have told of it, so that none can be two ahead of one that
still reads. Whose word is gone all the same (a mode was named for the exchange between) is not
found, never taken for another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_comm import _core
from deep_comm.handle import LowLatencyHandle

if TYPE_CHECKING:
    from deep_comm._core import Decoded
    from deep_comm.context import Context
    from deep_comm.ranks.rendezvous import Rendezvous


class HostWords:
    """Of one rank.

    Attributes:
        tell(num_tokens): of the next exchange, whose number it returns; once it is sure to be
            launched, since peers may act on it at once: what raises before it is no exchange.
        most(exchange): that any rank has told of this one; None: not all have, after a while in
            which the GIL was free.
        exchange(), set_exchange(number): the last one that this rank has told of.
        place: arguments of what native calls (calls.py) tell and count by, in this memory.
    """

    __slots__ = ("exchange", "most", "place", "set_exchange", "tell")

    def __init__(self, segment: _core.Segment, rank: int, num_ranks: int) -> None:
        self.place = segment.address, rank, num_ranks, segment
        self.tell, self.most, self.exchange, self.set_exchange = _core.host_words(*self.place)

    @classmethod
    def create(cls, rendezvous: Rendezvous) -> HostWords | None:
        """None, on all ranks, where they do not share memory. Collective."""
        rank, num_ranks = rendezvous.rank, rendezvous.size
        num_bytes = _core.host_words_bytes(num_ranks)
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


def most_tokens(ctx: Context, words: HostWords, state: Decoded) -> int:
    """The most tokens that any rank had in an exchange that is launched: as the hosts tell, or as
    the exchange has brought it, whichever is there first.

    Raises:
        PeerTimeout, or what else the exchange ended with.
    """
    most = words.most(state.exchange)
    if most is not None:
        return most
    passed = ctx.backend.mark()
    try:
        while passed is not None and not passed.has_passed():
            most = words.most(state.exchange)
            if most is not None:
                return most
    except BaseException:  # of a signal's handler: the rule will not have learned of this exchange
        ctx.engine.note_interrupt()
        raise
    ctx.check()
    handle = LowLatencyHandle(state.record)
    return max(handle.recv_tokens.tolist())
