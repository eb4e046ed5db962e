"""Buffers of a vLLM worker: one for each set of sizes, as long as a layer holds it."""

from __future__ import annotations

import abc
import os
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

import deep_comm
from deep_comm import log
from deep_comm.compat.elastic_sizes import topology_of
from deep_comm.errors import ArgumentError, UnsupportedError
from deep_comm.integrations.vllm import interface as vllm
from deep_comm.integrations.vllm.normal import destroy_decode_buffers
from deep_comm.ranks.topology import Topology

_DEFAULT_MEBIBYTES = 1024


def _buffer_bytes() -> int:
    """vLLM's own variable for the size of these buffers, in MiB."""
    text = os.environ.get("VLLM_DEEPEP_BUFFER_SIZE_MB", str(_DEFAULT_MEBIBYTES))
    try:
        return int(text) << 20
    except ValueError:
        raise ArgumentError("VLLM_DEEPEP_BUFFER_SIZE_MB", text, "must be a number") from None


class DeepCommAll2AllManager(vllm.All2AllManagerBase, abc.ABC):  # type: ignore[misc]
    """Hands out Buffers; dispatch and combine are the modular kernels' alone."""

    def __init__(
        self, cpu_group: Any, tcp_store_group: Any = None, device_group: Any = None
    ) -> None:
        """``cpu_group``: the expert-parallel ranks, over gloo."""
        super().__init__(cpu_group, tcp_store_group)
        self._buffers: weakref.WeakValueDictionary[Any, deep_comm.Buffer] = (
            weakref.WeakValueDictionary()
        )
        self._lock = threading.RLock()
        self._topology: Topology | None = None

    @property
    def topology(self) -> Topology:
        """Collective when it is first asked for: with the first Buffer."""
        if self._topology is None:
            self._topology = topology_of(self.cpu_group)
        return self._topology

    @abc.abstractmethod
    def buffer_arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the Buffer for the sizes that a layer names."""

    def get_handle(self, kwargs: dict[str, Any]) -> deep_comm.Buffer:
        """The Buffer for these sizes. Collective when it is made."""
        arguments = self.buffer_arguments(kwargs)
        key = tuple(sorted(arguments.items()))
        with self._lock:
            buffer = self._buffers.get(key)
            if buffer is None:
                with log.used_by("vLLM's native adapter"):
                    buffer = deep_comm.Buffer(self.cpu_group, **arguments)
                self._buffers[key] = buffer
            return buffer

    def set_num_sms(self, num_sms: int) -> None:
        """SMs of normal mode from now on; fewer leave more to the other micro-batch."""
        deep_comm.Buffer.set_num_sms(max(1, num_sms))

    def max_sms_used(self) -> int | None:
        return deep_comm.Buffer.num_sms

    def dispatch_router_logits(self, *args: Any, **options: Any) -> Any:
        raise UnsupportedError("router logits do not travel: use the modular kernels")

    def dispatch(self, *args: Any, **options: Any) -> Any:
        raise UnsupportedError("tokens travel by the modular kernels' prepare and finalize")

    def combine(self, hidden_states: Tensor, is_sequence_parallel: bool = False) -> Tensor:
        raise UnsupportedError("tokens travel by the modular kernels' prepare and finalize")

    def query_active_mask(self) -> Tensor:
        raise UnsupportedError("no rank is masked out: fault tolerance is low latency's alone")

    def clean_buffers(self) -> None:
        """Nothing needs cleaning between calls."""

    def destroy(self) -> None:
        """Waits for no peer."""
        with self._lock:
            for buffer in list(self._buffers.values()):
                destroy_decode_buffers(buffer)
                buffer.destroy()
            self._buffers.clear()


class NormalManager(DeepCommAll2AllManager):
    """For NormalPrepareFinalize. Sizes may name what decoding needs; {} is prefill alone."""

    def buffer_arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        num_bytes = _buffer_bytes()
        # Between nodes as much again, as vLLM gives DeepEP.
        num_rdma_bytes = num_bytes if self.topology.num_nodes > 1 else 0
        arguments: dict[str, Any] = {"num_nvl_bytes": num_bytes, "num_rdma_bytes": num_rdma_bytes}
        if kwargs:
            arguments.update(_low_latency_arguments(kwargs, self.topology))
            arguments["num_rdma_bytes"] = max(num_rdma_bytes, arguments["num_rdma_bytes"])
        return arguments


class LowLatencyManager(DeepCommAll2AllManager):
    """For LowLatencyPrepareFinalize.

    If vLLM is fault-tolerant, calls do without ranks that fall silent, and vLLM asks after every
    step whether one did. It asks the manager that it made last, about the Buffer made last.
    """

    def __init__(
        self, cpu_group: Any, tcp_store_group: Any = None, device_group: Any = None
    ) -> None:
        super().__init__(cpu_group, tcp_store_group, device_group)
        self.support_fault_tolerance = vllm.is_fault_tolerant()
        self._last: weakref.ref[deep_comm.Buffer] | None = None
        self._mask: Tensor | None = None
        self._known: Tensor | None = None  # of the mask, what vLLM has dealt with

    def buffer_arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {
            "num_nvl_bytes": 0,
            "enable_shrink": self.support_fault_tolerance,
            **_low_latency_arguments(kwargs, self.topology, self.support_fault_tolerance),
        }

    def get_handle(self, kwargs: dict[str, Any]) -> deep_comm.Buffer:
        buffer = super().get_handle(kwargs)
        self._last = weakref.ref(buffer)
        return buffer

    def query_active_mask(self) -> Tensor:
        """int32 [R] on the Buffer's device: 1 for ranks that are masked out. Waits for nothing.

        Raises UnsupportedError unless vLLM is fault-tolerant, or before there is a Buffer.
        """
        buffer = self._last() if self._last is not None else None
        if buffer is None or not self.support_fault_tolerance:
            raise UnsupportedError("no rank is masked out: fault tolerance is off, or no Buffer")
        if self._mask is None:
            self._mask = torch.zeros(self.world_size, dtype=torch.int32, device=buffer.device)
        buffer.low_latency_query_mask_buffer(self._mask)
        return self._mask

    def query_fault(self) -> Tensor:
        """A bool: is any rank masked out that was not when the last fault was dealt with?"""
        mask = self.query_active_mask()
        if self._known is None:
            self._known = torch.zeros_like(mask)
        return (mask != self._known).any()

    def clean_buffers(self) -> None:
        """After a fault: all ranks take part again. Collective; nothing to zero."""
        buffer = self._last() if self._last is not None else None
        if buffer is not None and self.support_fault_tolerance:
            buffer.low_latency_clean_mask_buffer()
        self._known = None

    def max_sms_used(self) -> int | None:
        """None are held between send and receive."""
        return 0


def _low_latency_arguments(
    kwargs: dict[str, Any], topology: Topology, enable_shrink: bool = False
) -> dict[str, Any]:
    names = {
        "max_num_tokens_per_dp_rank",
        "token_hidden_size",
        "num_ep_ranks",
        "num_global_experts",
    }
    missing = names - kwargs.keys()
    if missing:
        raise ArgumentError("kwargs", sorted(kwargs), f"must name {sorted(missing)}")
    num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(
        kwargs["max_num_tokens_per_dp_rank"],
        kwargs["token_hidden_size"],
        kwargs["num_ep_ranks"],
        kwargs["num_global_experts"],
        ranks_per_node=topology.ranks_per_node,
        enable_shrink=enable_shrink,
    )
    return {"num_rdma_bytes": num_bytes, "low_latency_mode": True}
