"""What a dispatch learned: consumed by combine, reused by cached dispatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from deep_comm.errors import HandleMismatch
from deep_comm.handle_base import HeldTensors, TensorSequence
from deep_comm.handle_parts import Memory, Slab, SlabLayout, SourceRows

if TYPE_CHECKING:
    from deep_comm.checks import PayloadForm


class KnownHandle(HeldTensors):
    """A handle that has passed a Buffer's checks, as the hot path wants it: numbers and addresses.

    Kept in the handle, so that later calls with it check nothing but whose it is.
    """

    __slots__ = (
        "owner",
        "num_tokens",
        "num_recv_rows",
        "num_output_rows",
        "expansion",
        "num_channels",
        "num_topk",
        "has_default_sms",
        "rank_prefix_matrix",
        "routing",
        "way_back",
        "output_layouts",
        "numbers",
    )

    def __init__(
        self,
        handle: Handle,
        owner: object,
        tensors: tuple[Tensor, ...],
        num_tokens: int,
        num_recv_rows: int,
        num_channels: int,
        routing: tuple[int, int, int, int, int],
        recv_channel_prefix_matrix: int,
    ) -> None:
        """``owner``: whose checks. ``tensors``: torch's memory in the handle."""
        if handle.expansion is not None:
            tensors += handle.expansion.tensors
        super().__init__(tensors, handle.home_stream)
        self.owner = owner
        self.num_tokens = num_tokens
        self.num_recv_rows = num_recv_rows
        self.expansion = handle.expansion
        self.num_output_rows = num_recv_rows
        if handle.expansion is not None:
            self.num_output_rows = handle.expansion.num_rows
        self.num_channels = num_channels
        self.num_topk = handle.num_topk or 0  # 0: not known
        self.has_default_sms = handle.has_default_sms
        # How the engine's calls take the routing: dispatch's first arguments, combine's first.
        self.routing = routing
        _, _, send_head, self.rank_prefix_matrix, channel_prefix_matrix = routing
        self.way_back = (
            num_recv_rows, self.rank_prefix_matrix, channel_prefix_matrix,
            recv_channel_prefix_matrix, send_head,
        )  # fmt: skip
        # How the outputs of a cached dispatch lie in the receive region: offsets of x
        # and scales, bytes of both.
        self.output_layouts: dict[PayloadForm, tuple[int, int, int]] = {}
        # What calls in one native step want of it (ops/quick.py); None: they go step by step.
        self.numbers: tuple[int, ...] | None = (
            *routing, recv_channel_prefix_matrix, num_recv_rows, num_tokens,
            self.num_output_rows, num_channels, self.num_topk, int(self.has_default_sms),
        )  # fmt: skip
        if handle.expansion is not None:
            expanded = handle.expansion.numbers()
            self.numbers = None if expanded is None else self.numbers + expanded


class _Fresh:
    """Where the parts of a handle lie that no tensor has been made of."""

    __slots__ = (
        "owner", "layout", "address", "slab", "storage", "mask", "src_rows", "src_idx", "routing"
    )  # fmt: skip

    def __init__(
        self, owner: object, slab: Slab, storage: Tensor | None, mask: Tensor | None,
        src_rows: SourceRows | None, src_idx: Tensor | None,
        routing: tuple[int, int, int, int, int],
    ) -> None:  # fmt: skip
        self.owner = owner
        self.layout, self.address = slab.layout, slab.address
        self.slab = slab
        self.storage = storage
        self.mask = mask
        self.src_rows = src_rows
        self.src_idx = src_idx
        self.routing = routing

    def tensor(self, name: str) -> Tensor | None:
        return _tensor_of(self, name)


class _FreshInRegion:
    """The same where slab and source tokens lie behind each other in the receive region: what is
    said of them is made when it is asked for, too."""

    __slots__ = ("owner", "layout", "address", "mask", "routing", "num_rows", "_memory")

    storage = src_idx = None

    def __init__(
        self, owner: object, layout: SlabLayout, address: int, mask: Tensor | None,
        routing: tuple[int, int, int, int, int], num_rows: int, memory: tuple[Any, ...],
    ) -> None:  # fmt: skip
        self.owner = owner
        self.layout = layout
        self.address = address
        self.mask = mask
        self.routing = routing
        self.num_rows = num_rows
        self._memory = memory  # the arguments of Memory

    @property
    def slab(self) -> Slab:
        return Slab(self.layout, self.address, Memory(*self._memory))

    @property
    def src_rows(self) -> SourceRows:
        return SourceRows(
            self.address + self.layout.num_bytes, self.num_rows, Memory(*self._memory)
        )

    def tensor(self, name: str) -> Tensor | None:
        return _tensor_of(self, name)


def _tensor_of(fresh: _Fresh | _FreshInRegion, name: str) -> Tensor | None:
    if name in fresh.layout.parts:
        return fresh.slab.tensor(name)
    if name != "recv_src_idx":
        return None
    assert fresh.src_rows is not None
    return fresh.src_rows.tensor()


@dataclass(frozen=True, eq=False)
class Handle(TensorSequence):
    """R ranks, C channels, T tokens of this rank, N rows received, L local experts.

    The first six fields are also a sequence of that order, ``handle[0]`` to ``handle[5]``, which
    can be indexed, sliced and unpacked; a plain tuple of the six serves combine and cached dispatch
    too. Everything else describes the dispatch; None there: not known. Tensors lie on the Buffer's
    device.

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
        home_stream: whose memory it is, a raw CUDA stream.
    """

    _KINDS: ClassVar = (
        *((torch.int32, 2),) * 3, (torch.int32, 1), (torch.bool, 2), (torch.int32, 2)
    )  # fmt: skip

    rank_prefix_matrix: Tensor
    channel_prefix_matrix: Tensor
    recv_channel_prefix_matrix: Tensor
    recv_src_idx: Tensor
    is_token_in_rank: Tensor
    send_head: Tensor

    has_default_sms: bool = field(default=False, kw_only=True)
    _known: KnownHandle | None = field(default=None, init=False, repr=False)
    _fresh: ClassVar[_Fresh | _FreshInRegion | None] = None

    @classmethod
    def fresh(
        cls,
        owner: object,
        slab: Slab,
        storage: Tensor | None,
        mask: Tensor | None,
        src_rows: SourceRows | None,
        src_idx: Tensor | None,
        routing: tuple[int, int, int, int, int],
        **others: Any,
    ) -> Handle:
        """Of a dispatch that has just been launched: tensors are made when they are asked for.

        Args:
            owner: whose calls need no checks.
            storage: of the slab, if it is torch's.
            mask: is_token_in_rank, if it is not in the slab.
            src_rows, src_idx: one of both.
            others: fields of the handle that are no tensors.
        """
        handle = object.__new__(cls)
        held = handle.__dict__
        held.update(others)
        held["_fresh"] = _Fresh(owner, slab, storage, mask, src_rows, src_idx, routing)
        if mask is not None:
            held["is_token_in_rank"] = mask
        if src_idx is not None:
            held["recv_src_idx"] = src_idx
        return handle

    @classmethod
    def fresh_in_region(
        cls,
        owner: object,
        layout: SlabLayout,
        address: int,
        mask: Tensor | None,
        routing: tuple[int, int, int, int, int],
        num_rows: int,
        memory: tuple[Any, ...],
        **others: Any,
    ) -> Handle:
        """The same of a slab at ``address`` with ``num_rows`` source tokens behind it.
        ``memory``: the arguments of Memory."""
        handle = object.__new__(cls)
        held = handle.__dict__
        held.update(others)
        held["_fresh"] = _FreshInRegion(owner, layout, address, mask, routing, num_rows, memory)
        if mask is not None:
            held["is_token_in_rank"] = mask
        return handle

    def remember_native(self, known: object) -> None:
        """What a native step knows of it (csrc/bind/quick_forms.hpp, FreshKnown), for the calls of
        the Buffer that it was made by."""
        self.__dict__["_native"] = known

    def complete(self, num_recv_tokens: int, max_num_tokens: int) -> None:
        """Of a handle in the region that was made before its counts had come, and that nobody has
        seen."""
        held = self.__dict__
        held["num_recv_tokens"] = num_recv_tokens
        held["max_num_tokens"] = max_num_tokens
        held["_fresh"].num_rows = num_recv_tokens

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
        """What the calls of ``owner`` need of it, if that made it, or has called
        require_group and remember.
        """
        known = self._known
        if known is not None:
            return known if known.owner is owner else None
        fresh = self._fresh
        if fresh is None or fresh.owner is not owner:
            return None
        layout = fresh.layout
        torches = (fresh.storage, fresh.mask, fresh.src_idx)
        if type(fresh) is _FreshInRegion:
            num_rows = fresh.num_rows
        elif fresh.src_idx is not None:
            num_rows = fresh.src_idx.shape[0]
        else:
            assert fresh.src_rows is not None
            num_rows = fresh.src_rows.num_rows
        known = KnownHandle(
            self,
            owner,
            tuple(tensor for tensor in torches if tensor is not None),
            layout.num_tokens,
            num_rows,
            layout.num_channels,
            fresh.routing,
            fresh.address + layout.recv_channel_prefix_matrix,
        )
        self.__dict__["_known"] = known  # a cache: the handle itself stays as it is
        return known

    def remember(self, owner: object, empty_address: int) -> KnownHandle:
        """The same for ``owner``, which has checked the handle. ``empty_address``: of
        tensors without elements.
        """
        prefix, channels, recv_channels, _, mask, send_head = (
            tensor.data_ptr() or empty_address for tensor in self.as_tuple()
        )
        routing = (self.num_experts or 0, mask, send_head, prefix, channels)
        known = KnownHandle(
            self, owner, self.as_tuple(), self.num_tokens, self.num_recv_rows, self.num_channels,
            routing, recv_channels,
        )  # fmt: skip
        self.__dict__["_known"] = known
        return known

    def require_num_tokens(self, num_tokens: int) -> None:
        """Raise HandleMismatch unless the dispatch had as many tokens."""
        if self.num_tokens != num_tokens:
            raise HandleMismatch(
                "handle",
                f"{self.num_tokens} tokens",
                f"must be of a dispatch of as many tokens as x has rows ({num_tokens})",
            )
