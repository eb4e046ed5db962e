"""EPHandle: what a dispatch of ElasticBuffer learned."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from deep_comm.compat import expand
from deep_comm.handle import Handle


class EPHandle:
    """N received rows, K top-k, L local experts, R ranks.

    Device tensors are made when first asked for, on the current stream then, which must have waited for
    the dispatch; while a CUDA graph is captured, by the dispatch itself.

    Attributes:
        do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: of the dispatch.
        topk_idx: [T, K], a copy unless do_handle_copy was False.
        num_recv_tokens: N: rows that arrived; without CPU sync, rows that may arrive.
        num_expanded_tokens: rows grouped by expert, padding included; likewise.
        num_recv_tokens_per_expert_list: L aligned counts; [] without CPU sync.
        recv_topk_idx: [N, K], local expert or -1.
        dst_buffer_slot_idx, token_metadata_at_forward, channel_linked_list: None: of another protocol.
    """

    dst_buffer_slot_idx = token_metadata_at_forward = channel_linked_list = None
    cached_recv_src_metadata_before_sort = None

    def __init__(
        self,
        native: Handle,
        rank: int,
        recv_topk_idx: Tensor,
        topk_idx: Tensor,
        *,
        counts: list[int] | None,
        do_expand: bool,
        num_experts: int,
        expert_alignment: int,
        num_max_tokens_per_rank: int,
    ) -> None:
        assert native.num_recv_tokens_per_expert is not None
        self._native = native
        self._rank = rank
        self._fields: dict[str, Tensor] = {}
        self.recv_topk_idx = recv_topk_idx
        self.topk_idx = topk_idx
        self.do_expand = do_expand
        self.num_experts = num_experts
        self.expert_alignment = expert_alignment
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_sms = native.num_channels
        self.num_recv_tokens = native.num_recv_rows
        self.num_unaligned_recv_tokens_per_expert = native.num_recv_tokens_per_expert
        alignment = expert_alignment
        self.num_recv_tokens_per_expert_list = [
            -(-count // alignment) * alignment for count in counts or []
        ]
        num_local = self.num_unaligned_recv_tokens_per_expert.shape[0]
        self.num_expanded_tokens = (
            sum(self.num_recv_tokens_per_expert_list)
            if counts is not None
            else expand.num_rows_bound(
                self.num_recv_tokens, recv_topk_idx.shape[1], num_local, alignment
            )
        )

    def with_expand(self, do_expand: bool) -> EPHandle:
        """The same dispatch, seen the other way; tensors are shared."""
        if do_expand == self.do_expand:
            return self
        other = copy.copy(self)
        other.do_expand = do_expand
        other._fields = {k: v for k, v in self._fields.items() if k != _PSUM_PER_EXPERT}
        return other

    def _field(self, name: str, make: Any) -> Tensor:
        found = self._fields.get(name)
        if found is None:
            found = self._fields[name] = make()
        return found

    @property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> Tensor:
        """int32 [R]: rows of ranks 0..r; the last is the number that arrived."""
        return self._field(
            "psum_rank", lambda: self._native.rank_prefix_matrix[:, self._rank].contiguous()
        )

    @property
    def psum_num_recv_tokens_per_expert(self) -> Tensor:
        """int32 [L]. Compact: sum of the aligned counts of experts 0..e. Expanded: end of the real rows
        of expert e."""
        return self._field(_PSUM_PER_EXPERT, self._psum_per_expert)

    def _psum_per_expert(self) -> Tensor:
        counts = self.num_unaligned_recv_tokens_per_expert
        padded = expand.aligned(counts, self.expert_alignment)
        ends = padded.cumsum(0, dtype=torch.int32)
        return ends - padded + counts if self.do_expand else ends

    @property
    def recv_src_metadata(self) -> Tensor:
        """int32 [N, K + 2]: source rank * num_max_tokens_per_rank + source token; source rank; then for
        each selection its expanded row, or -1. Rows that did not arrive hold -1.

        Expanded combine reads the last K columns: callers that have summed rows themselves may rewrite
        them in place.
        """
        return self._field("metadata", self._metadata)

    def _metadata(self) -> Tensor:
        num_recv, num_topk = self.recv_topk_idx.shape
        ends = self.psum_num_recv_tokens_per_scaleup_rank
        rows = torch.arange(num_recv, dtype=torch.int32, device=ends.device)
        source = torch.searchsorted(ends, rows, right=True, out_int32=True)
        arrived = rows < ends[-1]
        token = source * self.num_max_tokens_per_rank + self._native.recv_src_idx
        metadata = torch.empty(num_recv, num_topk + 2, dtype=torch.int32, device=ends.device)
        metadata[:, 0] = torch.where(arrived, token, -1)
        metadata[:, 1] = torch.where(arrived, source, -1)
        metadata[:, 2:] = expand.slots(
            self.recv_topk_idx, self.num_unaligned_recv_tokens_per_expert, self.expert_alignment
        )
        return metadata

    @property
    def slots(self) -> Tensor:
        return self.recv_src_metadata[:, 2:]

    def materialise(self) -> list[Tensor]:
        """Makes the small fields now, and the slots if they are needed; returns all that were made."""
        made = [self.psum_num_recv_tokens_per_scaleup_rank, self.psum_num_recv_tokens_per_expert]
        return [*made, self.recv_src_metadata] if self.do_expand else made


_PSUM_PER_EXPERT = "psum_expert"
