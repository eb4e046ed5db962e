"""What a low-latency dispatch learned, for the combine that follows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from deep_comm.errors import ArgumentError

if TYPE_CHECKING:
    from deep_comm.low_latency_state import LowLatencyShape


class LowLatencyHandle:
    """R ranks, M tokens a rank may have, K top-k, L local experts, N = R * M.

    The first five fields are also a sequence of that order, as DeepEP's handle is a tuple of them.
    Tensors are complete when the receive phase has run. They may be looked at by their names;
    combine takes the handle as it is. All of them lie in one block of memory, ``metadata``; a
    tensor is made when it is first asked for.

    Attributes:
        src_info: int32 [L, N], source token of each row; compact: [N].
        layout_range: int64 [L, R], first row << 32 | rows of a source; compact: [R].
        num_max_dispatch_tokens_per_rank: M.
        hidden, num_experts, num_topk, is_compact: of the dispatch.
        num_tokens: of this rank.
        rank, members: of the group.
        recv_tokens: int32 [R], tokens that each source has.
        (In a group of several nodes the second index of the next two is not the source's token, but
        the slot that its row came in: of num_max_dispatch_tokens_per_rank a source has here.)
        places: int32 [R, M, K], row of a selection here, or -1; compact: [R, M].
        recv_weights: float32 [R, M, K], if they came with dispatch; compact: None.
        num_recv_tokens: int32 [1]; None unless compact, like the next two.
        recv_topk_idx: int32 [N, K], local expert, or -1.
        recv_topk_weights: float32 [N, K], 0 where the index is -1; None without weights.
    """

    __slots__ = ("metadata", "num_tokens", "shape", "_parts")

    def __init__(self, shape: LowLatencyShape, metadata: Tensor, num_tokens: int) -> None:
        self.shape = shape
        self.metadata = metadata  # int32, flat
        self.num_tokens = num_tokens
        self._parts: dict[str, Tensor] = {}

    @property
    def num_max_dispatch_tokens_per_rank(self) -> int:
        return self.shape.max_tokens

    @property
    def hidden(self) -> int:
        return self.shape.hidden

    @property
    def num_experts(self) -> int:
        return self.shape.num_experts

    @property
    def num_topk(self) -> int:
        return self.shape.num_topk

    @property
    def is_compact(self) -> bool:
        return self.shape.is_compact

    @property
    def rank(self) -> int:
        return self.shape.rank

    @property
    def members(self) -> tuple[str, ...]:
        return self.shape.members

    def _part(self, name: str, dtype: torch.dtype, *extents: int) -> Tensor:
        part = self._parts.get(name)
        if part is None:
            words = torch.Size(extents).numel() * dtype.itemsize // 4
            begin = self.shape.offsets[name] // 4
            part = self.metadata[begin : begin + words].view(dtype).view(extents)
            self._parts[name] = part
        return part

    @property
    def src_info(self) -> Tensor:
        return self._part("src_info", torch.int32, *self.rows_shape[:-1])

    @property
    def layout_range(self) -> Tensor:
        return self._part("layout_range", torch.int64, *self.rows_shape[:-2], self.shape.num_ranks)

    @property
    def recv_tokens(self) -> Tensor:
        return self._part("recv_tokens", torch.int32, self.shape.num_ranks)

    @property
    def places(self) -> Tensor:
        columns = () if self.is_compact else (self.num_topk,)
        return self._part(
            "places", torch.int32, self.shape.num_ranks, self.shape.max_tokens, *columns
        )

    @property
    def recv_weights(self) -> Tensor | None:
        if "recv_weights" not in self.shape.offsets:
            return None
        extents = (self.shape.num_ranks, self.shape.max_tokens, self.num_topk)
        return self._part("recv_weights", torch.float32, *extents)

    @property
    def num_recv_tokens(self) -> Tensor | None:
        return self._part("num_recv", torch.int32, 1) if self.is_compact else None

    @property
    def recv_topk_idx(self) -> Tensor | None:
        if not self.is_compact:
            return None
        return self._part("compact_idx", torch.int32, self.shape.num_rows, self.num_topk)

    @property
    def recv_topk_weights(self) -> Tensor | None:
        if "compact_weights" not in self.shape.offsets:
            return None
        return self._part("compact_weights", torch.float32, self.shape.num_rows, self.num_topk)

    def as_tuple(self) -> tuple[Tensor, Tensor, int, int, int]:
        return (
            self.src_info,
            self.layout_range,
            self.num_max_dispatch_tokens_per_rank,
            self.hidden,
            self.num_experts,
        )

    @overload
    def __getitem__(self, index: int) -> Tensor | int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Tensor | int, ...]: ...
    def __getitem__(self, index: int | slice) -> Tensor | int | tuple[Tensor | int, ...]:
        return self.as_tuple()[index]

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Tensor | int]:
        return iter(self.as_tuple())

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """Of what dispatch returned and combine takes."""
        return self.shape.rows_shape

    @staticmethod
    def of(value: Any, rank: int, members: tuple[str, ...]) -> LowLatencyHandle:
        """``value``, if it is a handle of this rank of this group."""
        if not isinstance(value, LowLatencyHandle):
            raise ArgumentError(
                "handle", type(value).__name__, "must be what low_latency_dispatch returned"
            )
        shape = value.shape
        if shape.rank != rank or (shape.members is not members and shape.members != members):
            raise ArgumentError("handle", f"rank {shape.rank}", f"must be of this rank ({rank})")
        return value
