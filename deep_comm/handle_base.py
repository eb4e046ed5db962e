"""What the handles of both tiers share: a sequence of tensors, made by one rank of one group."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, overload

from torch import Tensor

from deep_comm.expansion import Expansion

if TYPE_CHECKING:
    from deep_comm._core import DispatchRecord


def made_later(default: Any = None) -> Any:
    """A field that is None, or ``default``, in handles of tensors. Not as an attribute of the
    class, which would hide what TensorSequence.__getattr__ makes.
    """
    return field(default_factory=lambda: default, kw_only=True)


@dataclass(frozen=True, eq=False, kw_only=True)
class TensorSequence(Sequence[Tensor]):
    """The tensors that DeepEP's callers know by position are fields of each kind of handle, in that
    order; those here, by name alone, describe the dispatch.

    A handle is either a view of what a dispatch recorded, ``_record``, or made of tensors; the
    first call that takes those makes a record of them.
    """

    _SIZE: ClassVar[int]
    _record: ClassVar[DispatchRecord | None] = None

    rank: int | None = made_later()
    num_experts: int | None = made_later()
    num_topk: int | None = made_later()
    num_recv_tokens: int | None = made_later()
    max_num_tokens: int | None = made_later()
    num_recv_tokens_per_expert: Tensor | None = made_later()
    num_recv_tokens_tensor: Tensor | None = made_later()
    num_recv_tokens_per_rank: Tensor | None = made_later()
    members: tuple[str, ...] | None = made_later()
    expansion: Expansion | None = made_later()
    owner_stream: int | None = field(default_factory=lambda: None, repr=False)

    def __getattr__(self, name: str) -> Any:
        """Called for what is missing: the fields of a view."""
        if name.startswith("_") or self._record is None or name not in self.__dataclass_fields__:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        if name == "expansion":
            value: Any = Expansion.of(self._record) if self._record.is_expanded else None
        else:
            value = self._record.field(name)
        self.__dict__[name] = value
        return value

    def __getstate__(self) -> dict[str, Any]:
        """For copies: with all tensors, without what belongs to this one."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    @abc.abstractmethod
    def as_tuple(self) -> tuple[Tensor, ...]:
        """The tensors, in the order of DeepEP's handle."""

    @property
    @abc.abstractmethod
    def num_channels(self) -> int: ...

    @property
    @abc.abstractmethod
    def num_recv_rows(self) -> int: ...

    @property
    def num_output_rows(self) -> int:
        """Rows that dispatch returned and combine takes: those received, or the M of an expanded
        dispatch."""
        return self.num_recv_rows if self.expansion is None else self.expansion.num_rows

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Tensor, ...]: ...
    def __getitem__(self, index: int | slice) -> Tensor | tuple[Tensor, ...]:
        return self.as_tuple()[index]

    def __len__(self) -> int:
        return self._SIZE

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.as_tuple())
