"""Memory that an NVLink switch reaches on all GPUs at once: torch's symmetric memory.

torch makes the multicast object; nothing here speaks to the driver. Hosts that are shared forbid
such objects, so torch is asked for nothing, on any rank, before all may have one: see ``refusal``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed._symmetric_memory as torch_symmetric
from torch._C._autograd import DeviceType
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed import ProcessGroup

from deep_comm.backends import in_process
from deep_comm.backends.base import Heap
from deep_comm.errors import UnsupportedError
from deep_comm.ranks.rendezvous import Rendezvous

_LINE = 128  # bytes; what a heap holds begins at multiples
_FORBIDS = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


def refusal(group: object, device: torch.device, has_kernels: bool) -> str:
    """Why torch must not be asked for such memory; empty if it may.

    Args:
        group: of all ranks.
        has_kernels: the build has code with multicast for the device.
    """
    if os.environ.get(_FORBIDS) == "1":  # as torch reads it
        return f"{_FORBIDS}=1 forbids it"
    if not isinstance(group, ProcessGroup):
        return "the group is not one of torch.distributed, whose symmetric memory it is"
    if not has_kernels:
        return f"the kernels for {device} have no multicast, which begins with sm_90"
    return ""


class MulticastHeap(Heap):
    """Peers' parts are mapped by torch, and all of them at one address more."""

    def __init__(
        self, rendezvous: Rendezvous, device: torch.device, num_bytes: int, has_kernels: bool
    ) -> None:
        self.device, self.num_bytes = device, num_bytes
        self._kept: list[Any] = []  # the memory, and torch's handle of all ranks'
        group: Any = rendezvous.process_group

        def lack() -> str:
            has_it = _SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index)
            return "" if has_it else f"{device} or its driver has no multicast"

        def create() -> None:
            # An allocation of its own: peers reckon from its start.
            memory = in_process.allocated(
                num_bytes,
                lambda: _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device),
            )
            memory.zero_()
            torch.cuda.synchronize(device)
            self._kept.append(memory)

        def attach() -> str:
            try:
                self._kept.append(torch_symmetric.rendezvous(self._kept[0], group))
            except RuntimeError as error:
                return f"torch could not share the memory: {error}"
            if self._kept[0].data_ptr() % _LINE:
                return f"torch's memory does not begin at a multiple of {_LINE} bytes"
            return "" if self._kept[1].multicast_ptr else "torch could set up no multicast"

        try:
            _require(rendezvous, lambda: refusal(group, device, has_kernels))
            _require(rendezvous, lack)
            rendezvous.all_gather_result("allocate its heap", create)
            _require(rendezvous, attach)
        except BaseException:
            self.close()
            raise
        memory, shared = self._kept
        self.base = memory.data_ptr()
        self.peer_bases: Sequence[int] = list(shared.buffer_ptrs)
        self.multicast_base = shared.multicast_ptr

    def memory(self) -> object:
        return self._kept[0]

    def rail_arguments(self, peers: Sequence[int]) -> dict[str, Any]:
        raise UnsupportedError("memory with multicast serves one node")

    def stores_reach(self, peers: Sequence[int]) -> bool:
        raise UnsupportedError("memory with multicast serves one node")

    def close(self) -> None:
        self._kept = []


def _require(rendezvous: Rendezvous, reason: Callable[[], str]) -> None:
    for rank, found in enumerate(rendezvous.all_gather_result("set up multicast", reason)):
        if found:
            raise UnsupportedError(f"multicast=True cannot be had: on rank {rank} {found}")
