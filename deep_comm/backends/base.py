"""What a target offers to a Buffer: memory that peers reach, an engine, streams."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from deep_comm.backends.foreign import tensor_at
from deep_comm.events import EventHandle
from deep_comm.ranks.rendezvous import Rendezvous
from deep_comm.ranks.topology import Topology

if TYPE_CHECKING:
    from deep_comm import _core

TensorsEventMaker = Callable[..., EventHandle]
"""(event, tensors, the stream that owns these): of a call on the communication stream."""

EXCHANGE_API: object = getattr(Tensor, "__dlpack_c_exchange_api__", None)
"""DLPack's, for native code; None: this torch has none, and its attributes serve."""


class Heap(abc.ABC):
    """One allocation per rank, equally large everywhere, and every peer's address of it."""

    device: torch.device
    base: int
    num_bytes: int
    peer_bases: Sequence[int]
    multicast_base: int = 0  # stands for every rank's base at once; 0: there is no such address

    @abc.abstractmethod
    def memory(self) -> object:
        """What keeps this rank's part."""

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> Tensor:
        """A tensor over this rank's part, which lives as long as the tensor."""
        return tensor_at(self.base + offset, shape, self.device, self.memory(), dtype)

    @abc.abstractmethod
    def rail_arguments(self, peers: Sequence[int]) -> dict[str, Any]:
        """What Engine.enable_internode is told of the rail's peers, given as ranks."""

    @abc.abstractmethod
    def stores_reach(self, peers: Sequence[int]) -> bool:
        """Whether all rows for these ranks are stored there. Else some are put, and a NIC may
        still read them when their kernel has ended."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of the peers' parts and of this rank's own. Never waits for a peer. Idempotent."""


class Backend(Protocol):
    """One target on one device, for one Buffer."""

    device: torch.device
    unique_device: str | None  # which GPU of the world; None: ranks may share the device
    is_synchronous: bool  # kernels have ended when an engine call returns
    max_sms: int | None  # blocks that can run at once; None: no limit
    streams: object  # of the device, for native code: see _core.streams
    framework: _core.Framework  # torch, for native code
    order: _core.StreamOrder  # of the Buffer's calls
    tensors_event: TensorsEventMaker | None  # None: there are no streams

    def create_heap(
        self,
        rendezvous: Rendezvous,
        num_bytes: int,
        topology: Topology,
        rail: str | None,
        num_qps: int,
        multicast: bool,
    ) -> Heap:
        """Where ``rail`` (see deep_comm.ranks.rail) has its memory, or with a multicast_base.
        Collective. Raises on every rank if it fails on one.
        """

    def create_engine(self, rendezvous: Rendezvous, **arguments: Any) -> _core.Engine:
        """Of this rank and the others of its node, with these arguments of Engine and the
        target's own."""

    def comm_stream(self) -> torch.cuda.Stream:
        """Raises UnsupportedError on the host target."""

    def mark(self) -> _core.Event | None:
        """At this point of the current stream; None: nothing can be in flight."""

    def is_capturing(self) -> bool:
        """The current stream is recording a CUDA graph."""

    def synchronize(self) -> None:
        """Wait for everything launched so far; bounded, since kernels are."""

    def device_scope(self) -> AbstractContextManager[object]:
        """Makes the device current."""
