"""Triton helpers over symmetric memory: wait for a word, signal a word, address a peer.

Written for Triton 3.6. For kernels over the tensors and words of ``deep_comm.symmetric``. A word is
an int64 that only grows, so nobody resets it and a wait asks for "at least".
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["peer_pointer", "peer_stores_done", "signal_word", "wait_word"]


# One PTX block, so that the compiler's pipeline sees one operation. `ld.acquire` orders the loads
# of this thread after the peer's release; the proxy fence extends that to TMA loads.
_WAIT = tl.constexpr("""
{
.reg .u64 seen, began, now, failed;
.reg .pred is_there, is_over;
ld.acquire.sys.global.u64 seen, [$1];
setp.ge.s64 is_there, seen, $2;
@is_there bra arrived;
mov.u64 began, %globaltimer;
again:
ld.acquire.sys.global.u64 seen, [$1];
setp.ge.s64 is_there, seen, $2;
@is_there bra arrived;
ld.relaxed.sys.global.u64 failed, [$3];
setp.ne.u64 is_over, failed, 0;
@is_over bra arrived;
mov.u64 now, %globaltimer;
sub.u64 now, now, began;
setp.lt.u64 is_over, now, $5;
@is_over bra again;
atom.relaxed.sys.global.cas.b64 failed, [$3], 0, $4;
arrived:
fence.proxy.async;
mov.u32 $0, 0;
}
""")

_SIGNAL = tl.constexpr("""
{
.reg .u32 thread;
.reg .pred is_first;
mov.u32 thread, %tid.x;
setp.eq.u32 is_first, thread, 0;
@is_first st.release.sys.global.u64 [$1], $2;
mov.u32 $0, 0;
}
""")

_BULK_STORES_DONE = tl.constexpr("""
cp.async.bulk.wait_group 0;
mov.u32 $0, 0;
""")


@triton.jit
def wait_word(word, expected, fault, waiter, timeout_ns):
    """Wait until ``*word >= expected``, at most ``timeout_ns``. Returns an int32 zero.

    Add the result to the offset of the loads that must come after the wait. A pipelined loop moves
    loads ahead of everything that they do not depend on.

    word: pointer to int64. expected, waiter, timeout_ns: integers; waiter is not 0. fault:
    pointer to an int64 that is 0 while all is well. When the time is over, the first thread stores
    ``waiter`` there and all waits return at once: results are garbage, and the host finds the
    fault.
    """
    return tl.inline_asm_elementwise(
        _WAIT,
        "=r,l,l,l,l,l",
        [
            word,
            tl.cast(expected, tl.int64),
            fault,
            tl.cast(waiter, tl.int64),
            tl.cast(timeout_ns, tl.int64),
        ],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def peer_stores_done():
    """Wait until the descriptor (TMA) stores of this program have arrived. Then every thread may
    release them. Not inside a warp-specialised loop.
    """
    tl.inline_asm_elementwise(_BULK_STORES_DONE, "=r,r", [0], tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit
def signal_word(word, value):
    """Store ``value`` to ``*word`` after everything that this program has stored.

    word: pointer to int64, also of a peer. Descriptor (TMA) stores count as well. Not inside a
    warp-specialised loop, where a part of the threads would call it.
    """
    peer_stores_done()
    tl.inline_asm_elementwise(
        _SIGNAL, "=r,l,l", [word, tl.cast(value, tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def peer_pointer(pointer, bases, own_rank, rank):
    """The address in rank ``rank``'s symmetric memory of what lies at ``pointer`` in this rank's.

    bases: pointer to int64 [num_ranks], the start of every rank's segment, as
        ``SymmetricMemory.bases`` has them.
    """
    offset = pointer.to(tl.int64) - tl.load(bases + own_rank).to(tl.int64)
    return (offset + tl.load(bases + rank).to(tl.int64)).to(pointer.dtype)
