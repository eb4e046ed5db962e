"""What a dispatch learned: consumed by combine, reused by cached dispatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from deep_comm.errors import HandleMismatch
from deep_comm.expansion import Expansion
from deep_comm.handle_base import TensorSequence

if TYPE_CHECKING:
    from deep_comm.checks import PayloadForm


class KnownHandle:
    """A handle that has passed a Buffer's checks, as the hot path wants it: numbers and addresses.

    Kept in the handle, so that later calls with it check nothing but whose it is.
    """

    __slots__ = (
        "owner",
        "tensors",
        "num_tokens",
        "num_recv_rows",
        "num_output_rows",
        "expansion",
        "num_channels",
        "num_experts",
        "num_topk",
        "rank_prefix_matrix",
        "channel_prefix_matrix",
        "recv_channel_prefix_matrix",
        "is_token_in_rank",
        "send_head",
        "routing",
        "way_back",
        "output_layouts",
        "_recorded_on",
        "home_stream",
    )

    def __init__(self, handle: Handle, owner: object, empty_address: int) -> None:
        """``owner``: whose checks. ``empty_address``: of tensors without elements."""
        self.owner = owner
        self.tensors: tuple[Tensor, ...] = handle.as_tuple()
        self.num_tokens = handle.num_tokens
        self.num_recv_rows = handle.num_recv_rows
        self.num_output_rows = handle.num_output_rows
        self.expansion = handle.expansion
        if handle.expansion is not None:
            self.tensors += handle.expansion.tensors
        self.num_channels = handle.num_channels
        self.num_experts = handle.num_experts or 0
        self.num_topk = handle.num_topk or 0  # 0: not known
        self.rank_prefix_matrix = handle.rank_prefix_matrix.data_ptr() or empty_address
        self.channel_prefix_matrix = handle.channel_prefix_matrix.data_ptr() or empty_address
        self.recv_channel_prefix_matrix = (
            handle.recv_channel_prefix_matrix.data_ptr() or empty_address
        )
        self.is_token_in_rank = handle.is_token_in_rank.data_ptr() or empty_address
        self.send_head = handle.send_head.data_ptr() or empty_address
        # How the engine's calls take the routing: dispatch's first arguments, combine's first.
        self.routing = (
            self.num_experts, self.is_token_in_rank, self.send_head, self.rank_prefix_matrix,
            self.channel_prefix_matrix,
        )  # fmt: skip
        self.way_back = (
            self.num_recv_rows, self.rank_prefix_matrix, self.channel_prefix_matrix,
            self.recv_channel_prefix_matrix, self.send_head,
        )  # fmt: skip
        # How the outputs of a cached dispatch lie in the receive region: offsets of x and scales, bytes of both.
        self.output_layouts: dict[PayloadForm, tuple[int, int, int]] = {}
        self._recorded_on: set[int] = set()  # streams whose use torch knows of
        self.home_stream = handle.home_stream

    def record_on(self, stream: torch.cuda.Stream, raw_stream: int) -> None:
        """Tell torch's allocator that ``stream`` uses the handle; it remembers that as long as the memory is in use."""
        if raw_stream not in self._recorded_on:
            for tensor in self.tensors:
                if tensor.numel() > 0:
                    tensor.record_stream(stream)
            self._recorded_on.add(raw_stream)


@dataclass(frozen=True, eq=False)
class Handle(TensorSequence):
    """R ranks, C channels, T tokens of this rank, N rows received, L local experts.

    The first six fields are also a sequence of that order, ``handle[0]`` to ``handle[5]``, which
    can be indexed, sliced and unpacked; a plain tuple of the six serves combine and cached dispatch
    too. Everything else describes the dispatch; None there: not known.
    """

    _KINDS: ClassVar = (
        *((torch.int32, 2),) * 3, (torch.int32, 1), (torch.bool, 2), (torch.int32, 2)
    )  # fmt: skip

    rank_prefix_matrix: Tensor  # int32 [R, R], [i, j]: tokens that ranks 0..i send to rank j
    channel_prefix_matrix: Tensor  # int32 [R, C], [j, c]: tokens sent to rank j in channels 0..c
    recv_channel_prefix_matrix: (
        Tensor  # int32 [R, C], [i, c]: start of channel c in source i's block
    )
    recv_src_idx: Tensor  # int32 [N], token index at its source rank
    is_token_in_rank: Tensor  # bool [T, R]
    send_head: Tensor  # int32 [T, R], ordinal in the (rank, channel) queue; negative: not sent

    rank: int | None = None
    num_experts: int | None = None
    num_topk: int | None = None  # 0: dispatched without top-k
    num_recv_tokens: int | None = None  # rows that arrived; None in worst-case mode
    max_num_tokens: int | None = None  # the largest T of all ranks; None in worst-case mode
    num_recv_tokens_per_expert: Tensor | None = None  # int32 [L] on the device, aligned
    num_recv_tokens_tensor: Tensor | None = None  # int32 [1] on the device: rows that arrived
    num_recv_tokens_per_rank: Tensor | None = None  # int32 [R] on the device: rows by source rank
    members: tuple[str, ...] | None = None  # who the ranks are
    expansion: Expansion | None = None  # of a dispatch with expand=True
    home_stream: int | None = field(default=None, repr=False)  # whose memory it is; None: not known
    _known: KnownHandle | None = field(default=None, init=False, repr=False)

    @property
    def num_ranks(self) -> int:
        return self.rank_prefix_matrix.shape[0]

    @property
    def num_channels(self) -> int:
        return self.channel_prefix_matrix.shape[1]

    @property
    def num_tokens(self) -> int:
        """T: rows that the next cached dispatch takes and combine returns."""
        return self.is_token_in_rank.shape[0]

    @property
    def num_recv_rows(self) -> int:
        """N: received tokens, num_worst_tokens in worst-case mode."""
        return self.recv_src_idx.shape[0]

    @property
    def num_output_rows(self) -> int:
        """Rows that dispatch returned and combine takes: N, or the M of an expanded dispatch."""
        return self.num_recv_rows if self.expansion is None else self.expansion.num_rows

    def as_tuple(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The six tensors, in the order of DeepEP's handle."""
        return (
            self.rank_prefix_matrix,
            self.channel_prefix_matrix,
            self.recv_channel_prefix_matrix,
            self.recv_src_idx,
            self.is_token_in_rank,
            self.send_head,
        )

    @staticmethod
    def of(value: Handle | Sequence[Tensor]) -> Handle:
        """A Handle from a Handle or from its six tensors; ArgumentError for anything else."""
        if isinstance(value, Handle):
            return value
        return Handle(*Handle._checked(value))

    def require_group(
        self, rank: int, num_ranks: int, members: tuple[str, ...], device: torch.device
    ) -> None:
        """Raise HandleMismatch unless the handle was made by this rank of this group."""
        if self.num_ranks != num_ranks:
            raise HandleMismatch(
                "handle", f"{self.num_ranks} ranks", f"must be of this group of {num_ranks} ranks"
            )
        self._require_owner(rank, members, device)

    def known_to(self, owner: object) -> KnownHandle | None:
        """What require_group and remember left for ``owner``, if they were called before."""
        known = self._known
        return known if known is not None and known.owner is owner else None

    def remember(self, owner: object, empty_address: int) -> KnownHandle:
        """What the calls of ``owner``, which has checked the handle, need of it from now on."""
        known = KnownHandle(self, owner, empty_address)
        object.__setattr__(self, "_known", known)  # a cache: the handle itself stays as it is
        return known

    def require_num_tokens(self, num_tokens: int) -> None:
        """Raise HandleMismatch unless the dispatch had as many tokens."""
        if self.num_tokens != num_tokens:
            raise HandleMismatch(
                "handle",
                f"{self.num_tokens} tokens",
                f"must be of a dispatch of as many tokens as x has rows ({num_tokens})",
            )
