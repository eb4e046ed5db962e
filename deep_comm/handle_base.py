"""What the handles of both tiers share: a sequence of tensors, made by one rank of one group."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, overload

import torch
from torch import Tensor

from deep_comm.absent import SINCE_THE_RESET, differ_in_absence
from deep_comm.errors import ArgumentError, HandleMismatch

if TYPE_CHECKING:
    from deep_comm.expansion import Expansion


class HeldTensors:
    """What calls of a Buffer know of a handle's memory.

    Attributes: ``tensors``: torch's in the handle; ``home_stream``: whose memory they are; without
    any, or None, nobody need be told who uses the handle.
    """

    __slots__ = ("_recorded_on", "home_stream", "tensors")

    def __init__(self, tensors: tuple[Tensor, ...], home_stream: int | None) -> None:
        self.tensors = tensors
        self.home_stream = home_stream if tensors else None
        self._recorded_on: set[int] = set()  # streams whose use torch knows of

    def record_on(self, stream: torch.cuda.Stream, raw_stream: int) -> None:
        """Tell torch's allocator that ``stream`` uses the handle; it remembers that as
        long as the memory is in use.
        """
        if raw_stream not in self._recorded_on:
            for tensor in self.tensors:
                if tensor.numel() > 0:
                    tensor.record_stream(stream)
            self._recorded_on.add(raw_stream)


class FreshParts(Protocol):
    """Where the parts of a handle lie that no tensor has been made of."""

    def tensor(self, name: str) -> Tensor | None:
        """A part by its name in the handle; None: there is none."""


def made_later() -> Any:
    """None, but not as an attribute of the class, which would hide what
    TensorSequence.__getattr__ makes.
    """
    return field(default_factory=lambda: None)


@dataclass(frozen=True, eq=False, kw_only=True)
class TensorSequence(Sequence[Tensor]):
    """The tensors that DeepEP's callers know by position are fields of each kind of handle, in that
    order; those here, by name alone, describe the dispatch. Tensors of a handle that has ``_fresh``
    are made when they are asked for."""

    _KINDS: ClassVar[tuple[tuple[torch.dtype, int], ...]]  # (dtype, dimensions) of each
    _MADE_BY: ClassVar[str] = "dispatch"
    _SMS_OF_CHANNELS: ClassVar[str] = "num_sms"
    _native: ClassVar[object] = None  # of one that a native step has made: see Handle

    rank: int | None = None
    num_experts: int | None = None
    num_topk: int | None = None
    num_recv_tokens: int | None = None
    max_num_tokens: int | None = None
    num_recv_tokens_per_expert: Tensor | None = made_later()
    num_recv_tokens_tensor: Tensor | None = made_later()
    num_recv_tokens_per_rank: Tensor | None = made_later()
    members: tuple[str, ...] | None = None
    expansion: Expansion | None = None
    home_stream: int | None = field(default=None, repr=False)

    def __getattr__(self, name: str) -> Any:
        """Called for what is missing: the tensors of a fresh handle."""
        fresh: FreshParts | None = self.__dict__.get("_fresh")
        tensor = None if fresh is None else fresh.tensor(name)
        if tensor is None:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        self.__dict__[name] = tensor
        return tensor

    def __getstate__(self) -> dict[str, Any]:
        """For copies: with all tensors, without what belongs to this one."""
        state = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {**state, "_known": None}

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
        return len(self._KINDS)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.as_tuple())

    @classmethod
    def _checked(cls, value: Any) -> Any:
        """``value``, if it is a tuple or list of such tensors; ArgumentError for anything else."""
        if not isinstance(value, (tuple, list)) or len(value) != len(cls._KINDS):
            given = f"{type(value).__name__}"
            if isinstance(value, (tuple, list)):
                given += f" of {len(value)} items"
            raise ArgumentError("handle", given, f"must be what {cls._MADE_BY} returned")
        for position, (tensor, (dtype, num_dims)) in enumerate(zip(value, cls._KINDS, strict=True)):
            if not (
                isinstance(tensor, Tensor)
                and tensor.dtype == dtype
                and tensor.dim() == num_dims
                and tensor.is_contiguous()
            ):
                raise ArgumentError(
                    f"handle[{position}]",
                    type(tensor).__name__,
                    f"must be a contiguous {num_dims}-D tensor of {dtype}",
                )
        return value

    def _require_owner(self, rank: int, members: tuple[str, ...], device: torch.device) -> None:
        """Raise HandleMismatch unless the handle was made by this rank, of these members."""
        if self.rank is not None and self.rank != rank:
            raise HandleMismatch("handle", f"rank {self.rank}", f"must be of this rank ({rank})")
        if self.members is not None and differ_in_absence(self.members, members):
            raise HandleMismatch(
                "handle",
                "one of a dispatch with other ranks absent",
                SINCE_THE_RESET,
            )
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
                f"must have the config's {num_channels} channels ({self._SMS_OF_CHANNELS}); "
                "leave config away to take the handle's",
            )
