"""What a dispatch between nodes learned: consumed by combine, reused by cached dispatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from deep_comm.errors import HandleMismatch
from deep_comm.expansion import Expansion
from deep_comm.handle_base import HeldTensors, TensorSequence


class KnownTierHandle(HeldTensors):
    """A handle that a Buffer has made, as calls of it in one native step want it (ops/quick.py).

    Attributes: ``numbers``: in the order of csrc/bind/quick_tiers.hpp; None: they go step by step.
    ``home_stream``: whose memory it is.
    """

    __slots__ = ("home_stream", "numbers")

    def __init__(self, handle: InternodeHandle) -> None:
        super().__init__(handle.all_tensors)
        self.home_stream = handle.home_stream
        self.numbers: tuple[int, ...] | None = None
        places, forward_places = handle.send_places, handle.forward_places
        if handle.expansion is not None or places is None or forward_places is None:
            return
        mask, node_prefix, _, *received, _, node_head, rank_head = handle.as_tuple()
        self.tensors += places, forward_places
        read = (mask, node_head, *received, node_prefix, places, rank_head, forward_places)
        self.numbers = (
            handle.num_experts or 0,
            *(tensor.data_ptr() for tensor in read),
            handle.num_tokens,
            handle.num_recv_rows,
            handle.num_forward_rows,
            handle.num_channels,
            handle.num_staging_rows,
        )


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

    recv_src_idx: Tensor | None = None
    rank: int | None = None
    num_experts: int | None = None
    num_topk: int | None = None
    num_recv_tokens: int | None = None
    max_num_tokens: int | None = None
    num_recv_tokens_per_expert: Tensor | None = None
    num_recv_tokens_tensor: Tensor | None = None
    num_recv_tokens_per_rank: Tensor | None = None
    members: tuple[str, ...] | None = None
    forward_places: Tensor | None = None
    num_returning_rows: int | None = None
    send_places: Tensor | None = None
    expansion: Expansion | None = None
    home_stream: int | None = field(default=None, repr=False)
    _owner: object = field(default=None, init=False, repr=False)  # whose calls need no checks
    _known: KnownTierHandle | None = field(default=None, init=False, repr=False)

    def made_by(self, owner: object) -> InternodeHandle:
        """This handle, of a dispatch of ``owner`` that has just been launched."""
        self.__dict__["_owner"] = owner
        return self

    def known_to(self, owner: object) -> KnownTierHandle | None:
        """What the calls of ``owner`` need of it, if that made it."""
        if self._owner is not owner:
            return None
        if self._known is None:
            self.__dict__["_known"] = KnownTierHandle(self)  # a cache: the handle stays as it is
        return self._known

    def __getstate__(self) -> dict[str, Any]:
        """For copies: without what belongs to this one."""
        state = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {**state, "_owner": None, "_known": None}

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
    def num_output_rows(self) -> int:
        """Rows that dispatch returned and combine takes: Q, or the M of an expanded dispatch."""
        return self.num_recv_rows if self.expansion is None else self.expansion.num_rows

    @property
    def all_tensors(self) -> tuple[Tensor, ...]:
        """What calls with this handle read."""
        return self.as_tuple() if self.expansion is None else (*self, *self.expansion.tensors)

    @property
    def num_forward_rows(self) -> int:
        """F."""
        return self.send_nvl_head.shape[0]

    @property
    def num_staging_rows(self) -> int:
        """Rows and sums for which combine wants a place: those that the node's other ranks return,
        that come from other nodes and that go there.
        """
        ranks_per_node = self.num_ranks // self.num_nodes

        def most(num_targets: int) -> int:
            """Of them that a token can go to."""
            return min(self.num_topk, num_targets) if self.num_topk else num_targets

        returning = self.num_returning_rows
        if returning is None:
            returning = self.num_forward_rows * most(ranks_per_node - 1)
        crossing = self.num_tokens * most(self.num_nodes - 1)
        return max(1, returning + crossing + self.num_forward_rows)

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
