"""``buffer.runtime`` of DeepEP: the questions that callers put to the native object."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from deep_comm.buffer import Buffer

# What the native object has under the Buffer's own name, with its arguments by position.
_OF_THE_BUFFER = frozenset(
    (
        "clean_low_latency_buffer",
        "get_next_low_latency_combine_buffer",
        "low_latency_update_mask_buffer",
        "low_latency_query_mask_buffer",
        "low_latency_clean_mask_buffer",
    )
)
# What it has with arguments of its own, or for finding its peers.
_NOT_OFFERED = frozenset(
    (
        "get_dispatch_layout",
        "intranode_dispatch",
        "intranode_combine",
        "internode_dispatch",
        "internode_combine",
        "low_latency_dispatch",
        "low_latency_combine",
        "get_local_ipc_handle",
        "get_local_nvshmem_unique_id",
        "sync",
    )
)


class Runtime:
    """What DeepEP's native object answers about ranks, memory and masks. Moves no data."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = weakref.ref(buffer)

    def _get(self) -> Buffer:
        buffer = self._buffer()
        if buffer is None:
            raise ReferenceError("the Buffer of this runtime is gone")
        return buffer

    def __getattr__(self, name: str) -> Any:
        if name in _OF_THE_BUFFER:
            return getattr(self._get(), name)
        if name in _NOT_OFFERED:
            raise AttributeError(
                f"buffer.runtime.{name} is a call of DeepEP's native object, which deep_comm has "
                "not: call the Buffer's own methods"
            )
        raise AttributeError(f"'Runtime' object has no attribute '{name}'")

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
