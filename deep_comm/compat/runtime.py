"""``buffer.runtime`` of DeepEP: the questions that callers put to the native object."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from deep_comm.buffer import Buffer


class Runtime:
    """What DeepEP's native object answers about ranks and memory. Moves no data."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = weakref.ref(buffer)

    def _get(self) -> Buffer:
        buffer = self._buffer()
        if buffer is None:
            raise ReferenceError("the Buffer of this runtime is gone")
        return buffer

    def is_available(self) -> bool:
        return True

    def get_num_rdma_ranks(self) -> int:
        """Nodes."""
        return int(self._get()._context.topology.num_nodes)

    def get_rdma_rank(self) -> int:
        """This rank's node."""
        buffer = self._get()
        return int(buffer._context.topology.node(buffer.rank))

    def get_root_rdma_rank(self, is_global: bool) -> int:
        buffer = self._get()
        return int(buffer.rank % buffer._context.topology.ranks_per_node) if is_global else 0

    def get_local_device_id(self) -> int:
        """Of the CUDA device; the rank on the host target."""
        buffer = self._get()
        return int(buffer.rank if buffer.device.index is None else buffer.device.index)

    def get_comm_stream(self) -> torch.cuda.Stream:
        return self._get().get_comm_stream()

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, offset: int = 0, use_rdma_buffer: bool = False
    ) -> Tensor:
        """``offset`` in elements."""
        return self._get().get_local_buffer_tensor(
            dtype, offset=offset, use_rdma_buffer=use_rdma_buffer
        )

    def destroy(self) -> None:
        self._get().destroy()
