"""What a dispatch learned: consumed by combine, reused by cached dispatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deep_comm.handle_base import TensorSequence, made_later


@dataclass(frozen=True, eq=False)
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

    _SIZE: ClassVar = 6

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


@dataclass(frozen=True, eq=False)
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
        owner_stream: the raw CUDA stream that owns torch's tensors in it; None: there are none.
    """

    _SIZE: ClassVar = 10

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
    forward_places: Tensor | None = made_later()
    num_returning_rows: int | None = made_later()
    send_places: Tensor | None = made_later()

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
