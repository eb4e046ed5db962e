"""How the ranks of a Buffer find each other on the host: over any group, with failures shared.

A rendezvous happens only while a Buffer is built or reset; kernels never wait for it.
"""

from __future__ import annotations

import atexit
import ctypes
import datetime
import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from deep_comm.errors import ArgumentError, BufferDestroyed, ConfigMismatch, PeerLost
from deep_comm.ranks.topology import (
    Topology,
    discover,
    host_identity,
    member_identity,
    requested_ranks_per_node,
)
from deep_comm.settings import checks, env

T = TypeVar("T")

_ROUND = "deep_comm.meeting"  # in a group's store
_TAG = 0x6463  # of messages of an MPI communicator

LEAST_MEETING_S = 30.0
"""How long a rank waits at least for the others to build their Buffers: programs start unevenly."""


@runtime_checkable
class RankGroup(Protocol):
    """What deep_comm.local and deep_comm.simulate offer as a group; anybody may offer the same."""

    in_process: bool  # all ranks are threads of this process
    simulation: Any  # the native Simulation, or None

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def all_gather_object(self, payload: Any) -> list[Any]: ...


# Tensors of the last collectives over gloo, each with a view of it. A thread of gloo lets go of a
# collective's tensors some time after the collective has returned. Where that leaves a tensor to
# Python alone, or to nobody, it needs the GIL; a thread that asks for the GIL while the interpreter
# is torn down is ended inside a C++ destructor, and the process aborts. The view holds its base
# from C++, as long as it is held here, and at the end for ever: the thread need not ask. Ending the
# group would end its threads, but others may hold it: torch._dynamo does, if it is imported while
# there is a group.
_kept: deque[list[Any]] = deque(maxlen=16)


@atexit.register
def _leave_them() -> None:
    for tensors in _kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensors))


def all_gather_object(group: Any, payload: Any) -> list[Any]:
    """Every rank's (picklable) object, by rank, over a torch.distributed group; collective.

    What torch.distributed.all_gather_object does, but a program may end right after it, and the
    group may be one that torch.distributed did not make, as those of vLLM's elastic ranks.
    """
    import torch
    from torch import distributed

    num_ranks = int(group.size())
    if all(device.type != "cpu" for device in group._device_types):
        gathered: list[Any] = [None] * num_ranks
        distributed.all_gather_object(gathered, payload, group=group)
        return gathered

    def gather(own: bytearray) -> list[bytearray]:
        """Of equally many bytes on every rank."""
        parts = [bytearray(len(own)) for _ in range(num_ranks)]
        with torch.inference_mode(False):  # views of inference tensors do not hold their base
            *rows, row = (torch.frombuffer(part, dtype=torch.uint8) for part in (*parts, own))
            _kept.append([(tensor, tensor.view_as(tensor)) for tensor in (*rows, row)])
        group.allgather([rows], [row]).wait()
        return parts

    packed = bytearray(pickle.dumps(payload))
    lengths = gather(bytearray(len(packed).to_bytes(8, "little")))
    sizes = [int.from_bytes(length, "little") for length in lengths]
    packed.extend(bytes(max(sizes) - len(packed)))
    parts = gather(packed)
    return [pickle.loads(part[:size]) for part, size in zip(parts, sizes, strict=True)]


def _is_known(group: Any) -> bool:
    """Whether torch knows the process group. It forgets one that is destroyed, and knows none that
    was made without it.
    """
    from torch.distributed import distributed_c10d

    return group in distributed_c10d._world.pg_map


class _TorchGroup:
    in_process = False
    simulation = None

    def __init__(self, group: Any) -> None:
        if not hasattr(group, "_device_types"):
            raise ArgumentError(
                "group", type(group).__name__, "must be a torch.distributed.ProcessGroup"
            )
        self._group, self._was_known = group, _is_known(group)

    def rank(self) -> int:
        return int(self._group.rank())

    def size(self) -> int:
        return int(self._group.size())

    def all_gather_object(self, payload: Any) -> list[Any]:
        if self._was_known and not _is_known(self._group):
            raise PeerLost("the process group, which the ranks meet in, was destroyed")
        try:
            return all_gather_object(self._group, payload)
        except RuntimeError as error:
            # Of torch: a peer's connection has ended, or its time.
            raise PeerLost(f"a rank was lost while the ranks exchanged data: {error}") from error

    def absent_after(self, timeout_s: float) -> list[int]:
        """Ranks that have not called this within the time; [] where waits cannot be bounded.

        Over the group's store, which serves every backend and stays usable after a failure. Ranks
        meet in rounds. Whoever leaves a round, with all ranks or without, begins the next one, so
        that a rank that was late the last time finds the others.
        """
        from torch import distributed
        from torch.distributed import distributed_c10d

        # One made without torch.distributed has none that is known, one of MPI none at all.
        if not self._was_known or "mpi" in distributed.get_backend_config(self._group):
            return []
        store = distributed_c10d._get_process_group_store(self._group)
        ranks, own = range(self.size()), self.rank()
        try:
            current = store.compare_set(_ROUND, "", "0").decode()

            def key(peer: int, number: str = current) -> str:
                return f"{_ROUND}.{number}.{peer}"

            store.set(key(own), "")
            try:
                store.wait([*map(key, ranks)], datetime.timedelta(seconds=timeout_s))
            except RuntimeError:  # the time is over, or the store has ended
                absent = [peer for peer in ranks if not store.check([key(peer)])]
            else:
                absent = []
            store.compare_set(_ROUND, current, str(int(current) + 1))
            if not absent and current != "0":  # all have left the round before
                store.delete_key(key(own, str(int(current) - 1)))
        except RuntimeError as error:
            raise PeerLost(f"a rank was lost while the ranks met: {error}") from error
        return absent


# Sends of MPI that may not have ended. Their memory must live until then.
_sends: list[Any] = []
# By a communicator's id, with it: ranks that are there, after all messages that have been read.
_heard: dict[int, tuple[Any, set[int]]] = {}


class _MpiComm:
    """An mpi4py communicator."""

    in_process = False
    simulation = None

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def rank(self) -> int:
        return int(self._comm.Get_rank())

    def size(self) -> int:
        return int(self._comm.Get_size())

    def all_gather_object(self, payload: Any) -> list[Any]:
        return list(self._comm.allgather(payload))

    def absent_after(self, timeout_s: float) -> list[int]:
        """As of a torch group, by messages: a rank tells the others that it is here and, if it
        leaves without all of them, that it has left. What a rank said last counts. A rank that was
        here for a while has missed somebody itself; the others are to blame, if there are any.
        """
        comm = self._comm
        if not hasattr(comm, "iprobe"):  # something like a communicator
            return []
        peers = [peer for peer in range(self.size()) if peer != self.rank()]
        here = _heard.setdefault(id(comm), (comm, set()))[1]

        def tell(is_here: bool) -> None:
            _sends[:] = [send for send in _sends if not send.Test()]
            _sends.extend(comm.isend(is_here, dest=peer, tag=_TAG) for peer in peers)

        tell(True)
        deadline = time.monotonic() + timeout_s
        for_a_while = set()
        while len(here) < len(peers) and time.monotonic() < deadline:
            for peer in peers:
                while comm.iprobe(source=peer, tag=_TAG):
                    (here.add if comm.recv(source=peer, tag=_TAG) else here.discard)(peer)
            for_a_while |= here
            time.sleep(0.001)
        absent = [peer for peer in peers if peer not in here]
        if absent:
            tell(False)
        else:
            here.clear()  # all come anew to the next meeting
        return [peer for peer in absent if peer not in for_a_while] or absent


_NON_GROUP_MEMBER = -100  # torch.distributed's: what new_group returns then


def _adapt(group: Any, comm: Any) -> RankGroup:
    if (group is None) == (comm is None):
        given = "neither" if group is None else "both"
        rule = "or comm must be given, exactly one of the two"
        if group is None:
            rule += " (after init_process_group: torch.distributed.group.WORLD)"
        raise ArgumentError("group", given, rule)
    if comm is not None:
        if not all(hasattr(comm, name) for name in ("Get_rank", "Get_size", "allgather")):
            raise ArgumentError("comm", type(comm).__name__, "must be an mpi4py communicator")
        return _MpiComm(comm)
    if isinstance(group, RankGroup):
        return group
    if callable(getattr(group, "rank", None)) and callable(getattr(group, "size", None)):
        return _TorchGroup(group)
    if isinstance(group, int) and group == _NON_GROUP_MEMBER:
        raise ArgumentError("group", None, "does not contain this process (NON_GROUP_MEMBER)")
    raise ArgumentError(
        "group",
        type(group).__name__,
        "must be a torch.distributed group, a ThreadGroup or a SimulatedGroup",
    )


_ANOTHER_CALL = "another call"


@dataclass(frozen=True)
class _StepOutcome:
    failure: str | None
    result: Any


class Rendezvous:
    """The ranks of one Buffer. Every method is collective."""

    def __init__(self, group: Any, comm: Any = None) -> None:
        self._group: RankGroup | None = _adapt(group, comm)
        self.rank = self._group.rank()
        self.size = self._group.size()
        if not 0 <= self.rank < self.size:
            raise ArgumentError("group", f"rank {self.rank}", "must contain the calling process")
        self.in_process = self._group.in_process
        self.simulation = self._group.simulation
        # Where kernels run, if that is not the rank of the same number.
        self.machine_rank: int = getattr(self._group, "machine_rank", -1)
        self._members: tuple[str, ...] | None = None

    @property
    def process_group(self) -> Any:
        """torch's, for what torch itself exchanges; None: the group is of another kind."""
        return self._group._group if isinstance(self._group, _TorchGroup) else None

    @property
    def members(self) -> tuple[str, ...]:
        """Who the ranks are: equal for Buffers over the same ranks, different for other ranks."""
        if self._members is None:
            own = member_identity(self.in_process)
            self._members = tuple(self.all_gather_object(own))
        return self._members

    def all_gather_object(self, payload: T) -> list[T]:
        """Every rank's (picklable) object, by rank."""
        if self._group is None:
            raise BufferDestroyed("the group of a Buffer was used after it had been let go of")
        return self._group.all_gather_object(payload)

    def release(self) -> None:
        """Let go of the group: see Buffer.destroy. Idempotent."""
        self._group = None

    def barrier(self) -> None:
        self.all_gather_object(None)

    def meet(self, timeout_s: float | None) -> Rendezvous:
        """Raise PeerLost if a rank does not come here in time, where the group can bound a wait.

        Before the first exchange of whatever is built. None: DEEP_COMM_TIMEOUT_S.
        """
        if not isinstance(self._group, _TorchGroup | _MpiComm):
            return self
        given_s = env.TIMEOUT_S.get() if timeout_s is None else timeout_s
        limit_s = max(checks.timeout_s("timeout_s", given_s), LEAST_MEETING_S)
        absent = self._group.absent_after(limit_s)
        if absent:
            named = ", ".join(map(str, absent))
            raise PeerLost(
                f"rank {named} did not come to build its Buffer within {limit_s:g} s: it has "
                "ended, has failed before, or builds none; its own error is the cause"
            )
        return self

    def topology(self, ranks_per_node: int | None) -> Topology:
        """Which ranks share a node, before there is a Buffer that knows. None: as hosts say."""
        hosts = self.all_gather_result("read the name of its host", host_identity)
        return discover(hosts, requested_ranks_per_node(ranks_per_node))

    def all_gather_result(self, what: str, step: Callable[[], T]) -> list[T]:
        """Run ``step`` on every rank and gather the results; if it fails on one, raise on all.

        A rank that fails alone would leave its peers in the next exchange until their timeout.
        """
        failure: Exception | None = None
        result: T | None = None
        try:
            result = step()
        except Exception as error:  # noqa: BLE001 - raised below, after the peers know
            failure = error
        message = None if failure is None else f"{type(failure).__name__}: {failure}"
        outcomes = self.all_gather_object(_StepOutcome(message, result))
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # or it and this frame keep each other, and all that the step has held
        calls = {
            rank: what if isinstance(outcome, _StepOutcome) else _ANOTHER_CALL
            for rank, outcome in enumerate(outcomes)
        }
        if _ANOTHER_CALL in calls.values():
            raise ConfigMismatch("the call they are in", calls)
        for rank, outcome in enumerate(outcomes):
            if outcome.failure is not None:
                raise PeerLost(f"rank {rank} failed to {what}: {outcome.failure}")
        return [outcome.result for outcome in outcomes]

    def require_equal(self, settings: dict[str, Any]) -> None:
        """Raise ConfigMismatch on every rank if the ranks' ``settings`` differ."""
        gathered: Sequence[dict[str, Any]] = self.all_gather_object(settings)
        for field in settings:
            # A rank that is in another collective call brings something else.
            values = {
                rank: peer.get(field) if isinstance(peer, dict) else _ANOTHER_CALL
                for rank, peer in enumerate(gathered)
            }
            if len({repr(value) for value in values.values()}) > 1:
                raise ConfigMismatch(field, values)
