"""How an expanded dispatch has laid out its rows: grouped by local expert, for grouped GEMMs."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

if TYPE_CHECKING:
    from deep_comm._core import DispatchRecord


@dataclass(frozen=True, eq=False)
class Expansion:
    """The layout of one rank's expanded output, part of its Handle or InternodeHandle.

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
    _record: ClassVar[DispatchRecord | None] = None

    @classmethod
    def of(cls, record: DispatchRecord) -> Expansion:
        """A view of an expanded dispatch."""
        expansion = object.__new__(cls)
        expansion.__dict__["_record"] = record
        return expansion

    def __getattr__(self, name: str) -> Any:
        """Called for what is missing: the fields of a view."""
        if name.startswith("_") or self._record is None or name not in self.__dataclass_fields__:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        value = self.__dict__[name] = self._record.field(name)
        return value

    def __getstate__(self) -> dict[str, Any]:
        """For copies: with all tensors, without what belongs to this one."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

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
