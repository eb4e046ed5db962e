"""What a dispatch between nodes learned: consumed by combine, reused by cached dispatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from deep_comm.errors import HandleMismatch
from deep_comm.handle_base import HeldTensors, TensorSequence, made_later
from deep_comm.tier_parts import FreshTiers

if TYPE_CHECKING:
    from deep_comm.expansion import Expansion


class KnownTierHandle(HeldTensors):
    """A handle that has passed a Buffer's checks, as its calls want it: numbers and addresses. Kept
    in the handle, so that later calls with it check nothing but whose it is.

    Attributes: ``routing``: dispatch's first arguments, as ops/internode_plan.py lists them; the
    last, send_places, is 0 if they are not known. ``way_back``: combine's first, with
    ``forward_places``, likewise. ``num_received``: address of an int32, how many tokens this rank
    has received.
    ``numbers``: in the order of csrc/bind/quick_tiers.hpp; None: calls go step by step.
    """

    __slots__ = (
        "expansion", "forward_places", "num_channels", "num_forward_rows", "num_output_rows",
        "num_received", "num_recv_rows", "num_staging_rows", "num_tokens", "numbers", "owner",
        "routing", "way_back",
    )  # fmt: skip

    def __init__(
        self, handle: InternodeHandle, owner: object, tensors: tuple[Tensor, ...],
        routing: tuple[int, ...], rank_head: int, forward_places: int,
        sizes: tuple[int, int, int, int], num_nodes: int, num_ranks: int,
    ) -> None:  # fmt: skip
        """``owner``: whose checks. ``sizes``: T, Q, F, C."""
        if handle.expansion is not None:
            tensors += handle.expansion.tensors
        super().__init__(tensors, handle.home_stream)
        self.owner = owner
        self.num_tokens, self.num_recv_rows, self.num_forward_rows, self.num_channels = sizes
        self.num_received = routing[6] + 4 * (num_ranks - 1)
        self.num_output_rows = self.num_recv_rows
        self.expansion = handle.expansion
        if handle.expansion is not None:
            self.num_output_rows = handle.expansion.num_rows
        self.routing, self.forward_places = routing, forward_places
        _, _, node_head, *received, node_prefix, places = routing
        self.way_back = (
            node_head, rank_head, *received, node_prefix, forward_places, self.num_recv_rows,
            self.num_forward_rows,
        )  # fmt: skip
        self.num_staging_rows = self._staging_rows(
            handle.num_topk or 0, num_nodes, num_ranks // num_nodes, handle.num_returning_rows
        )
        self.numbers: tuple[int, ...] | None = None
        if handle.expansion is None and places != 0 and forward_places != 0:
            self.numbers = (
                *routing, rank_head, forward_places, self.num_tokens, self.num_recv_rows,
                self.num_forward_rows, self.num_channels, self.num_staging_rows,
            )  # fmt: skip

    def _staging_rows(
        self, num_topk: int, num_nodes: int, ranks_per_node: int, returning: int | None
    ) -> int:
        """Rows and sums for which combine wants a place: those that the node's other ranks return,
        that come from other nodes and that go there.
        """

        def most(num_targets: int) -> int:
            """Of them that a token can go to."""
            return min(num_topk, num_targets) if num_topk else num_targets

        if returning is None:
            returning = self.num_forward_rows * most(ranks_per_node - 1)
        crossing = self.num_tokens * most(num_nodes - 1)
        return max(1, returning + crossing + self.num_forward_rows)


@dataclass(frozen=True, eq=False)
class InternodeHandle(TensorSequence):
    """N nodes, M ranks a node, R = N * M ranks, C channels, T tokens of this rank, Q rows received,
    F rows forwarded: tokens that the ranks of this local index send to this node.

    The first ten fields are also a sequence of that order, ``handle[0]`` to ``handle[9]``, which
    can be indexed, sliced and unpacked; a plain tuple of the ten serves combine and cached dispatch
    too. Everything else describes the dispatch; None there: not known. Tensors lie on the Buffer's
    device.

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
        send_nvl_head: int32 [F, M], ordinal in combine's (rank, channel) ring; -1: not there.
        recv_src_idx: int32 [Q], token index at its source rank.
        rank, num_experts: of the dispatch.
        num_topk: 0: dispatched without top-k.
        num_recv_tokens: rows that arrived; None in worst-case mode.
        max_num_tokens: the largest T of all ranks; None in worst-case mode.
        num_recv_tokens_per_expert: int32 [L], L local experts, aligned.
        num_recv_tokens_tensor: int32 [1], rows that arrived.
        num_recv_tokens_per_rank: int32 [R], rows by source rank.
        members: who the ranks are.
        forward_places: int32 [(N + 1) * M + C * N * M]: where combine's rows have places of their
            own; see InternodeCombineArgs. Without it combine takes the rings.
        num_returning_rows: that the node's other ranks return to this one in combine; None in
            worst-case mode.
        send_places: int32 [T, N + R], ordinal of a token among all that go to node n, then to rank
            r; -1: not sent.
        expansion: Expansion, of a dispatch with expand=True.
        home_stream: whose memory it is, a raw CUDA stream.
    """

    _KINDS: ClassVar = (
        (torch.bool, 2), *((torch.int32, 2),) * 3, (torch.int32, 1), (torch.int32, 2),
        (torch.int32, 1), (torch.uint8, 2), *((torch.int32, 2),) * 2,
    )  # fmt: skip
    _MADE_BY: ClassVar = "dispatch between nodes"
    _SMS_OF_CHANNELS: ClassVar = "num_sms / 2"

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

    _: KW_ONLY
    recv_src_idx: Tensor | None = made_later()
    forward_places: Tensor | None = made_later()
    num_returning_rows: int | None = None
    send_places: Tensor | None = made_later()
    _known: KnownTierHandle | None = field(default=None, init=False, repr=False)
    _fresh: ClassVar[FreshTiers | None] = None

    @classmethod
    def fresh(cls, parts: FreshTiers, **others: Any) -> InternodeHandle:
        """Of a dispatch that has just been launched: tensors are made when they are asked for.
        ``others``: fields of the handle that are no tensors."""
        handle = object.__new__(cls)
        held = handle.__dict__
        held.update(others)
        held.update(parts.tensors)
        held["_fresh"] = parts
        if parts.routing[-1] == 0:
            held["send_places"] = None
        return handle

    def complete(
        self, num_recv_tokens: int, max_num_tokens: int, num_forward_rows: int,
        num_returning_rows: int,
    ) -> None:  # fmt: skip
        """Of a fresh handle that was made before its counts had come, and that nobody has seen."""
        held = self.__dict__
        held["num_recv_tokens"] = num_recv_tokens
        held["max_num_tokens"] = max_num_tokens
        held["num_returning_rows"] = num_returning_rows
        parts = held["_fresh"]
        parts.num_rows, parts.num_forward_rows = num_recv_tokens, num_forward_rows

    def expand(self, expansion: Expansion) -> None:
        """Of a fresh handle that nobody has seen."""
        self.__dict__["expansion"] = expansion

    @property
    def num_received(self) -> int:
        """Of a fresh handle: address of an int32, how many tokens have come."""
        parts: FreshTiers = self.__dict__["_fresh"]
        return parts.routing[6] + 4 * (parts.layout.num_ranks - 1)

    def known_to(self, owner: object) -> KnownTierHandle | None:
        """What the calls of ``owner`` need of it, if that made it, or has called require_group and
        remember."""
        known = self._known
        if known is not None:
            return known if known.owner is owner else None
        fresh = self._fresh
        if fresh is None or fresh.owner is not owner:
            return None
        tensors = tuple(fresh.tensors.values())
        if fresh.storage is not None:
            tensors += (fresh.storage,)
        layout = fresh.layout
        known = KnownTierHandle(
            self, owner, tensors, fresh.routing, fresh.rank_head, fresh.forward_places,
            (layout.num_tokens, fresh.num_rows, fresh.num_forward_rows, layout.num_channels),
            layout.num_nodes, layout.num_ranks,
        )  # fmt: skip
        self.__dict__["_known"] = known  # a cache: the handle itself stays as it is
        return known

    def remember(self, owner: object, empty_address: int) -> KnownTierHandle:
        """The same for ``owner``, which has checked the handle. ``empty_address``: of tensors
        without elements."""

        def address(tensor: Tensor | None) -> int:
            return 0 if tensor is None else tensor.data_ptr() or empty_address

        mask, node_prefix, _, *received, _, node_head, rank_head = self.as_tuple()
        places, forward_places = self.send_places, self.forward_places
        read = (mask, node_head, *received, node_prefix, places)
        tensors = *self.as_tuple(), places, forward_places
        known = KnownTierHandle(
            self, owner, tuple(tensor for tensor in tensors if tensor is not None),
            (self.num_experts or 0, *map(address, read)), address(rank_head),
            address(forward_places),
            (self.num_tokens, self.num_recv_rows, self.num_forward_rows, self.num_channels),
            self.num_nodes, self.num_ranks,
        )  # fmt: skip
        self.__dict__["_known"] = known
        return known

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
    def num_tokens(self) -> int:
        """T: rows that the next cached dispatch takes and combine returns."""
        return self.is_token_in_rank.shape[0]

    @property
    def num_recv_rows(self) -> int:
        """Q: received tokens, num_worst_tokens in worst-case mode."""
        return self.recv_src_meta.shape[0]

    @property
    def num_forward_rows(self) -> int:
        """F."""
        return self.send_nvl_head.shape[0]

    def as_tuple(self) -> tuple[Tensor, ...]:
        """The ten tensors, in the order of DeepEP's handle."""
        return (
            self.is_token_in_rank,
            self.rdma_channel_prefix_matrix,
            self.gbl_channel_prefix_matrix,
            self.recv_rdma_channel_prefix_matrix,
            self.recv_rdma_rank_prefix_sum,
            self.recv_gbl_channel_prefix_matrix,
            self.recv_gbl_rank_prefix_sum,
            self.recv_src_meta,
            self.send_rdma_head,
            self.send_nvl_head,
        )

    @staticmethod
    def of(value: InternodeHandle | Sequence[Tensor]) -> InternodeHandle:
        """A handle from a handle or from its ten tensors; ArgumentError for anything else."""
        if isinstance(value, InternodeHandle):
            return value
        return InternodeHandle(*InternodeHandle._checked(value))

    def require_group(
        self,
        rank: int,
        num_ranks: int,
        num_nodes: int,
        members: tuple[str, ...],
        device: torch.device,
    ) -> None:
        """Raise HandleMismatch unless the handle was made by this rank of this group."""
        if (self.num_ranks, self.num_nodes) != (num_ranks, num_nodes):
            raise HandleMismatch(
                "handle",
                f"{self.num_ranks} ranks on {self.num_nodes} nodes",
                f"must be of this group of {num_ranks} ranks on {num_nodes} nodes",
            )
        self._require_owner(rank, members, device)
