"""How an expanded dispatch has laid out its rows: grouped by local expert, for grouped GEMMs."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from deep_comm import _core


class NumberingLayout(NamedTuple):
    """Parts of the memory that the rows of an expanded dispatch are numbered in, in int32: see
    csrc/host/numbering_layout.hpp."""

    expert_offsets: int
    expert_counts: int
    num_expanded: int
    first_rows: int
    send_row: int
    send_rows: int
    num_words: int


@functools.lru_cache(maxsize=256)
def numbering_layout(
    num_ranks: int, num_experts: int, num_local_experts: int, num_tokens: int, num_topk: int
) -> NumberingLayout:
    offsets = _core.Engine.numbering_layout(
        num_ranks=num_ranks,
        num_experts=num_experts,
        num_local_experts=num_local_experts,
        num_tokens=num_tokens,
        num_topk=num_topk,
    )
    return NumberingLayout(*(offset // 4 for offset in offsets))


def _made_later() -> Any:
    """None, but not as an attribute of the class, which would hide what __getattr__ makes."""
    return field(default_factory=lambda: None)


class _Rows(Protocol):
    """recv_rows, in the receive region."""

    address: int
    num_rows: int
    num_columns: int

    def tensor(self) -> Tensor: ...


class _Fresh:
    """Where the parts of an Expansion lie that no tensor has been made of."""

    __slots__ = ("layout", "num_ranks", "num_tokens", "recv_rows", "storage")

    def __init__(
        self, storage: Tensor, layout: NumberingLayout, num_ranks: int, num_tokens: int
    ) -> None:
        self.storage = storage
        self.layout = layout
        self.num_ranks, self.num_tokens = num_ranks, num_tokens
        self.recv_rows: _Rows | None = None

    def tensor(self, name: str) -> Tensor | None:
        layout, storage = self.layout, self.storage
        if name == "send_row":
            shape = self.num_tokens, self.num_ranks
            return storage.narrow(0, layout.send_row, shape[0] * shape[1]).view(shape)
        if name == "num_expanded":
            return storage.narrow(0, layout.num_expanded, self.num_ranks)
        if name == "recv_rows" and self.recv_rows is not None:
            return self.recv_rows.tensor()
        return None

    def tensors(self, recv_rows: Tensor | None) -> tuple[Tensor, ...]:
        return (self.storage,) if recv_rows is None else (self.storage, recv_rows)


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
    # int32 [T, R]: first row of a token at each rank, or -1
    send_row: Tensor | None = _made_later()
    num_expanded: Tensor | None = _made_later()  # int32 [R]: rows that each rank's output needs
    _fresh: ClassVar[_Fresh | None] = None

    @classmethod
    def fresh(
        cls,
        storage: Tensor,
        layout: NumberingLayout,
        num_ranks: int,
        num_tokens: int,
        **others: Any,
    ) -> Expansion:
        """Of rows that have been numbered in ``storage``: tensors that few programs look at are
        made when they are asked for. ``others``: the other fields; without recv_rows and num_rows,
        ``complete`` is to follow."""
        expansion = object.__new__(cls)
        held = expansion.__dict__
        held.update(others)
        held["_fresh"] = _Fresh(storage, layout, num_ranks, num_tokens)
        return expansion

    def complete(self, num_rows: int, recv_rows: _Rows) -> None:
        """Of one that nobody has seen."""
        held = self.__dict__
        held["num_rows"] = num_rows
        held["_fresh"].recv_rows = recv_rows

    def __getattr__(self, name: str) -> Any:
        """Called for what is missing: the tensors of a fresh one."""
        fresh = self.__dict__.get("_fresh")
        tensor = None if fresh is None else fresh.tensor(name)
        if tensor is None:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        self.__dict__[name] = tensor
        return tensor

    def __getstate__(self) -> dict[str, Any]:
        """For copies: with all tensors, without what belongs to this one."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    def numbers(self) -> tuple[int, ...] | None:
        """What calls in one native step want of it, in the order of KnownExpansion
        (csrc/bind/quick_forms.hpp); None: they go step by step."""
        fresh = self._fresh
        num_local = self.expert_counts.shape[0]
        if fresh is not None and fresh.recv_rows is not None:
            base, layout, rows = fresh.storage.data_ptr(), fresh.layout, fresh.recv_rows
            return (
                base + 4 * layout.send_row, base + 4 * layout.num_expanded, rows.address,
                base + 4 * layout.expert_offsets, base + 4 * layout.expert_counts,
                rows.num_columns, num_local, rows.num_rows,
            )  # fmt: skip
        send_row, num_expanded, recv_rows = self.send_row, self.num_expanded, self.recv_rows
        if send_row is None or num_expanded is None:
            return None
        parts = send_row, num_expanded, recv_rows, self.expert_offsets, self.expert_counts
        if not all(part.data_ptr() != 0 and part.is_contiguous() for part in parts):
            return None
        num_tokens, num_topk = recv_rows.shape
        return (*(part.data_ptr() for part in parts), num_topk, num_local, num_tokens)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of torch's memory in it."""
        fresh = self._fresh
        if fresh is not None:
            return fresh.tensors(self.__dict__.get("recv_rows"))
        parts = (
            self.expert_offsets,
            self.expert_counts,
            self.recv_rows,
            self.send_row,
            self.num_expanded,
        )
        return tuple(part for part in parts if part is not None)
