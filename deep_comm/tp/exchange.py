"""How the rows of a product go between ranks: staging, words, and the copy engines that push.

docs/design/0064 has the protocol; the kernels are in csrc/device/tp/matmul.cuh.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deep_comm.errors import BufferTooSmall
from deep_comm.symmetric import WORDS_OF_RANK, SymmetricMemory

if TYPE_CHECKING:
    from deep_comm.tp.product import Waits

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
        fault: int64 [1]: 0, or 1 + the rank whose rows did not come in time.
        bases: int64 [R]: where each rank's memory begins.
        words_offset: bytes from there to row ``rank`` of that rank's words.
        counters: int32 [R, WORDS_OF_RANK] zeros, for Triton products.
    """

    def __init__(self, memory: SymmetricMemory) -> None:
        self.rank, self.num_ranks = memory.rank, memory.group_size
        self.device, self.timeout_s = memory.device, memory.timeout_s
        progress = memory.progress
        self.words = progress.local[: self.num_ranks * WORDS_OF_RANK].view(-1, WORDS_OF_RANK)
        self.sequence, self.fault = progress.local[-2:-1], progress.local[-1:]
        self._addresses = self.words.data_ptr(), self.sequence.data_ptr(), self.fault.data_ptr()
        self.bases = memory.bases
        self._bases = [
            progress.peer(peer).data_ptr() - progress.offset for peer in range(self.num_ranks)
        ]
        self.words_offset = progress.offset + self.rank * WORDS_OF_RANK * 8
        counters = progress.local[len(progress.local) // 2 - 1 :].view(torch.int32)
        self.counters = counters[: self.num_ranks * WORDS_OF_RANK].view(-1, WORDS_OF_RANK)
        self._side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._is_beside = False  # something has been launched there since begin
        calls = memory.native_calls
        self._begin, self._end = calls.begin_matmul, calls.end_matmul
        self._push, self._await_push = calls.push, calls.await_push
        self._add_slots = calls.add_slots
        self._staging_offset = memory.staging((0,), torch.uint8).offset

    @staticmethod
    def of(memory: SymmetricMemory) -> Exchange:
        found = _exchanges.get(memory)
        if found is None:
            found = _exchanges[memory] = Exchange(memory)
        return found

    def staged(
        self, memory: SymmetricMemory, shape: tuple[int, ...], dtype: torch.dtype, what: str
    ) -> Tensor:
        """This rank's staging as [R, *shape]; slot p is for rank p.

        Raises:
            BufferTooSmall: it has no room.
        """
        whole = (self.num_ranks, *shape)
        needed = torch.Size(whole).numel() * dtype.itemsize
        if needed > memory.staging_bytes:
            raise BufferTooSmall(memory.staging_bytes, needed, what, "staging_bytes")
        return memory.staging(whole, dtype).local

    def slot_offset(self, slots: Tensor) -> int:
        """Bytes from a rank's base to its slot for this rank; ``slots``: of ``staged``."""
        return self._staging_offset + self.rank * slots.stride(0) * slots.element_size()

    def waits(self) -> Waits:
        """Of Triton products."""
        from deep_comm.tp.product import Waits

        return Waits(self.sequence, self.fault, int(self.timeout_s * 1e9))

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

    def push(self, rows: Tensor, slots: Tensor, first: int, peer: int, chunk: int = 0) -> None:
        """Contiguous rows to element ``first`` of this rank's slot of ``peer``'s staging."""
        base, size = self._bases[peer], rows.element_size()
        place = base + self.slot_offset(slots) + first * size
        word = base + self.words_offset + 8 * chunk
        self._push(rows.data_ptr(), place, rows.numel() * size, self._addresses[1], word)

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
