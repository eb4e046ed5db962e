"""EPHandle: what a dispatch of ElasticBuffer learned."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deep_comm.buffer import Buffer
from deep_comm.compat import expand
from deep_comm.errors import ArgumentError, HandleMismatch
from deep_comm.handle import Expansion, Handle, InternodeHandle
from deep_comm.settings import integers

AnyHandle = Handle | InternodeHandle


class EPHandle:
    """N received rows, K top-k, L local experts, R ranks, S scale-up ranks.

    Device tensors are made when first asked for, on the current stream then, which must have waited
    for the dispatch; while a CUDA graph is captured, by the dispatch itself.

    Attributes:
        do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: of the dispatch.
        topk_idx: [T, K], a copy unless do_handle_copy was False.
        num_recv_tokens: N: rows that arrived; without CPU sync, rows that may arrive.
        num_expanded_tokens: rows grouped by expert, padding included; likewise.
        num_recv_tokens_per_expert_list: L aligned counts; [] without CPU sync.
        num_unaligned_recv_tokens_per_expert: int32 [L].
        token_metadata_at_forward, channel_linked_list: None: of another protocol.
    """

    token_metadata_at_forward = channel_linked_list = None
    cached_recv_src_metadata_before_sort = None

    def __init__(
        self,
        native: AnyHandle,
        rank: int,
        recv_topk_idx: Tensor,
        topk_idx: Tensor,
        *,
        counts: list[int] | None,
        do_expand: bool,
        num_experts: int,
        expert_alignment: int,
        num_max_tokens_per_rank: int,
        num_scaleup_ranks: int,
    ) -> None:
        """
        Args:
            native: of the dispatch: expanded with do_expand, else compact with an alignment of 1.
            recv_topk_idx: what that dispatch returned: local expert of each row [P] if expanded,
                else of each selection [N, K].
            counts: rows of each local expert, aligned if expanded; None without CPU sync.
        """
        self._native = native
        self._rank = rank
        self._made_by_dispatch = recv_topk_idx
        self._fields: dict[str, Tensor] = {}
        self._is_metadata_lent = False
        self._is_counted = counts is not None
        self._routes: dict[bool, AnyHandle] = {}
        self.topk_idx = topk_idx
        self.do_expand = do_expand
        self.num_experts = num_experts
        self.expert_alignment = expert_alignment
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self._num_scaleup_ranks = num_scaleup_ranks
        # Between nodes two SMs make a channel.
        self.num_sms = native.num_channels * (1 if isinstance(native, Handle) else 2)
        expansion = self._expansion
        per_expert = native.num_recv_tokens_per_expert
        assert per_expert is not None
        self.num_unaligned_recv_tokens_per_expert: Tensor = (
            per_expert if expansion is None else expansion.expert_counts
        )
        num_recv = native.num_recv_rows
        if counts is None:
            num_recv = num_max_tokens_per_rank * native.num_ranks
        self.num_recv_tokens = num_recv
        alignment = expert_alignment
        self.num_recv_tokens_per_expert_list = [
            integers.round_up(count, alignment) for count in counts or []
        ]
        if expansion is not None:
            self.num_expanded_tokens = expansion.num_rows
        elif counts is not None:
            self.num_expanded_tokens = sum(self.num_recv_tokens_per_expert_list)
        else:
            num_local = self.num_unaligned_recv_tokens_per_expert.shape[0]
            self.num_expanded_tokens = expand.num_rows_bound(
                num_recv, recv_topk_idx.shape[1], num_local, alignment
            )

    def require(self, **given: Any) -> None:
        """Raise HandleMismatch if what is given, and is not None, is not what the dispatch had."""
        for name, value in given.items():
            if value is not None and value != getattr(self, name):
                raise HandleMismatch(
                    name, value, f"must be that of the handle ({getattr(self, name)})"
                )

    def with_expand(self, do_expand: bool) -> EPHandle:
        """A handle of the same dispatch, expanded or not; tensors are shared."""
        if do_expand == self.do_expand:
            return self
        other = copy.copy(self)
        other.do_expand = do_expand
        other._fields = {k: v for k, v in self._fields.items() if k != _PSUM_PER_EXPERT}
        return other

    # ---- for the calls -------------------------------------------------------------------------

    @property
    def _expansion(self) -> Expansion | None:
        return self._native.expansion

    @property
    def native(self) -> AnyHandle:
        """The handle for a dispatch of this kind; a compact one cannot be expanded by the
        engine."""
        return self._native if self.do_expand else self.compact

    @property
    def compact(self) -> AnyHandle:
        """The handle for rows that come once."""
        if self._native.expansion is None:
            return self._native
        return self._with_expansion(None)

    def _with_expansion(self, expansion: Expansion | None) -> AnyHandle:
        """Of as many received rows as there may be: without CPU sync an expanded dispatch sizes
        everything for expanded rows."""
        native, num_rows = self._native, self.num_recv_tokens
        assert native.recv_src_idx is not None
        tokens = native.recv_src_idx[:num_rows]
        if isinstance(native, Handle):
            return dataclasses.replace(native, recv_src_idx=tokens, expansion=expansion)
        return dataclasses.replace(
            native, recv_src_idx=tokens, recv_src_meta=native.recv_src_meta[:num_rows],
            expansion=expansion,
        )  # fmt: skip

    @property
    def is_expanded_by_engine(self) -> bool:
        return self.do_expand and self._expansion is not None

    @property
    def is_metadata_lent(self) -> bool:
        """Has a caller seen recv_src_metadata, and may have rewritten it?"""
        return self._is_metadata_lent

    def rewritten(self, num_rows: int) -> AnyHandle:
        """The handle for a combine of ``num_rows`` rows that lie as recv_src_metadata says now."""
        expansion = self._expansion
        assert expansion is not None
        return self._with_expansion(
            dataclasses.replace(expansion, recv_rows=self.slots.contiguous(), num_rows=num_rows)
        )

    def route(self, buffer: Buffer, by_selection: bool, is_capturing: bool) -> AnyHandle:
        """Of T * K tokens of one selection each, as which rows travel that are summed nowhere
        before they are home: all selections, or the last one at each rank. Collective, once."""
        found = self._routes.get(by_selection)
        if found is None:
            topk_idx = self.topk_idx
            if not by_selection:
                owners = expand.owners(topk_idx, self.num_experts, self._native.num_ranks)
                topk_idx = torch.where(expand.is_last_at_owner(owners), topk_idx, -1)
            num_rows = self.num_expanded_tokens if by_selection else self.num_recv_tokens
            # Rows of one vector: only the way that they go is wanted.
            x = torch.zeros(topk_idx.numel(), 8, dtype=torch.bfloat16, device=topk_idx.device)
            _, _, _, _, found, _ = buffer.dispatch(
                x,
                topk_idx=topk_idx.reshape(-1, 1),
                num_experts=self.num_experts,
                num_worst_tokens=0 if self._is_counted and not is_capturing else num_rows,
            )
            assert found is not None
            self._routes[by_selection] = found
        return found

    @property
    def recv_topk_idx(self) -> Tensor:
        """[N, K], local expert or -1."""
        if self._expansion is None:
            return self._made_by_dispatch
        return self._field("topk_idx", self._experts_of_selections)

    def _experts_of_selections(self) -> Tensor:
        slots, experts = self.dispatched_slots.to(torch.int64), self._made_by_dispatch
        if experts.shape[0] == 0:
            return experts.new_full(slots.shape, -1)
        return torch.where(slots >= 0, experts[slots.clamp(min=0)], -1)

    @property
    def is_selected_here(self) -> Tensor:
        """bool [N, K]"""
        expansion = self._expansion
        return (self._made_by_dispatch if expansion is None else self.dispatched_slots) >= 0

    @property
    def dispatched_slots(self) -> Tensor:
        """int32 [N, K] as the dispatch laid the rows out."""
        expansion = self._expansion
        if expansion is not None:
            return expansion.recv_rows[: self.num_recv_tokens]
        return expand.slots(
            self._made_by_dispatch, self.num_unaligned_recv_tokens_per_expert, self.expert_alignment
        )

    @property
    def num_cut_rows(self) -> int:
        """By which a caller has made recv_src_metadata shorter; negative: longer."""
        metadata = self._fields.get(_METADATA)
        return 0 if metadata is None else self.num_recv_tokens - metadata.shape[0]

    @property
    def slots(self) -> Tensor:
        """int32 [N, K], of recv_src_metadata as it is now; -1 past its end."""
        slots = self._field(_METADATA, self._metadata)[:, 2:]
        num_cut = self.num_cut_rows
        if num_cut == 0:
            return slots
        return torch.nn.functional.pad(slots, (0, 0, 0, num_cut), value=-1)

    def materialise(self) -> list[Tensor]:
        """Makes the fields now, for a CUDA graph to hold; returns them."""
        made = [self.psum_num_recv_tokens_per_scaleup_rank, self.psum_num_recv_tokens_per_expert]
        return [*made, self._field(_METADATA, self._metadata)] if self.do_expand else made

    def tensors(self) -> list[Tensor]:
        """Everything that a call with this handle may read."""
        expansion = self._expansion
        parts = () if expansion is None else expansion.tensors
        found = [*self._native, *parts, self._made_by_dispatch, self.topk_idx]
        found.append(self.num_unaligned_recv_tokens_per_expert)
        found += [tensor for route in self._routes.values() for tensor in route]
        return [*found, *self._fields.values()]

    # ---- fields --------------------------------------------------------------------------------

    def _field(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        found = self._fields.get(name)
        if found is None:
            found = self._fields[name] = make()
        return found

    @property
    def _ends_by_source(self) -> Tensor:
        """int32 [R]: rows of ranks 0..r."""
        native = self._native
        if isinstance(native, InternodeHandle):
            return native.recv_gbl_rank_prefix_sum
        matrix = native.rank_prefix_matrix
        return self._field("psum_source", lambda: matrix[:, self._rank].contiguous())

    @property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> Tensor:
        """int32 [S]: rows from scale-up ranks 0..s of any scale-out rank; the last is the number
        that arrived. With one scale-out rank also where each rank's rows end."""
        if self._num_scaleup_ranks == self._native.num_ranks:
            return self._ends_by_source
        return self._field("psum_scaleup", self._psum_per_scaleup_rank)

    def _psum_per_scaleup_rank(self) -> Tensor:
        ends = self._ends_by_source
        per_source = torch.diff(ends, prepend=ends.new_zeros(1))
        per_scaleup_rank = per_source.view(-1, self._num_scaleup_ranks).sum(0)
        return per_scaleup_rank.cumsum(0, dtype=torch.int32)

    @property
    def psum_num_recv_tokens_per_expert(self) -> Tensor:
        """int32 [L]. Compact: sum of the aligned counts of experts 0..e. Expanded: end of the real
        rows of expert e."""
        return self._field(_PSUM_PER_EXPERT, self._psum_per_expert)

    def _psum_per_expert(self) -> Tensor:
        counts = self.num_unaligned_recv_tokens_per_expert
        padded = expand.aligned(counts, self.expert_alignment)
        ends = padded.cumsum(0, dtype=torch.int32)
        return ends - padded + counts if self.do_expand else ends

    @property
    def recv_src_metadata(self) -> Tensor:
        """int32 [N, K + 2]: source rank * num_max_tokens_per_rank + source token; source rank; then
        for each selection its expanded row, or -1. Rows that did not arrive hold -1.

        Expanded combine reads the last K columns: callers that have summed rows themselves may
        rewrite them in place. The whole may be set as well, with as many rows as arrived or more;
        combine then takes x with as many rows too.
        """
        self._is_metadata_lent = True
        return self._field(_METADATA, self._metadata)

    @recv_src_metadata.setter
    def recv_src_metadata(self, metadata: Tensor) -> None:
        num_columns = self.topk_idx.shape[1] + 2
        if metadata.dtype != torch.int32 or metadata.shape[1:] != (num_columns,):
            raise ArgumentError(
                "recv_src_metadata", f"{metadata.dtype} {list(metadata.shape)}",
                f"must be int32 of shape [rows, {num_columns}]",
            )  # fmt: skip
        self._is_metadata_lent = True
        self._fields[_METADATA] = metadata

    @property
    def dst_buffer_slot_idx(self) -> Tensor:
        """int32 [T, K]: this rank * num_max_tokens_per_rank + the token's place among those sent to
        the selection's rank; at the last of its selections there, else -1.

        Computed at each access.
        """
        native = self._native
        owners = expand.owners(self.topk_idx, self.num_experts, native.num_ranks)
        places = native.is_token_in_rank.cumsum(0) - 1
        slots = self._rank * self.num_max_tokens_per_rank + places.gather(1, owners.clamp(min=0))
        return torch.where(expand.is_last_at_owner(owners), slots, -1).to(torch.int32)

    def _metadata(self) -> Tensor:
        slots = self.dispatched_slots
        num_recv, num_topk = slots.shape
        ends = self._ends_by_source
        rows = torch.arange(num_recv, dtype=torch.int32, device=ends.device)
        source = torch.searchsorted(ends, rows, right=True, out_int32=True)
        arrived = rows < ends[-1]
        tokens = self._native.recv_src_idx
        assert tokens is not None
        token = source * self.num_max_tokens_per_rank + tokens[:num_recv]
        metadata = torch.empty(num_recv, num_topk + 2, dtype=torch.int32, device=ends.device)
        metadata[:, 0] = torch.where(arrived, token, -1)
        metadata[:, 1] = torch.where(arrived, source, -1)
        metadata[:, 2:] = slots
        return metadata


_PSUM_PER_EXPERT = "psum_expert"
_METADATA = "metadata"
