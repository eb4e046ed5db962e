"""The litmus tests of tests/native/litmus.hpp: what PTX forbids, and what it allows.

The simulated machine must never show the former and must show the latter (tests/cpu/simt). A GPU
must never show the former (tests/gpu1); how much of the latter it shows is its own affair. On a GPU
ranks are blocks of it, so a scope that is too narrow between ranks shows in the simulation alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

OTHER_RANK, OTHER_BLOCK, OTHER_WARP = range(3)
(
    RELAXED_STORE,
    RELEASE_CTA,
    RELEASE_GPU,
    RELEASE_SYS,
    FENCE_GPU,
    FENCE_SYS,
    RELAXED_ADD,
    ADD_GPU,
    ADD_SYS,
) = range(9)
(
    ACQUIRE_SYS,
    ACQUIRE_GPU,
    ACQUIRE_CTA,
    RELAXED,
    RELAXED_FENCE_SYS,
    RELAXED_FENCE_GPU,
    ACQ_REL_ADD,
    RELAXED_LOAD_ADD,
    WEAK_FENCE_SYS,
    ACQUIRE_SYNC_WARP,
    ACQUIRE_SHUFFLE,
    RELAXED_SYNC_WARP,
) = range(12)
BY_ATOMIC, BY_STORE, BY_FENCE_AND_STORE = range(3)
MBARRIER, ACQUIRED_WORD, RELAXED_WORD, ARRIVE_AND_SYNC = range(4)
NOTHING, SYNC_WARP, PARTIAL_SYNC_WARP, SYNC_BLOCK, NAMED_BARRIER = range(5)


class Litmus(NamedTuple):
    """A kernel that counts in word 8 how many words it has read old."""

    kernel: str
    params: Sequence[int]
    num_ranks: int = 2
    num_blocks: int = 1
    num_threads: int = 32
    smem_bytes: int = 0

    def __str__(self) -> str:
        return "-".join([self.kernel, *map(str, self.params)])


def messages(how: Iterable[tuple[int, int, int, int]]) -> list[Litmus]:
    """By how they are published, where the reader is, how it observes, and which lane reads."""
    return [Litmus("message_passing", params, 2, 2, 64) for params in how]


READERS = (OTHER_RANK, OTHER_BLOCK, OTHER_WARP)

FORBIDDEN = [
    # A release of enough scope carries the message.
    *messages(
        (publish, reader, ACQUIRE_SYS, 0)
        for publish, reader in (
            (RELEASE_SYS, OTHER_RANK),
            (FENCE_SYS, OTHER_RANK),
            (ADD_SYS, OTHER_RANK),
            (RELEASE_GPU, OTHER_BLOCK),
            (FENCE_GPU, OTHER_BLOCK),
            (ADD_GPU, OTHER_BLOCK),
            (RELEASE_SYS, OTHER_BLOCK),
            (RELEASE_CTA, OTHER_WARP),
        )
    ),
    # An acquire of enough scope sees it.
    *messages(
        (RELEASE_SYS, reader, observe, lane)
        for reader in READERS
        for observe, lane in (
            (RELAXED_FENCE_SYS, 0),
            (ACQ_REL_ADD, 0),
            (ACQUIRE_SYNC_WARP, 0),
            (ACQUIRE_SYNC_WARP, 7),
        )
    ),
    *messages(
        (RELEASE_GPU, reader, observe, 0)
        for reader, observe in (
            (OTHER_BLOCK, ACQUIRE_GPU),
            (OTHER_WARP, ACQUIRE_GPU),
            (OTHER_WARP, ACQUIRE_CTA),
            (OTHER_BLOCK, RELAXED_FENCE_GPU),
        )
    ),
    *(Litmus("message_in_warp", [publish]) for publish in (RELEASE_CTA, RELEASE_SYS, FENCE_GPU)),
    # An atomic or a fence passes a release on.
    *(Litmus("release_sequence", [how], 3) for how in (BY_ATOMIC, BY_FENCE_AND_STORE)),
    # A hand-over in the block carries global memory.
    *(
        Litmus("hand_over_in_block", [how], num_threads=64, smem_bytes=256)
        for how in (MBARRIER, ACQUIRED_WORD, ARRIVE_AND_SYNC)
    ),
    *(
        Litmus("message_by_bulk_load", [observe], smem_bytes=1024)
        for observe in (ACQUIRE_SYS, RELAXED_FENCE_SYS, ACQUIRE_SYNC_WARP)
    ),
    # A release carries what its thread has met or acquired.
    *(
        Litmus("cumulativity", [meet], num_threads=64)
        for meet in (SYNC_WARP, PARTIAL_SYNC_WARP, SYNC_BLOCK, NAMED_BARRIER)
    ),
    Litmus("relay", [], num_blocks=2),
]

ALLOWED = [
    # A missing or narrow release.
    *messages(
        (publish, reader, ACQUIRE_SYS, 0)
        for publish, reader in (
            (RELAXED_STORE, OTHER_RANK),
            (RELAXED_STORE, OTHER_BLOCK),
            (RELAXED_ADD, OTHER_RANK),
            (RELEASE_CTA, OTHER_RANK),
            (RELEASE_CTA, OTHER_BLOCK),
            (RELEASE_GPU, OTHER_RANK),
            (FENCE_GPU, OTHER_RANK),
            (ADD_GPU, OTHER_RANK),
        )
    ),
    # A missing or narrow acquire.
    *messages(
        (publish, reader, observe, lane)
        for publish in (RELEASE_SYS, FENCE_SYS, ADD_SYS)
        for reader, observe, lane in (
            *((reader, RELAXED, 0) for reader in READERS),
            (OTHER_RANK, RELAXED_FENCE_GPU, 0),
            (OTHER_RANK, RELAXED_LOAD_ADD, 0),
            (OTHER_WARP, RELAXED_LOAD_ADD, 0),
            (OTHER_RANK, WEAK_FENCE_SYS, 0),
            (OTHER_RANK, ACQUIRE_GPU, 0),
            (OTHER_RANK, ACQUIRE_CTA, 0),
            (OTHER_BLOCK, ACQUIRE_CTA, 0),
            (OTHER_RANK, RELAXED_SYNC_WARP, 0),
            (OTHER_RANK, RELAXED_SYNC_WARP, 7),
            (OTHER_RANK, ACQUIRE_SHUFFLE, 7),
        )
    ),
    Litmus("message_in_warp", [RELAXED_STORE]),
    Litmus("release_sequence", [BY_STORE], 3),
    Litmus("hand_over_in_block", [RELAXED_WORD], num_threads=64, smem_bytes=256),
    *(
        Litmus("message_by_bulk_load", [observe], smem_bytes=1024)
        for observe in (RELAXED, RELAXED_FENCE_GPU, ACQUIRE_GPU, RELAXED_SYNC_WARP)
    ),
    Litmus("cumulativity", [NOTHING], num_threads=64),
]
