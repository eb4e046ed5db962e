"""What a low-latency dispatch learned, for the combine that follows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, overload

from torch import Tensor

from deep_comm.errors import ArgumentError


@dataclass(frozen=True, eq=False)
class LowLatencyHandle:
    """R ranks, M tokens a rank may have, K top-k, L local experts, N = R * M.

    The first five fields are also a sequence of that order, as DeepEP's handle is a tuple of them.
    Tensors are complete when the receive phase has run. They may be looked at by their names;
    combine takes the handle as it is.
    """

    src_info: Tensor  # int32 [L, N], source token of each row; compact: [N]
    layout_range: Tensor  # int64 [L, R], first row << 32 | rows of a source; compact: [R]
    num_max_dispatch_tokens_per_rank: int  # M
    hidden: int
    num_experts: int

    num_tokens: int  # of this rank
    num_topk: int
    is_compact: bool
    rank: int
    members: tuple[str, ...]
    recv_tokens: Tensor  # int32 [R], tokens that each source has
    places: Tensor  # int32 [R, M, K], row of a selection here, or -1; compact: [R, M]
    recv_weights: Tensor | None  # float32 [R, M, K], if they came with dispatch
    # Compact output only:
    num_recv_tokens: Tensor | None = None  # int32 [1]
    recv_topk_idx: Tensor | None = None  # int32 [N, K], local expert, or -1
    recv_topk_weights: Tensor | None = None  # float32 [N, K], 0 where the index is -1

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
        return (*self.src_info.shape, self.hidden)

    @staticmethod
    def of(value: Any, rank: int, members: tuple[str, ...]) -> LowLatencyHandle:
        """``value``, if it is a handle of this rank of this group."""
        if not isinstance(value, LowLatencyHandle):
            raise ArgumentError(
                "handle", type(value).__name__, "must be what low_latency_dispatch returned"
            )
        if value.rank != rank or value.members != members:
            raise ArgumentError("handle", f"rank {value.rank}", f"must be of this rank ({rank})")
        return value
