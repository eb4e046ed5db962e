"""The number of tokens of each rank in a step, shared by the hosts of one machine.

Every decode exchange of "auto" brings all ranks the same numbers through the GPUs. That needs a
launch and a trip over a bus. On one host the ranks also publish them in shared memory, where they
are as soon as the slowest rank is about to launch its dispatch. A rank that does not find them
there reads what the exchange has brought: the numbers are the same. With host counters the kernel
does not report to the host (Buffer.wait_low_latency_num_tokens), because a kernel that stores to
host memory ends later.

A counter is one word that holds the number of the exchange, which the ranks count alike, and the
tokens, so it needs no memory order. A rank has two, for even and odd exchanges. A rank ends an
exchange when all ranks have published theirs, so no rank can be two ahead of one that still reads.
A counter that was overwritten all the same (a mode was named for the exchange between) is reported
as missing and never taken for another exchange.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_comm import _core
from deep_comm._core import HostCounters
from deep_comm.handle import LowLatencyHandle

if TYPE_CHECKING:
    from deep_comm._core import Decoded
    from deep_comm.context import Context
    from deep_comm.ranks.rendezvous import Rendezvous


def shared_counters(rendezvous: Rendezvous) -> HostCounters | None:
    """This rank's view of them; None, on all ranks, where they do not share memory. Collective."""
    rank, num_ranks = rendezvous.rank, rendezvous.size
    num_bytes = HostCounters.num_bytes(num_ranks)
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
    return HostCounters(segment, rank, num_ranks)


def max_tokens_of_step(ctx: Context, counters: HostCounters, state: Decoded) -> int:
    """The largest number of tokens of any rank in a launched exchange: from the counters or from
    the exchange itself, whichever is there first.

    Raises:
        PeerTimeout, or what else the exchange ended with.
    """
    most = counters.max(state.exchange)
    if most is not None:
        return most
    passed = ctx.backend.mark()
    try:
        while passed is not None and not passed.has_passed():
            most = counters.max(state.exchange)
            if most is not None:
                return most
    except BaseException:  # of a signal's handler: the rule will not have learned of this exchange
        ctx.engine.note_interrupt()
        raise
    ctx.check()
    handle = LowLatencyHandle(state.record)
    return max(handle.recv_tokens.tolist())
