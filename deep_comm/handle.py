"""What a dispatch learned: consumed by combine, reused by cached dispatches."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, overload

from torch import Tensor

if TYPE_CHECKING:
    from deep_comm._core import DispatchRecord, LowLatencyRecord

__all__ = ["Expansion", "Handle", "InternodeHandle", "LowLatencyHandle"]


def _short(handle: Any, names: Iterable[str]) -> str:
    """A line about a handle: its numbers, and no tensor."""
    values = {name: getattr(handle, name) for name in names}
    known = [f"{name}={value}" for name, value in values.items() if isinstance(value, int)]
    return f"{type(handle).__name__}({', '.join(known)})"


class _View:
    """Made of tensors, or a view of what a dispatch recorded, whose fields are read when they are
    asked for.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    _record: ClassVar[DispatchRecord | None] = None

    def _read(self, record: DispatchRecord, name: str) -> Any:
        return record.field(name)

    def __getattr__(self, name: str) -> Any:
        """Called for what is missing: the fields of a view."""
        if name.startswith("_") or self._record is None or name not in self.__dataclass_fields__:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        value = self.__dict__[name] = self._read(self._record, name)
        return value

    def __repr__(self) -> str:
        return _short(self, (entry.name for entry in fields(self) if entry.repr))

    def __getstate__(self) -> dict[str, Any]:
        """For copies: with all tensors, without what belongs to this one."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}


@dataclass(frozen=True, eq=False, repr=False)
class Expansion(_View):
    """How an expanded dispatch has laid out its rows: grouped by local expert, for grouped GEMMs.

    Part of a Handle or InternodeHandle, of one rank's output.

    N received tokens, L local experts, K top-k, R ranks, T tokens of this rank, M rows of the
    output. A received token has one row for each of its selections here. The rows of local expert e
    are ``expert_offsets[e]`` to ``expert_offsets[e] + expert_counts[e]``, by (source rank, source
    token, selection); what follows up to ``expert_offsets[e + 1]``, and from ``expert_offsets[L]``
    to M, belongs to no token.

    Tensors of what a dispatch recorded are made when they are asked for.
    """

    expert_offsets: Tensor  # int32 [L + 1]: starts of the groups, multiples of the alignment
    expert_counts: Tensor  # int32 [L]: rows of a group without padding
    recv_rows: Tensor  # int32 [N, K]: row of a token's selection, or -1: not on this rank
    num_rows: int  # M
    expert_alignment: int
    # Between nodes None: rows are placed by the rank that has them.
    # int32 [T, R]: first row of a token at each rank, or -1
    send_row: Tensor | None = field(default_factory=lambda: None)
    # int32 [R]: rows that each rank's output needs
    num_expanded: Tensor | None = field(default_factory=lambda: None)

    @classmethod
    def of(cls, record: DispatchRecord) -> Expansion:
        """A view of an expanded dispatch."""
        expansion = object.__new__(cls)
        expansion.__dict__["_record"] = record
        return expansion

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        parts = (getattr(self, entry.name) for entry in fields(self))
        return tuple(part for part in parts if isinstance(part, Tensor))


def made_later(default: Any = None) -> Any:
    """A field that is None, or ``default``, in handles of tensors. Not as an attribute of the
    class, which would hide what _View.__getattr__ makes.
    """
    return field(default_factory=lambda: default, kw_only=True)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class TensorSequence(_View, Sequence[Tensor]):
    """What the handles of both tiers share: a sequence of tensors, made by one rank of one group.

    The tensors that DeepEP's callers know by position are fields of each kind of handle, in that
    order; those here, by name alone, describe the dispatch.

    A handle is either a view of what a dispatch recorded, ``_record``, or made of tensors; the
    first call that takes those makes a record of them.
    """

    _NAMES: ClassVar[tuple[str, ...]]  # of the fields by position

    rank: int | None = made_later()
    num_experts: int | None = made_later()
    num_topk: int | None = made_later()
    num_recv_tokens: int | None = made_later()
    max_num_tokens: int | None = made_later()
    num_recv_tokens_per_expert: Tensor | None = made_later()
    num_recv_tokens_tensor: Tensor | None = made_later()
    num_recv_tokens_per_rank: Tensor | None = made_later()
    members: tuple[str, ...] | None = made_later()
    expansion: Expansion | None = made_later()
    owner_stream: int | None = field(default_factory=lambda: None, repr=False)

    def _read(self, record: DispatchRecord, name: str) -> Any:
        if name == "expansion":
            return Expansion.of(record) if record.is_expanded else None
        return super()._read(record, name)

    def as_tuple(self) -> tuple[Tensor, ...]:
        """The tensors that have a position, in the order of DeepEP's handle."""
        return tuple([getattr(self, name) for name in self._NAMES])

    @property
    @abc.abstractmethod
    def num_channels(self) -> int: ...

    @property
    @abc.abstractmethod
    def num_recv_rows(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """T: rows that the next cached dispatch takes and combine returns."""
        return int(self.is_token_in_rank.shape[0])

    @property
    def num_output_rows(self) -> int:
        """Rows that dispatch returned and combine takes: those received, or the M of an expanded
        dispatch."""
        return self.num_recv_rows if self.expansion is None else self.expansion.num_rows

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Tensor, ...]: ...
    def __getitem__(self, index: int | slice) -> Tensor | tuple[Tensor, ...]:
        return self.as_tuple()[index]

    def __len__(self) -> int:
        return len(self._NAMES)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.as_tuple())


@dataclass(frozen=True, eq=False, repr=False)
class Handle(TensorSequence):
    """R ranks, C channels, T tokens of this rank, N rows received, L local experts.

    The first six fields are also a sequence of that order, ``handle[0]`` to ``handle[5]``, which
    can be indexed, sliced and unpacked; a plain tuple of the six serves combine and cached dispatch
    too. Everything else describes the dispatch; None there: not known. Tensors lie on the Buffer's
    device; those of a handle that a dispatch returned are made when they are asked for.

    Attributes:
        rank_prefix_matrix: int32 [R, R], [i, j]: tokens that ranks 0..i send to rank j.
        channel_prefix_matrix: int32 [R, C], [j, c]: tokens sent to rank j in channels 0..c.
        recv_channel_prefix_matrix: int32 [R, C], [i, c]: start of channel c in source i's block.
        recv_src_idx: int32 [N], token index at its source rank.
        is_token_in_rank: bool [T, R].
        send_head: int32 [T, R], ordinal in the (rank, channel) queue; negative: not sent.
        rank, num_experts: of the dispatch.
        num_topk: K; 0: dispatched without top-k.
        num_recv_tokens: rows that arrived; None in worst-case mode.
        max_num_tokens: the largest T of all ranks; None in worst-case mode.
        num_recv_tokens_per_expert: int32 [L], aligned.
        num_recv_tokens_tensor: int32 [1], rows that arrived.
        num_recv_tokens_per_rank: int32 [R], rows by source rank.
        members: who the ranks are.
        expansion: Expansion, of a dispatch with expand=True.
        has_default_sms: nobody said how many SMs the dispatch gets: combine may take more.
        owner_stream: the raw CUDA stream that owns torch's tensors in it; None: there are none.
    """

    rank_prefix_matrix: Tensor
    channel_prefix_matrix: Tensor
    recv_channel_prefix_matrix: Tensor
    recv_src_idx: Tensor
    is_token_in_rank: Tensor
    send_head: Tensor

    has_default_sms: bool = made_later(default=False)

    @property
    def num_ranks(self) -> int:
        return self.rank_prefix_matrix.shape[0]

    @property
    def num_channels(self) -> int:
        return self.channel_prefix_matrix.shape[1]

    @property
    def num_recv_rows(self) -> int:
        """N: received tokens, num_worst_tokens in worst-case mode."""
        return self.recv_src_idx.shape[0]


@dataclass(frozen=True, eq=False, repr=False)
class InternodeHandle(TensorSequence):
    """N nodes, M ranks a node, R = N * M ranks, C channels, T tokens of this rank, Q rows received,
    F rows forwarded: tokens that the ranks of this local index send to this node.

    The first ten fields are also a sequence of that order, ``handle[0]`` to ``handle[9]``, which
    can be indexed, sliced and unpacked; a plain tuple of the ten serves combine and cached dispatch
    too. Everything else describes the dispatch; None there: not known. Tensors lie on the Buffer's
    device; those of a handle that a dispatch returned are made when they are asked for.

    Attributes:
        is_token_in_rank: bool [T, R].
        rdma_channel_prefix_matrix: int32 [N, C], tokens sent to node n in channels 0..c.
        gbl_channel_prefix_matrix: int32 [R, C], the same by rank.
        recv_rdma_channel_prefix_matrix: int32 [N, C], rows forwarded for node n in channels 0..c.
        recv_rdma_rank_prefix_sum: int32 [N], rows forwarded for nodes 0..n.
        recv_gbl_channel_prefix_matrix: int32 [R, C], first row of channel c of source r.
        recv_gbl_rank_prefix_sum: int32 [R], rows of sources 0..r.
        recv_src_meta: uint8 [Q, 8]: int32 source node, int32 mask of this node's ranks with the
            token.
        send_rdma_head: int32 [T, N], ordinal in the (node, channel) queue; -1: not sent.
        send_nvl_head: int32 [F, M], ordinal in combine's (rank, channel) ring, plus 2^28 for each
            of the node's ranks that the token selects for the last time before; -1: not there.
        recv_src_idx: int32 [Q], token index at its source rank.
        rank, num_experts: of the dispatch.
        num_topk: 0: dispatched without top-k.
        num_recv_tokens: rows that arrived; None in worst-case mode.
        max_num_tokens: the largest T of all ranks; None in worst-case mode.
        num_recv_tokens_per_expert: int32 [L], L local experts, aligned.
        num_recv_tokens_tensor: int32 [1], rows that arrived.
        num_recv_tokens_per_rank: int32 [R], rows by source rank.
        members: who the ranks are.
        forward_slots: int32 [(N + 1) * M + C * N * M]: where combine's rows have places of their
            own; see InternodeCombineArgs. Without it combine takes the rings.
        num_returning_rows: that the node's other ranks return to this one in combine; None in
            worst-case mode.
        send_slots: int32 [T, N + R], ordinal of a token among all that go to node n, then to rank
            r; -1: not sent.
        expansion: Expansion, of a dispatch with expand=True.
        owner_stream: the raw CUDA stream that owns torch's tensors in it; None: there are none.
    """

    is_token_in_rank: Tensor
    rdma_channel_prefix_matrix: Tensor
    gbl_channel_prefix_matrix: Tensor
    recv_rdma_channel_prefix_matrix: Tensor
    recv_rdma_rank_prefix_sum: Tensor
    recv_gbl_channel_prefix_matrix: Tensor
    recv_gbl_rank_prefix_sum: Tensor
    recv_src_meta: Tensor
    send_rdma_head: Tensor
    send_nvl_head: Tensor

    recv_src_idx: Tensor | None = made_later()
    forward_slots: Tensor | None = made_later()
    num_returning_rows: int | None = made_later()
    send_slots: Tensor | None = made_later()

    @property
    def num_ranks(self) -> int:
        return self.is_token_in_rank.shape[1]

    @property
    def num_nodes(self) -> int:
        return self.rdma_channel_prefix_matrix.shape[0]

    @property
    def num_channels(self) -> int:
        return self.rdma_channel_prefix_matrix.shape[1]

    @property
    def num_recv_rows(self) -> int:
        """Q: received tokens, num_worst_tokens in worst-case mode."""
        return self.recv_src_meta.shape[0]

    @property
    def num_forward_rows(self) -> int:
        """F."""
        return self.send_nvl_head.shape[0]


for _class in (Handle, InternodeHandle):
    _class._NAMES = tuple(entry.name for entry in fields(_class) if not entry.kw_only)


class LowLatencyHandle:
    """What a low-latency dispatch learned, for the combine that follows.

    R ranks, M tokens that a rank may have, K top-k, L local experts, N = R * M.

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
        recv_rows: int32 [R, M, K], row of a top-k entry on this rank, or -1; compact: [R, M]. In a
            group of several nodes the second index, here and in recv_weights, is not the source's
            token, but the slot that its row came in, one of M for each source.
        recv_weights: float32 [R, M, K], if they came with dispatch; compact: None.
        num_recv_tokens: int32 [1]; None unless compact, like the next two.
        recv_topk_idx: int32 [N, K], local expert, or -1; with global_topk_idx global ones.
        recv_topk_weights: float32 [N, K], 0 where no local expert is; None without weights.
    """

    __slots__ = ("_record",)

    num_max_dispatch_tokens_per_rank: int
    hidden: int
    num_experts: int
    num_topk: int
    num_tokens: int
    is_compact: bool
    rank: int
    members: tuple[str, ...]
    metadata: Tensor
    rows_shape: tuple[int, ...]  # of what dispatch returned and combine takes
    src_info: Tensor
    layout_range: Tensor
    recv_tokens: Tensor
    recv_rows: Tensor
    recv_weights: Tensor | None
    num_recv_tokens: Tensor | None
    recv_topk_idx: Tensor | None
    recv_topk_weights: Tensor | None

    def __init__(self, record: LowLatencyRecord) -> None:
        self._record = record

    def __getattr__(self, name: str) -> Any:
        """Called for what is missing: every field is the record's."""
        if name not in LowLatencyHandle.__annotations__:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        if name == "num_max_dispatch_tokens_per_rank":
            return self._record.num_max_tokens
        if hasattr(self._record, name):
            return getattr(self._record, name)
        return self._record.part(name)

    def __repr__(self) -> str:
        sizes = ("num_max_dispatch_tokens_per_rank", "hidden", "num_experts", "num_topk")
        return _short(self, ("rank", "num_tokens", *sizes, "is_compact"))

    def as_tuple(self) -> tuple[Tensor, Tensor, int, int, int]:
        """The five items, in the order of DeepEP's handle."""
        sizes = self.num_max_dispatch_tokens_per_rank, self.hidden, self.num_experts
        return (self.src_info, self.layout_range, *sizes)

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
