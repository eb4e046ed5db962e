"""What a dispatch between nodes learned: consumed by combine, reused by cached dispatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from deep_comm.errors import ArgumentError, HandleMismatch

_NUM_DIMS = (2, 2, 2, 2, 1, 2, 1, 2, 2, 2)
_DTYPES = (torch.bool, *(torch.int32,) * 6, torch.uint8, torch.int32, torch.int32)


@dataclass(frozen=True, eq=False)
class InternodeHandle:
    """N nodes, M ranks a node, R = N * M ranks, C channels, T tokens of this rank, Q rows received, F rows
    forwarded: tokens that the ranks of this local index send to this node.

    The first ten fields are also a sequence of that order, ``handle[0]`` to ``handle[9]``, which can be
    indexed, sliced and unpacked; a plain tuple of the ten serves combine and cached dispatch too.
    Everything else describes the dispatch; None there: not known.
    """

    is_token_in_rank: Tensor  # bool [T, R]
    rdma_channel_prefix_matrix: Tensor  # int32 [N, C], tokens sent to node n in channels 0..c
    gbl_channel_prefix_matrix: Tensor  # int32 [R, C], the same by rank
    recv_rdma_channel_prefix_matrix: Tensor  # int32 [N, C], rows forwarded for node n in channels 0..c
    recv_rdma_rank_prefix_sum: Tensor  # int32 [N], rows forwarded for nodes 0..n
    recv_gbl_channel_prefix_matrix: Tensor  # int32 [R, C], first row of channel c of source r
    recv_gbl_rank_prefix_sum: Tensor  # int32 [R], rows of sources 0..r
    recv_src_meta: Tensor  # uint8 [Q, 8]: int32 source node, int32 mask of this node's ranks with the token
    send_rdma_head: Tensor  # int32 [T, N], ordinal in the (node, channel) queue; -1: not sent
    send_nvl_head: Tensor  # int32 [F, M], ordinal in combine's (rank, channel) ring; -1: not there

    recv_src_idx: Tensor | None = None  # int32 [Q], token index at its source rank
    rank: int | None = None
    num_experts: int | None = None
    num_topk: int | None = None  # 0: dispatched without top-k
    num_recv_tokens: int | None = None  # rows that arrived; None in worst-case mode
    max_num_tokens: int | None = None  # the largest T of all ranks; None in worst-case mode
    num_recv_tokens_per_expert: Tensor | None = None  # int32 [L] on the device, aligned
    members: tuple[str, ...] | None = None  # who the ranks are

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
        """Q: rows that dispatch returned and combine takes, num_worst_tokens in worst-case mode."""
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

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Tensor, ...]: ...
    def __getitem__(self, index: int | slice) -> Tensor | tuple[Tensor, ...]:
        return self.as_tuple()[index]

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.as_tuple())

    @staticmethod
    def of(value: InternodeHandle | Sequence[Tensor]) -> InternodeHandle:
        """A handle from a handle or from its ten tensors; ArgumentError for anything else."""
        if isinstance(value, InternodeHandle):
            return value
        if not isinstance(value, (tuple, list)) or len(value) != 10:
            given = f"{type(value).__name__}"
            if isinstance(value, (tuple, list)):
                given += f" of {len(value)} items"
            raise ArgumentError("handle", given, "must be what dispatch between nodes returned")
        for position, tensor in enumerate(value):
            if not (
                isinstance(tensor, Tensor)
                and tensor.dtype == _DTYPES[position]
                and tensor.dim() == _NUM_DIMS[position]
                and tensor.is_contiguous()
            ):
                raise ArgumentError(
                    f"handle[{position}]",
                    type(tensor).__name__,
                    f"must be a contiguous {_NUM_DIMS[position]}-D tensor of {_DTYPES[position]}",
                )
        return InternodeHandle(*value)

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
        if self.rank is not None and self.rank != rank:
            raise HandleMismatch("handle", f"rank {self.rank}", f"must be of this rank ({rank})")
        if self.members is not None and self.members != members:
            raise HandleMismatch("handle", "one of other ranks", "must be of this Buffer's group")
        for tensor in self:
            if tensor.device != device:
                raise HandleMismatch("handle", tensor.device, f"must be on {device}")

    def require_num_channels(self, num_channels: int) -> None:
        """Raise HandleMismatch unless the dispatch had as many channels."""
        if self.num_channels != num_channels:
            raise HandleMismatch(
                "handle",
                f"{self.num_channels} channels",
                f"must have the config's {num_channels} channels (num_sms / 2); "
                "leave config away to take the handle's",
            )
