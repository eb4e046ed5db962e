"""Symmetric memory: tensors that the other ranks of a node address, and words to signal and await.

The memory, the meeting of ranks, bounded waits and errors are those of a Buffer. On CUDA devices
peers' tensors are reached over NVLink; on the host target through shared memory, or directly where
ranks are threads, simulated ones included. Kernels written in Triton use ``deep_comm.triton``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deep_comm import _core, tuning
from deep_comm._version import __version__
from deep_comm.backends.foreign import tensor_at
from deep_comm.context import Context
from deep_comm.context.owner import ContextOwner
from deep_comm.errors import ArgumentError, BufferTooSmall, UnsupportedError
from deep_comm.ranks.rendezvous import Rendezvous
from deep_comm.settings import env, integers
from deep_comm.settings.buffer import Settings

__all__ = ["SymmetricMemory", "SymmetricTensor", "Words"]

_WORD = 8
_MOST_RANKS = 8
WORDS_OF_RANK = 64
"""Of ``SymmetricMemory.progress``, for each rank."""
_NUM_PROGRESS = 2 * _MOST_RANKS * WORDS_OF_RANK + 2


class SymmetricMemory(ContextOwner):
    """Memory of one rank that the others of its group reach, at the same offset everywhere.

    Tensors and words live until ``destroy``. Nothing is given back before. After ``destroy``, of
    this rank or of the peer that a tensor lies at, they must not be used.

    **Collective.** Construction, ``empty``, ``words``, ``barrier``, ``reset`` and the collectives
    of ``deep_comm.tp`` are made by all ranks in the same order. ``Words.signal`` and ``Words.wait``
    are not.

    Attributes:
        rank: this rank.
        group_size: R, at most 8, all in one node.
        device: where all tensors are.
        num_sms: the most SMs that a collective uses unless it is told another number.
        num_bytes, staging_bytes, multicast: as given.
        timeout_s: seconds that a wait may last.
        progress: int64 words of the products of ``deep_comm.tp``: for each of 8 ranks
            ``WORDS_OF_RANK``, as many for counters, a sequence, a fault.
        tuned_products: which methods of ``deep_comm.tp`` were the fastest here.

    Examples:
        >>> with deep_comm.symmetric.SymmetricMemory(group, 1 << 20, device="cpu") as memory:
        ...     box = memory.empty((4,), torch.float32)
        ...     words = memory.words(1)
        ...     peer = (memory.rank + 1) % memory.group_size
        ...     box.peer(peer).fill_(memory.rank)
        ...     words.signal(0, peer)
        ...     words.wait(0, (memory.rank - 1) % memory.group_size)
        ...     received = box.local.clone()
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int,
        *,
        staging_bytes: int = 0,
        num_sms: int | None = None,
        multicast: bool = False,
        device: torch.device | str | int | None = None,
        timeout_s: float | None = None,
        comm: Any = None,
    ) -> None:
        """Allocate memory and find the peers. Collective over the group.

        Args:
            group: a torch.distributed group of any backend, a ThreadGroup, a SimulatedGroup, or
                None.
            num_bytes: on every rank, for tensors and words. Each takes whole lines of 128 bytes.
            staging_bytes: on every rank, for the collectives and products of ``deep_comm.tp``. It
                must hold what ranks push to each other in one call, each rank's part rounded up
                to 16 bytes: R * x of ``all_gather`` and of ``all_reduce`` in one shot, x of
                ``reduce_scatter``, 2 * x of ``all_reduce`` in two shots and, its rows rounded up
                to a multiple of R, of ``all_reduce_norm``. Products say what they need.
            num_sms: of collectives, default 64, on the host target 2. The same on all ranks.
            multicast: sums of ``deep_comm.tp`` are taken by the NVLink switch, in an order that
                nobody specifies. The memory is torch's symmetric memory then. Needs a
                torch.distributed group, GPUs of sm_90 or later and a switch with multicast; the
                host target adds rank after rank. The same on all ranks; nothing changes with one.
            device: "cpu" for the host target, or a CUDA device. Default: the current CUDA device if
                there is one.
            timeout_s: seconds that a wait may last. Default: DEEP_COMM_TIMEOUT_S.
            comm: an mpi4py communicator instead of a group.

        Raises:
            ArgumentError: a size is out of range; on this rank.
            AllocationError: on a rank without room; PeerLost on the others.
            ConfigMismatch, TopologyError: on all ranks.
            UnsupportedError: the ranks are on several hosts, or multicast cannot be had, above all
                where TORCH_SYMM_MEM_DISABLE_MULTICAST=1 forbids it; on all ranks.
            PeerLost: a rank that is named has failed, or has not come here.
        """
        integers.require("num_bytes", num_bytes, 0, integers.MOST_BYTES)
        integers.require("staging_bytes", staging_bytes, 0, integers.MOST_BYTES)
        if not isinstance(multicast, bool):
            raise ArgumentError("multicast", repr(multicast), "must be True or False")
        if num_sms is not None:
            integers.require("num_sms", num_sms, 1, _core.max_channels)
        staging = integers.round_up(staging_bytes)
        settings = Settings(
            num_nvl_bytes=(
                staging + integers.round_up(_NUM_PROGRESS * _WORD) + integers.round_up(num_bytes)
            ),
            num_direct_bytes=0,
            num_max_experts=1,
            ranks_per_node=None,
            device=device,
            timeout_s=env.TIMEOUT_S.get() if timeout_s is None else timeout_s,
            version=__version__,
            has_words=True,
            multicast=multicast,
            agreed={
                "num_bytes": num_bytes,
                "staging_bytes": staging_bytes,
                "num_sms": 0 if num_sms is None else num_sms,
                "multicast": multicast,
            },
        )
        env.require_valid()
        num_nodes = Rendezvous(group, comm).meet(timeout_s).topology(None).num_nodes
        if num_nodes > 1:
            raise UnsupportedError(
                f"symmetric memory serves one node; the ranks are on {num_nodes}"
            )
        self._own(Context(group, comm, settings))
        self.rank = self._context.rank
        self.group_size = self._context.num_ranks
        self.device = self._context.device
        self.num_bytes, self.staging_bytes, self.multicast = num_bytes, staging_bytes, multicast
        most_sms = self._context.backend.max_sms
        self.num_sms = min(num_sms or 64, most_sms) if most_sms else num_sms or 2
        self._words: list[Words] = []
        begin = self._context.engine.data_offset
        calls = self._context.native_calls
        calls.set_staging(
            offset=begin, num_bytes=staging, multicast=self._context.heap.multicast_base
        )
        self._begin = begin + staging + integers.round_up(_NUM_PROGRESS * _WORD)
        self._next = self._begin
        self._end = self._begin + integers.round_up(num_bytes)
        self.progress = SymmetricTensor(
            self._context, begin + staging, (_NUM_PROGRESS,), torch.int64
        )
        self.timeout_s = settings.timeout_s
        # One rank's for all, as in Context.
        self.tuned_products = self._context.rendezvous.all_gather_result(
            "read what was tuned", lambda: tuning.read_products(self.device, self.group_size)
        )[0]
        self._word_calls = calls.signal_word, calls.await_word
        self._bases = torch.tensor(self._context.heap.peer_bases, device=self.device)

    @property
    def is_destroyed(self) -> bool:
        return not self._context.is_open

    def __repr__(self) -> str:
        state = ", destroyed" if self.is_destroyed else ""
        return (
            f"<SymmetricMemory: rank {self.rank} of {self.group_size}, {self.device}, "
            f"{self.num_bytes} bytes{state}>"
        )

    @property
    def native_calls(self) -> Any:
        """For ``deep_comm.tp``."""
        return self._context.native_calls

    @property
    def bases(self) -> Tensor:
        """int64 [R] on the device: where each rank's memory begins, as this rank addresses it. For
        ``deep_comm.triton.peer_pointer``.
        """
        return self._bases

    def staging(self, shape: Sequence[int], dtype: torch.dtype) -> SymmetricTensor:
        """The staging as one tensor, for ``deep_comm.tp``."""
        return SymmetricTensor(self._context, self._context.engine.data_offset, tuple(shape), dtype)

    def _take(self, num_bytes: int, agreed: dict[str, Any]) -> int:
        """The offset of so many zeroed bytes. Collective."""
        self._context.require_open()
        self._context.rendezvous.require_equal(agreed)
        offset, free = self._next, self._end - self._next
        if num_bytes > free:
            used = self._next - self._begin
            raise BufferTooSmall(
                self.num_bytes, used + num_bytes, f"{num_bytes} bytes more", "num_bytes"
            )
        self._next += integers.round_up(num_bytes)
        return offset

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> SymmetricTensor:
        """A tensor of zeros on every rank. Collective.

        Raises:
            ArgumentError: ``shape`` or ``dtype`` breaks a rule; on this rank.
            BufferTooSmall: there is no room; on all ranks.
            ConfigMismatch: the ranks ask for different tensors; on all of them.
        """
        if not isinstance(shape, (tuple, list)):
            raise ArgumentError("shape", repr(shape), "must be a sequence of integers")
        if not isinstance(dtype, torch.dtype):
            raise ArgumentError("dtype", repr(dtype), "must be a torch.dtype")
        extents = tuple(integers.require("shape", extent, 0) for extent in shape)
        num_bytes = math.prod(extents) * dtype.itemsize
        offset = self._take(num_bytes, {"shape": extents, "dtype": str(dtype)})
        return SymmetricTensor(self._context, offset, extents, dtype)

    def words(self, count: int) -> Words:
        """``count`` words that are zero on every rank. Collective; raises as ``empty``."""
        integers.require("count", count, 1)
        offset = self._take(2 * count * _WORD, {"count of words": count})
        made = Words(self._context, *self._word_calls, offset, count)
        self._words.append(made)
        return made

    def barrier(self) -> None:
        """Wait on this rank's stream until every rank's stream has come to its barrier. Collective.

        Raises:
            PeerTimeout, ConfigMismatch: as Buffer.barrier.
        """
        self._context.barrier(0)

    def reset(self) -> None:
        """Make the memory usable again after a PeerTimeout: all words are zero again. Collective.

        All ranks call it when none will launch before it returns. Tensors keep their contents.
        """
        self._context.reset()
        with self._context.backend.device_scope():
            self.progress.local.zero_()
            for words in self._words:
                words.clear()
            self._context.synchronize()
            self._context.rendezvous.barrier()  # nobody signals before all words are zero


class SymmetricTensor:
    """A tensor at the same offset of every rank's memory.

    Attributes:
        local: this rank's, contiguous.
        shape, dtype: of each rank's.
        offset: bytes from the start of a rank's memory, see ``SymmetricMemory.bases``.
    """

    def __init__(
        self, context: Context, offset: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self._context, self.offset = context, offset
        self.shape, self.dtype = shape, dtype
        self._of_rank: dict[int, Tensor] = {}
        self.local = self.peer(context.rank)

    def is_of(self, memory: SymmetricMemory) -> bool:
        return self._context is memory._context

    def peer(self, rank: int) -> Tensor:
        """Rank ``rank``'s tensor, as this rank addresses it; on this rank's device."""
        context = self._context
        context.require_open()
        integers.require("rank", rank, 0, context.num_ranks - 1)
        if rank not in self._of_rank:
            address = context.heap.peer_bases[rank] + self.offset
            owner = context.heap.memory() if rank == context.rank else context.heap
            self._of_rank[rank] = tensor_at(address, self.shape, context.device, owner, self.dtype)
        return self._of_rank[rank]


class Words:
    """Words of int64 that only grow, by signals of other ranks.

    A wait is for one signal more than the waits of that word before it have taken. So nothing is
    ever set back, and a CUDA graph of signals and waits can be replayed. A word serves one stream
    that waits, and one rank that signals, or several if waits are for all of them.
    """

    def __init__(
        self,
        context: Context,
        signal: Callable[[int, int], None],
        wait: Callable[[int, int, int], None],
        offset: int,
        count: int,
    ) -> None:
        self._context, self._signal, self._wait = context, signal, wait
        self._offset, self._count = offset, count
        self._both = SymmetricTensor(context, offset, (2, count), torch.int64)
        self.local = self._both.local[0]
        """int64 [count]: this rank's words."""

    def peer(self, rank: int) -> Tensor:
        """int64 [count]: rank ``rank``'s words."""
        return self._both.peer(rank)[0]

    def signal(self, index: int, peer: int) -> None:
        """Add one to word ``index`` of rank ``peer``, after all that the current stream has done.

        Raises:
            ArgumentError: there is no such word or rank.
        """
        self._signal(self._address(index, peer), peer)

    def wait(self, index: int, peer: int) -> None:
        """Let the current stream wait for the next signal to this rank's word ``index``. What the
        signalling stream had done before is visible afterwards.

        Args:
            peer: who signals, for the error.

        Raises:
            ArgumentError: there is no such word or rank.
            PeerTimeout: no signal has come in time. On CUDA devices a later call raises it.
        """
        integers.require("peer", peer, 0, self._context.num_ranks - 1)
        word = self._address(index, self._context.rank)
        self._wait(word, word + self._count * _WORD, peer)

    def clear(self) -> None:
        """Words and counts of this rank become zero. For ``SymmetricMemory.reset``."""
        self._both.local.zero_()

    def _address(self, index: int, rank: int) -> int:
        self._context.require_open()
        integers.require("index", index, 0, self._count - 1)
        integers.require("peer", rank, 0, self._context.num_ranks - 1)
        return int(self._context.heap.peer_bases[rank]) + self._offset + index * _WORD
