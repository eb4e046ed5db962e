"""How an expanded dispatch has laid out its rows: grouped by local expert, for grouped GEMMs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Expansion:
    """The layout of one rank's expanded output, part of its Handle or InternodeHandle.

    N received tokens, L local experts, K top-k, R ranks, T tokens of this rank, M rows of the
    output. A received token has one row for each of its selections here. The rows of local expert e
    are ``expert_offsets[e]`` to ``expert_offsets[e] + expert_counts[e]``, by (source rank, source
    token, selection); what follows up to ``expert_offsets[e + 1]``, and from ``expert_offsets[L]``
    to M, belongs to no token.
    """

    expert_offsets: Tensor  # int32 [L + 1]: starts of the groups, multiples of the alignment
    expert_counts: Tensor  # int32 [L]: rows of a group without padding
    recv_rows: Tensor  # int32 [N, K]: row of a token's selection, or -1: not on this rank
    num_rows: int  # M
    expert_alignment: int
    # Between nodes None: rows are placed by the rank that has them.
    send_row: Tensor | None = None  # int32 [T, R]: first row of a token at each rank, or -1
    num_expanded: Tensor | None = None  # int32 [R]: rows that the output of each rank needs

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        parts = (
            self.expert_offsets,
            self.expert_counts,
            self.recv_rows,
            self.send_row,
            self.num_expanded,
        )
        return tuple(part for part in parts if part is not None)
