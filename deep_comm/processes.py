"""Ranks as processes of this machine: the counterpart of `deep_comm.local` and
`deep_comm.simulate`.

Every wait is bounded: a rank that hangs or dies ends the run with an error that names it.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import io
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from deep_comm.errors import DeepCommError, is_consequence, remade
from deep_comm.settings import integers

T = TypeVar("T")

# After the first rank failed, the others get this long to notice.
FAILURE_GRACE_S = 60.0


class RankFailed(DeepCommError):
    """A rank raised, died or did not end in time."""

    def __init__(self, rank: int, reason: str, traceback_text: str = "") -> None:
        super().__init__(
            f"rank {rank} {reason}" + (f"\n{traceback_text}" if traceback_text else "")
        )
        self.failed_rank = rank
        self.reason = reason


@dataclass(frozen=True)
class Outcome:
    """How one rank ended."""

    rank: int
    value: Any = None
    error: BaseException | None = None  # what it raised, or RankFailed when it died or hung
    traceback: str = ""
    elapsed_s: float = 0.0  # from the start of the run to its end, as the parent saw it


def run(fn: Callable[..., T], num_ranks: int, *args: object, **options: Any) -> list[T]:
    """Run ``fn(group, *args)`` in ``num_ranks`` processes and return the results in rank order.

    ``fn`` must be importable (a module-level function) and its result picklable. ``options`` as in
    :func:`outcomes`.

    Raises:
        RankFailed: naming the first rank that died or hung, else the lowest rank that raised, with
            that rank's traceback; a rank that raised since another one had gone comes last. What
            became of the other ranks that failed stands below, a line each.
    """
    return _values(outcomes(fn, num_ranks, *args, **options))


def _reason(outcome: Outcome) -> str:
    if isinstance(outcome.error, RankFailed):
        return outcome.error.reason
    return f"raised {type(outcome.error).__name__}: {outcome.error}"


def _told(outcome: Outcome) -> str:
    return f"rank {outcome.rank} {_reason(outcome)}, after {outcome.elapsed_s:.1f} s"


def _values(ended: list[Outcome]) -> list[Any]:
    failed = [outcome for outcome in ended if outcome.error is not None]
    # A rank that died is the cause of what the others raise, and one that raised has closed its
    # connections.
    failed.sort(
        key=lambda outcome: (
            not isinstance(outcome.error, RankFailed),
            outcome.error is not None and is_consequence(outcome.error),
        )
    )
    if failed:
        first, others = failed[0], "".join(f"and {_told(outcome)}\n" for outcome in failed[1:])
        reason = _reason(first)
        raise RankFailed(first.rank, reason, first.traceback + others) from first.error
    return [outcome.value for outcome in ended]


def outcomes(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: object,
    start_method: str = "spawn",
    **options: Any,
) -> list[Outcome]:
    """Run ``fn(group, *args)`` in ``num_ranks`` new processes; never raises for a rank.

    Args:
        start_method: "spawn", or "forkserver" when many short runs follow each other.
        options: as in :meth:`Pool.outcomes`.
    """
    with Pool(start_method=start_method) as pool:
        return pool.outcomes(fn, num_ranks, *args, **options)


class Pool:
    """Rank processes that outlive a run, for many runs in a row: a process start, the import of
    torch and a CUDA context cost seconds.

    Every run has a torch.distributed group of its own. Processes that died or hung are
    replaced, and all others with them unless a run asks for less, before the next run; what else
    a run leaves behind in a process (caches, the device's context, modules) the next run finds
    there.
    """

    def __init__(self, num_ranks: int = 0, start_method: str = "spawn") -> None:
        """Start ``num_ranks`` processes; runs that need more start more."""
        self._context: Any = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            self._context.set_forkserver_preload(["deep_comm.processes", "torch.distributed"])
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._start(num_ranks)

    def run(self, fn: Callable[..., T], num_ranks: int, *args: object, **options: Any) -> list[T]:
        """As the function :func:`run`."""
        return _values(self.outcomes(fn, num_ranks, *args, **options))

    def outcomes(
        self,
        fn: Callable[..., Any],
        num_ranks: int,
        *args: object,
        backend: str = "gloo",
        devices: Sequence[int] | None = None,
        variables: Mapping[str, str] | None = None,
        timeout_s: float = 300.0,
        keep_survivors: bool = False,
    ) -> list[Outcome]:
        """Run ``fn(group, *args)`` in ``num_ranks`` processes; never raises for a rank.

        Args:
            backend: of the torch.distributed group the ranks get ("gloo" or "nccl").
            devices: CUDA device of every rank, made current before ``fn``;
                None: no device is touched.
            variables: environment variables of the ranks, for this run.
            timeout_s: for the whole run; ranks that are still running then are killed.
            keep_survivors: ranks may end their process, and only these are replaced if all
                others return; by idle processes of the pool, if it has more than the run needs.
        """
        self._start(integers.require("num_ranks", num_ranks, 1))
        is_spent = True
        with tempfile.TemporaryDirectory(prefix="deep_comm.") as folder:
            try:
                for rank in range(num_ranks):
                    job = _Job(
                        rank=rank,
                        num_ranks=num_ranks,
                        store=os.path.join(folder, "store"),
                        backend=backend,
                        device=None if devices is None else devices[rank],
                        variables=dict(variables or {}),
                        timeout_s=timeout_s,
                    )
                    # A rank that is dead already says so when its end of the pipe is read.
                    with contextlib.suppress(ConnectionError):
                        self._connections[rank].send((job, fn, args))
                ended = _collect(self._processes, self._connections[:num_ranks], timeout_s)
                lost = [one.rank for one in ended if isinstance(one.error, RankFailed)]
                is_spent = bool(lost)
                others_returned = all(one.error is None for one in ended if one.rank not in lost)
                if (
                    keep_survivors
                    and others_returned
                    and not any(self._processes[rank].is_alive() for rank in lost)
                ):
                    self._replace(lost, num_ranks)
                    is_spent = False
            finally:
                if is_spent:
                    self.close(kill=True)
        return ended

    def restart(self) -> None:
        """New processes, as many as there were."""
        num_ranks = len(self._processes)
        self.close(kill=True)
        self._start(num_ranks)

    def close(self, kill: bool = False) -> None:
        """End the processes. ``kill``: at once; else those that are idle get the time to leave."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            if not kill:
                process.join(timeout=20)
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._connections = [], []

    def _replace(self, dead: Sequence[int], num_ranks: int) -> None:
        """By idle processes behind the first ``num_ranks``, which have started already; as many
        new ones take their places.
        """
        for rank in dead:
            self._connections[rank].close()
            if len(self._processes) == num_ranks:
                self._processes[rank], self._connections[rank] = self._new(rank)
                continue
            self._processes[rank] = self._processes.pop(num_ranks)
            self._connections[rank] = self._connections.pop(num_ranks)
            self._start(len(self._processes) + 1)

    def _start(self, num_ranks: int) -> None:
        for rank in range(len(self._processes), num_ranks):
            process, connection = self._new(rank)
            self._processes.append(process)
            self._connections.append(connection)

    def _new(self, rank: int) -> tuple[Any, Connection]:
        here, there = self._context.Pipe()
        process = self._context.Process(
            target=_rank_main, args=(there,), name=f"rank {rank}", daemon=True
        )
        process.start()
        # Only the rank holds its end, so that its death reads as end of file here.
        there.close()
        return process, here

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, exc_type: object, *_raised: object) -> None:
        self.close(kill=exc_type is not None)


@dataclass(frozen=True)
class _Job:
    rank: int
    num_ranks: int
    store: str
    backend: str
    device: int | None
    variables: dict[str, str]
    timeout_s: float


def _collect(
    processes: list[Any], connections: list[Connection], timeout_s: float
) -> list[Outcome]:
    started = time.monotonic()
    deadline = started + timeout_s
    ended: dict[int, Outcome] = {}
    while len(ended) < len(connections):
        open_ends = [c for rank, c in enumerate(connections) if rank not in ended]
        ready = wait(open_ends, timeout=max(0.0, deadline - time.monotonic()))
        elapsed = time.monotonic() - started
        if not ready:
            for rank in range(len(connections)):
                failure = RankFailed(rank, f"did not end within {elapsed:.0f} s")
                ended.setdefault(rank, Outcome(rank, error=failure, elapsed_s=elapsed))
            break
        for rank, connection in enumerate(connections):
            if connection not in ready:
                continue
            ended[rank] = _receive(rank, processes[rank], connection, elapsed)
            if ended[rank].error is not None:
                deadline = min(deadline, time.monotonic() + FAILURE_GRACE_S)
    return [ended[rank] for rank in range(len(connections))]


def _receive(rank: int, process: Any, connection: Connection, elapsed_s: float) -> Outcome:
    try:
        value, error, text = _unpack(connection.recv_bytes())
    except (EOFError, ConnectionError):  # reset: it died before it had read its job
        process.join(timeout=10)
        code = process.exitcode
        how = (
            f"was killed by signal {-code}"
            if code is not None and code < 0
            else f"exited with {code}"
        )
        return Outcome(rank, error=RankFailed(rank, how), elapsed_s=elapsed_s)
    except Exception as raised:  # noqa: BLE001 - whatever a foreign type raises
        why = DeepCommError(f"its result cannot be unpickled here: {raised!r}")
        return Outcome(rank, error=why, traceback=traceback.format_exc(), elapsed_s=elapsed_s)
    return Outcome(rank, value, error, text, elapsed_s)


def _rank_main(connection: Connection) -> None:
    """Runs what comes through the pipe, until its other end is closed."""
    # All ranks are on this host; without this gloo asks the resolver for the host's own name.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A run that ends at once would close its connections while others still make theirs.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    while True:
        value: object = None
        error: BaseException | None = None
        text = ""
        try:
            job, fn, args = connection.recv()
        except EOFError:
            return
        except Exception as raised:  # noqa: BLE001 - what cannot be unpickled here; handed to the parent
            error, text = raised, traceback.format_exc()
        else:
            before = dict(os.environ)
            os.environ.update(job.variables)
            try:
                value = _call(job, fn, args)
            except BaseException as raised:  # noqa: BLE001 - handed to the parent
                error, text = raised, traceback.format_exc()
            os.environ.clear()
            os.environ.update(before)
        try:
            connection.send_bytes(_pack(value, error, text))
        except ConnectionError:  # the parent has given this run up
            return
        value = error = job = fn = args = None  # a run's memory goes before the next one comes
        _free_memory()


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _dump(packed: object) -> bytes:
    # Not plain pickle: it cannot read tensors of the 8-bit float types back.
    import torch

    file = io.BytesIO()
    torch.save(packed, file)
    return file.getvalue()


def _pack(value: object, error: BaseException | None, text: str) -> bytes:
    try:
        return _dump((value, _sent(error), text))
    except Exception:  # noqa: BLE001 - whatever a foreign type raises
        what = f"{type(error).__name__}: {error}" if error is not None else "a result"
        return _dump((None, DeepCommError(f"{what} (cannot be pickled)"), text))


def _sent(error: BaseException | None) -> Any:
    """The error, or its parts where pickle could not make it again: it calls a class with the
    message alone.
    """
    if error is None:
        return None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever a foreign type raises
        return type(error), error.args, vars(error)
    return error


def _unpack(packed: bytes) -> tuple[Any, BaseException | None, str]:
    import torch

    value, error, text = torch.load(io.BytesIO(packed), weights_only=False)
    return value, remade(*error) if isinstance(error, tuple) else error, text


def _call(job: _Job, fn: Callable[..., Any], args: tuple[Any, ...]) -> object:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if job.device is not None:
        torch.cuda.set_device(job.device)
    dist.init_process_group(
        job.backend,
        init_method=f"file://{job.store}",
        rank=job.rank,
        world_size=job.num_ranks,
        timeout=datetime.timedelta(seconds=job.timeout_s),
    )
    try:
        return fn(dist.group.WORLD, *args)
    finally:
        dist.destroy_process_group()
