"""The tensors of a fresh handle: made when they are asked for, since most programs never do."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from deep_comm._core import Block
    from deep_comm.backends.foreign import Place

ALIGNMENT = 16  # of parts, in bytes
LINE = 128  # of what lies behind a slab


class Part:
    """[num_rows, num_columns] at ``offset`` bytes; or num_columns in one row
    without a dimension for it.
    """

    __slots__ = ("offset", "num_rows", "num_columns", "dtype")

    def __init__(
        self, offset: int, num_rows: int | None, num_columns: int, dtype: torch.dtype
    ) -> None:
        self.offset = offset
        self.num_rows = num_rows
        self.num_columns = num_columns
        self.dtype = dtype


class SlabLayout:
    """What notify_dispatch writes, in one block: R ranks, C channels, T tokens, L local experts.

        rank_prefix [R, R] | channel_prefix [R, C] | recv_channel_prefix [R, C] | per expert [L]
        | send_head [T, R] | all rows, rows by source [1 + R]
        | is_token_in_rank [T, R], unless it is given

    Attributes: offsets in bytes, ``parts`` of the handle's names, ``num_bytes``; ``offsets``: all
    of them in that order from channel_prefix on, and num_bytes.
    """

    __slots__ = (
        "channel_prefix_matrix",
        "recv_channel_prefix_matrix",
        "num_recv_tokens_per_expert",
        "send_head",
        "recv_counts",
        "is_token_in_rank",
        "num_bytes",
        "offsets",
        "parts",
        "num_channels",
        "num_tokens",
    )

    def __init__(
        self, ranks: int, channels: int, num_local: int, num_tokens: int, has_mask: bool
    ) -> None:
        self.num_channels = channels
        self.num_tokens = num_tokens
        words = ranks * ranks, ranks * channels, ranks * channels, num_local, num_tokens * ranks
        sizes = (*(4 * size for size in words), 4 + 4 * ranks, has_mask * num_tokens * ranks)
        padded = ((size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT for size in sizes)
        (
            self.channel_prefix_matrix,
            self.recv_channel_prefix_matrix,
            self.num_recv_tokens_per_expert,
            self.send_head,
            self.recv_counts,
            self.is_token_in_rank,
            end,
        ) = itertools.accumulate(padded)
        self.num_bytes = -(-end // LINE) * LINE
        self.offsets = (
            self.channel_prefix_matrix, self.recv_channel_prefix_matrix,
            self.num_recv_tokens_per_expert, self.send_head, self.recv_counts,
            self.is_token_in_rank, self.num_bytes,
        )  # fmt: skip
        int32, counts = torch.int32, self.recv_counts
        self.parts = {
            "rank_prefix_matrix": Part(0, ranks, ranks, int32),
            "channel_prefix_matrix": Part(self.channel_prefix_matrix, ranks, channels, int32),
            "recv_channel_prefix_matrix": Part(
                self.recv_channel_prefix_matrix, ranks, channels, int32
            ),
            "send_head": Part(self.send_head, num_tokens, ranks, int32),
            "num_recv_tokens_per_expert": Part(
                self.num_recv_tokens_per_expert, None, num_local, int32
            ),
            "num_recv_tokens_tensor": Part(counts, None, 1, int32),
            "num_recv_tokens_per_rank": Part(counts + 4, None, ranks, int32),
        }
        if has_mask:
            self.parts["is_token_in_rank"] = Part(
                self.is_token_in_rank, num_tokens, ranks, torch.bool
            )


slab_layout = functools.lru_cache(maxsize=256)(SlabLayout)


class Memory:
    """What keeps the memory of parts: ``heap`` and ``block`` in the receive region, else
    torch's tensor as ``heap``.

    The block is the engine's alone until there is a tensor over it: only then the caller's streams
    matter to who gets it next.
    """

    __slots__ = ("_place", "_heap", "_block")

    def __init__(self, place: Place, heap: object, block: Block | None) -> None:
        self._place = place
        self._heap = heap
        self._block = block

    def tensor(self, address: int, part: Part) -> Tensor:
        if self._block is not None:
            self._block.expose()
        owner = (self._heap, self._block)
        if part.num_rows is None:
            matrix = self._place.matrix(address, 1, part.num_columns, part.dtype, owner)
            return matrix.view(part.num_columns)
        return self._place.matrix(address, part.num_rows, part.num_columns, part.dtype, owner)


class Slab:
    """One such block."""

    __slots__ = ("layout", "address", "_memory")

    def __init__(self, layout: SlabLayout, address: int, memory: Memory) -> None:
        self.layout = layout
        self.address = address
        self._memory = memory

    def tensor(self, name: str) -> Tensor:
        part = self.layout.parts[name]
        return self._memory.tensor(self.address + part.offset, part)


class SourceRows:
    """recv_src_idx [N], in the receive region."""

    __slots__ = ("address", "num_rows", "_memory")

    def __init__(self, address: int, num_rows: int, memory: Memory) -> None:
        self.address = address
        self.num_rows = num_rows
        self._memory = memory

    def tensor(self) -> Tensor:
        return self._memory.tensor(self.address, Part(0, None, self.num_rows, torch.int32))


class PlacedRows:
    """recv_rows [N, K] of an expanded dispatch, in the receive region."""

    __slots__ = ("address", "num_rows", "num_columns", "_memory")

    def __init__(
        self, address: int, num_rows: int, num_columns: int, memory: tuple[Place, object, Block]
    ) -> None:
        """``memory``: the arguments of Memory."""
        self.address = address
        self.num_rows, self.num_columns = num_rows, num_columns
        self._memory = memory

    def tensor(self) -> Tensor:
        part = Part(0, self.num_rows, self.num_columns, torch.int32)
        return Memory(*self._memory).tensor(self.address, part)
