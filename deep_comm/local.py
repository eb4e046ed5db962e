"""Ranks as threads of one process: a group without torchrun, for tests, notebooks and single hosts.

The native engine releases the GIL while it works, and every object of a Buffer belongs to one rank.
So threads serve as ranks as well as processes do::

    def rank_main(group):
        buffer = deep_comm.Buffer(group, num_nvl_bytes=1 << 24, device="cpu")
        ...

    results = deep_comm.local.run(rank_main, num_ranks=4)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, overload

from deep_comm.errors import ArgumentError, DeepCommError, PeerLost, is_consequence
from deep_comm.settings import integers

T = TypeVar("T")


class _Hub:
    """Where the rank threads of one run meet. One lock, one condition, objects by reference."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._condition = threading.Condition()
        # (members, how many exchanges these members made before) -> rank -> object
        self._exchanges: dict[tuple[tuple[int, ...], int], dict[int, Any]] = {}
        self._num_taken: dict[tuple[tuple[int, ...], int], int] = {}
        self._gone: set[int] = set()

    def leave(self, rank: int) -> None:
        """``rank`` ended: whoever waits for it must not wait any longer."""
        with self._condition:
            self._gone.add(rank)
            self._condition.notify_all()

    def exchange(self, members: tuple[int, ...], turn: int, rank: int, payload: Any) -> list[Any]:
        key = (members, turn)
        with self._condition:
            objects = self._exchanges.setdefault(key, {})
            objects[rank] = payload
            self._condition.notify_all()
            while len(objects) < len(members):
                lost = [m for m in members if m in self._gone and m not in objects]
                if lost:
                    raise PeerLost(f"rank {rank} waits for rank {lost[0]}, which has ended")
                self._condition.wait()
            self._num_taken[key] = self._num_taken.get(key, 0) + 1
            if self._num_taken[key] == len(members):
                del self._exchanges[key], self._num_taken[key]
            return [objects[member] for member in members]


class ThreadGroup:
    """The ranks of one run (or some of them), as one of them sees it."""

    in_process = True
    simulation = None

    def __init__(self, hub: _Hub, global_rank: int, members: tuple[int, ...]) -> None:
        if global_rank not in members:
            raise ArgumentError("ranks", members, f"must contain the calling rank {global_rank}")
        self._hub = hub
        self._global_rank = global_rank
        self._members = members
        self._turns: dict[tuple[int, ...], int] = {}  # shared by all groups of this rank

    def rank(self) -> int:
        """This rank's place in the group."""
        return self._members.index(self._global_rank)

    def size(self) -> int:
        """Ranks of the group."""
        return len(self._members)

    def all_gather_object(self, payload: Any) -> list[Any]:
        """Every rank's object, by rank. Raises PeerLost if a rank ended and will never come."""
        turn = self._turns.get(self._members, 0)
        self._turns[self._members] = turn + 1
        return self._hub.exchange(self._members, turn, self._global_rank, payload)

    def barrier(self) -> None:
        """Wait for all ranks. Raises PeerLost as all_gather_object does."""
        self.all_gather_object(None)

    def subgroup(self, ranks: Sequence[int]) -> ThreadGroup:
        """A group of some ranks of this one, the calling rank among them. Not collective."""
        for rank in ranks:
            integers.require("ranks", rank, 0, self.size() - 1)
        members = tuple(self._members[rank] for rank in ranks)
        if len(set(members)) != len(members):
            raise ArgumentError("ranks", list(ranks), "must not name a rank twice")
        group = ThreadGroup(self._hub, self._global_rank, members)
        group._turns = self._turns
        return group


def raise_root_cause(errors: dict[int, BaseException]) -> None:
    """Raise the error of one rank: one that is no mere consequence first, then the lowest rank.

    ``errors`` is emptied: its owner's frame would keep the error, and the error that frame.
    """
    if not errors:
        return
    rank, error = min(errors.items(), key=lambda item: (is_consequence(item[1]), item[0]))
    error.failed_rank = rank  # type: ignore[attr-defined]
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"raised on rank {rank}")
        for other, secondary in sorted(errors.items()):
            if other != rank:
                summary = (str(secondary).splitlines() or [""])[0]
                error.add_note(f"rank {other} raised {type(secondary).__name__}: {summary}")
        del secondary
    errors.clear()
    try:
        raise error
    finally:
        del error  # for the same reason


def run_threads(
    body: Callable[[int], T],
    num_ranks: int,
    *,
    on_exit: Callable[[int], None],
    timeout_s: float,
    return_errors: bool,
) -> list[T | BaseException]:
    """``body(rank)`` in one thread per rank; ``on_exit(rank)`` as each ends, however it ends.

    Threads still running after ``timeout_s`` are left behind as daemons and named in the error.
    """
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def main(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            errors[rank] = error
        finally:
            on_exit(rank)

    threads = [
        threading.Thread(target=main, args=(rank,), name=f"rank-{rank}", daemon=True)
        for rank in range(num_ranks)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    running = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if running:
        ended = {rank: repr(error) for rank, error in sorted(errors.items())}
        raise DeepCommError(
            f"ranks {running} are still running after {timeout_s} s; errors so far: {ended or None}"
        )
    if not return_errors:
        raise_root_cause(errors)
    return [errors[rank] if rank in errors else results[rank] for rank in range(num_ranks)]


def check_num_ranks(num_ranks: int) -> None:
    """Raise ArgumentError unless there is a rank."""
    if num_ranks < 1:
        raise ArgumentError("num_ranks", num_ranks, "must be at least 1")


@overload
def run(
    fn: Callable[[ThreadGroup], T],
    num_ranks: int,
    *,
    timeout_s: float = ...,
    return_errors: Literal[False] = ...,
) -> list[T]: ...
@overload
def run(
    fn: Callable[[ThreadGroup], T],
    num_ranks: int,
    *,
    timeout_s: float = ...,
    return_errors: Literal[True],
) -> list[T | BaseException]: ...
def run(
    fn: Callable[[ThreadGroup], Any],
    num_ranks: int,
    *,
    timeout_s: float = 300.0,
    return_errors: bool = False,
) -> list[Any]:
    """Call ``fn(group)`` in ``num_ranks`` threads at once; returns the results by rank.

    If ranks raise, the root cause is raised again here, with the attribute ``failed_rank``. With
    ``return_errors`` the exceptions stand in the list instead.
    """
    check_num_ranks(num_ranks)
    hub = _Hub(num_ranks)
    members = tuple(range(num_ranks))
    return run_threads(
        lambda rank: fn(ThreadGroup(hub, rank, members)),
        num_ranks,
        on_exit=hub.leave,
        timeout_s=timeout_s,
        return_errors=return_errors,
    )
