"""The receive region: the part of a rank's heap that outputs of dispatch live in, where peers write them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass

from deep_comm.events import EventHandle

_ALIGNMENT = 128


class Block:
    """Bytes [offset, offset + num_bytes) of the heap, given back when the last reference goes."""

    def __init__(self, region: Region, offset: int, num_bytes: int, is_captured: bool) -> None:
        self.offset = offset
        self.num_bytes = num_bytes
        self._region = region
        self._is_captured = is_captured

    def __del__(self) -> None:
        self._region._give_back(self.offset, self.num_bytes, self._is_captured)


@dataclass(frozen=True)
class _Mark:
    order: int
    event: EventHandle


# The last use of some bytes on every stream that has used them; work that may still read them.
_LastUse = dict[int, _Mark]


def _join(one: _LastUse, other: _LastUse) -> _LastUse:
    """What waits for both: on each stream the later mark."""
    joined = dict(one)
    for stream, mark in other.items():
        if stream not in joined or joined[stream].order < mark.order:
            joined[stream] = mark
    return joined


@dataclass(frozen=True)
class _Hole:
    offset: int
    num_bytes: int
    last_use: _LastUse


class Region:
    """First-fit allocator of blocks.

    A block may be given back while kernels that read it are still queued: ``mark`` says where its
    stream is at that moment, and whoever gets the bytes next waits for it. Blocks that a CUDA graph was
    captured with are only handed out to later captures: replays write to them whenever they like.
    """

    def __init__(
        self,
        begin: int,
        end: int,
        mark: Callable[[], tuple[int, EventHandle] | None],
        is_capturing: Callable[[], bool],
    ) -> None:
        """``mark()``: the current stream and an event on it; None where nothing can be in flight."""
        self._mark = mark
        self._order = itertools.count()
        self._is_capturing = is_capturing
        self._lock = threading.RLock()  # reentrant: a garbage collection inside may give a block back
        self._holes: dict[bool, list[_Hole]] = {False: [], True: []}  # by "of a capture"
        begin = -(-begin // _ALIGNMENT) * _ALIGNMENT
        if end > begin:
            self._holes[False].append(_Hole(begin, end - begin, {}))

    def allocate(self, num_bytes: int) -> tuple[Block, list[EventHandle]] | None:
        """A block and what to wait for before anything writes to it; None if there is no room."""
        num_bytes = max(-(-num_bytes // _ALIGNMENT), 1) * _ALIGNMENT
        is_captured = self._is_capturing()
        with self._lock:
            taken = self._take(self._holes[is_captured], num_bytes)
            if taken is None and is_captured:
                taken = self._take(self._holes[False], num_bytes)
        if taken is None:
            return None
        # A capture runs nothing, and whatever came before it has ended when its first replay runs; an event from
        # outside could not be waited for in it.
        events = [] if is_captured else [mark.event for mark in taken.last_use.values()]
        return Block(self, taken.offset, num_bytes, is_captured), events

    @staticmethod
    def _take(holes: list[_Hole], num_bytes: int) -> _Hole | None:
        for index, hole in enumerate(holes):
            if hole.num_bytes < num_bytes:
                continue
            if hole.num_bytes == num_bytes:
                return holes.pop(index)
            taken = _Hole(hole.offset, num_bytes, hole.last_use)
            holes[index] = _Hole(hole.offset + num_bytes, hole.num_bytes - num_bytes, hole.last_use)
            return taken
        return None

    def _give_back(self, offset: int, num_bytes: int, is_captured: bool) -> None:
        marked = None if is_captured else self._mark()
        last_use = {} if marked is None else {marked[0]: _Mark(next(self._order), marked[1])}
        hole = _Hole(offset, num_bytes, last_use)
        with self._lock:
            holes = self._holes[is_captured]
            index = next((i for i, other in enumerate(holes) if other.offset > offset), len(holes))
            holes.insert(index, hole)
            if index + 1 < len(holes):
                self._merge(holes, index)
            if index > 0:
                self._merge(holes, index - 1)

    @staticmethod
    def _merge(holes: list[_Hole], index: int) -> None:
        """Joins a hole with the next one if they touch."""
        hole, after = holes[index], holes[index + 1]
        if hole.offset + hole.num_bytes == after.offset:
            num_bytes = hole.num_bytes + after.num_bytes
            joined = _join(hole.last_use, after.last_use)
            holes[index : index + 2] = [_Hole(hole.offset, num_bytes, joined)]

    @property
    def num_free_bytes(self) -> int:
        with self._lock:
            return sum(hole.num_bytes for holes in self._holes.values() for hole in holes)
