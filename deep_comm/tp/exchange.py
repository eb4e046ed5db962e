"""How the rows of a product go between ranks: staging, words, and the copy engines that push.

docs/design/0064 has the protocol; the kernels are in csrc/device/tp/matmul.cuh.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deep_comm.errors import BufferTooSmall
from deep_comm.symmetric import WORDS_OF_RANK, SymmetricMemory, SymmetricTensor

__all__ = ["Exchange"]

_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # of the native sums
_exchanges: weakref.WeakKeyDictionary[SymmetricMemory, Exchange] = weakref.WeakKeyDictionary()


class Exchange:
    """Of one SymmetricMemory. One product at a time, in the same order on all ranks:

    ``begin``; ``push`` inside ``beside``; ``await_push`` or waits of a Triton product or
    ``add_slots``; ``end``.

    Attributes:
        words: int64 [R, WORDS_OF_RANK]: this rank's, row p for what rank p pushes.
        sequence: int64 [1]: products begun.
        fault: int64 [1]: 0, or 1 + the rank that a product has waited for in vain.
        peer_words: int64 [R]: address of row ``rank`` of every rank's words.
        counters: int32 [R, WORDS_OF_RANK] zeros, for Triton products.
    """

    def __init__(self, memory: SymmetricMemory) -> None:
        self.rank, self.num_ranks = memory.rank, memory.group_size
        self.device, self.timeout_s = memory.device, memory.timeout_s
        progress, ranks = memory.progress, range(memory.group_size)
        self.words = progress.local[: self.num_ranks * WORDS_OF_RANK].view(-1, WORDS_OF_RANK)
        self.sequence, self.fault = progress.local[-2:-1], progress.local[-1:]
        self._addresses = self.words.data_ptr(), self.sequence.data_ptr(), self.fault.data_ptr()
        own_row = self.rank * WORDS_OF_RANK * 8
        self._peer_words = [progress.peer(peer).data_ptr() + own_row for peer in ranks]
        self.peer_words = torch.tensor(self._peer_words, device=self.device)
        self.counters = torch.zeros(
            (self.num_ranks, WORDS_OF_RANK), dtype=torch.int32, device=self.device
        )
        self._side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._is_beside = False  # something has been launched there since begin
        calls = memory.native_calls
        self._begin, self._end = calls.begin_matmul, calls.end_matmul
        self._push, self._await_push = calls.push, calls.await_push
        self._add_slots = calls.add_slots
        self._staged: dict[Any, tuple[SymmetricTensor, Tensor]] = {}

    @staticmethod
    def of(memory: SymmetricMemory) -> Exchange:
        found = _exchanges.get(memory)
        if found is None:
            found = _exchanges[memory] = Exchange(memory)
        return found

    def staged(
        self, memory: SymmetricMemory, shape: tuple[int, ...], dtype: torch.dtype, what: str
    ) -> tuple[SymmetricTensor, Tensor]:
        """The staging as [R, *shape], and int64 [R], where slot ``rank`` of each rank's begins.

        Raises:
            BufferTooSmall: it has no room.
        """
        key = shape, dtype
        found = self._staged.get(key)
        if found is None:
            whole = (self.num_ranks, *shape)
            needed = torch.Size(whole).numel() * dtype.itemsize
            if needed > 2 * memory.staging_bytes:
                raise BufferTooSmall(
                    memory.staging_bytes, -(-needed // 2), f"half of {what}", "staging_bytes"
                )
            tensor = memory.staging(whole, dtype)
            slots = [
                tensor.peer(peer)[self.rank].data_ptr() if needed else 0
                for peer in range(self.num_ranks)
            ]
            found = self._staged[key] = tensor, torch.tensor(slots, device=self.device)
        return found

    def begin(self, *agreed: object) -> None:
        """After it, what peers push to is free on all ranks, or the ranks have disagreed."""
        digest = zlib.crc32(repr(agreed).encode()) & 0x7FFFFFFF
        self._begin(digest, self._addresses[1], self._addresses[2])

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Pushes inside do not hold up the current stream. They come after what it has got."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        self._is_beside = True
        with torch.cuda.stream(self._side):
            yield

    def push(self, rows: Tensor, place: Tensor, peer: int, chunk: int = 0) -> None:
        """rows to ``place`` in ``peer``'s staging; both contiguous, of equally many bytes."""
        word = self._peer_words[peer] + 8 * chunk
        num_bytes = rows.numel() * rows.element_size()
        self._push(rows.data_ptr(), place.data_ptr(), num_bytes, self._addresses[1], word)

    def await_push(self, peer: int, chunk: int = 0) -> None:
        """The current stream waits for this product's push of ``peer``."""
        word = self._addresses[0] + 8 * (peer * WORDS_OF_RANK + chunk)
        self._await_push(word, self._addresses[1], peer)

    def add_slots(self, slots: Tensor, out: Tensor) -> None:
        """out := the sum of slots [R, ...], in float32 in rank order, after every peer's push."""
        if out.numel() == 0:
            return
        num_bytes, stride = out.numel() * out.element_size(), slots.stride(0) * out.element_size()
        self._add_slots(
            slots.data_ptr(),
            num_bytes,
            stride,
            out.data_ptr(),
            _DTYPES[out.dtype],
            self._addresses[0],
            WORDS_OF_RANK,
            self._addresses[1],
        )

    def end(self) -> None:
        """After it, on the current stream, all pushes of this rank have left."""
        if self._side is not None and self._is_beside:
            torch.cuda.current_stream(self.device).wait_stream(self._side)
            self._is_beside = False
        self._end(self._addresses[2])
