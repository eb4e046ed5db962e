"""What a low-latency dispatch learned, for the combine that follows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, overload

from torch import Tensor

if TYPE_CHECKING:
    from deep_comm import _core


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

    __slots__ = ("_record",)

    def __init__(self, record: _core.LowLatencyRecord) -> None:
        self._record = record

    @property
    def num_max_dispatch_tokens_per_rank(self) -> int:
        return self._record.num_max_tokens

    @property
    def hidden(self) -> int:
        return self._record.hidden

    @property
    def num_experts(self) -> int:
        return self._record.num_experts

    @property
    def num_topk(self) -> int:
        return self._record.num_topk

    @property
    def num_tokens(self) -> int:
        return self._record.num_tokens

    @property
    def is_compact(self) -> bool:
        return self._record.is_compact

    @property
    def rank(self) -> int:
        return self._record.rank

    @property
    def members(self) -> tuple[str, ...]:
        return self._record.members

    @property
    def metadata(self) -> Tensor:
        return self._record.metadata

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """Of what dispatch returned and combine takes."""
        return self._record.rows_shape

    def _part(self, name: str) -> Any:
        return self._record.part(name)

    @property
    def src_info(self) -> Tensor:
        return self._part("src_info")

    @property
    def layout_range(self) -> Tensor:
        return self._part("layout_range")

    @property
    def recv_tokens(self) -> Tensor:
        return self._part("recv_tokens")

    @property
    def places(self) -> Tensor:
        return self._part("places")

    @property
    def recv_weights(self) -> Tensor | None:
        return self._part("recv_weights")

    @property
    def num_recv_tokens(self) -> Tensor | None:
        return self._part("num_recv_tokens")

    @property
    def recv_topk_idx(self) -> Tensor | None:
        return self._part("recv_topk_idx")

    @property
    def recv_topk_weights(self) -> Tensor | None:
        return self._part("recv_topk_weights")

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
