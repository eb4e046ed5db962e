"""What a Buffer is built with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deep_comm.settings import checks, integers

if TYPE_CHECKING:
    import torch

# Rings that keep the links busy at any number of SMs; a larger buffer is better
# used as receive region.
RING_BYTES = 64 << 20

# Kernels whose steps are kept; those of one take 640 KiB.
_MOST_TRACE_CALLS = 4096


@dataclass(frozen=True)
class Settings:
    """Equal on all ranks but for the device's index and timeout."""

    num_nvl_bytes: int
    num_direct_bytes: int | None
    num_max_experts: int
    ranks_per_node: int | None
    device: torch.device | str | int | None
    timeout_s: float
    version: str
    low_latency_bytes: int = 0  # of the low-latency region
    enable_shrink: bool = False
    num_rdma_bytes: int = 0  # for rings between nodes, if there are several
    num_qps: int = 24  # queues to each node
    rail: str | None = None  # see deep_comm.ranks.rail
    trace_calls: int = 0  # see deep_comm.trace; may differ between ranks
    multicast: bool = False  # see SymmetricMemory
    has_words: bool = False  # whose kernels run on the callers' streams, as low-latency ones
    # What the other sizes were made of, by the caller's names: compared first.
    agreed: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        integers.require("num_nvl_bytes", self.num_nvl_bytes, 0, integers.MOST_BYTES)
        checks.max_experts("num_max_experts", self.num_max_experts)
        if self.num_direct_bytes is not None:
            integers.require(
                "num_direct_bytes", self.num_direct_bytes, 0, self.num_nvl_bytes,
                note=" (num_nvl_bytes)",
            )  # fmt: skip
        checks.timeout_s("timeout_s", self.timeout_s)
        integers.require("trace", self.trace_calls, 0, _MOST_TRACE_CALLS)

    def direct_bytes(self) -> int:
        """Size of the receive region: what is asked for, else what small rings leave of
        num_nvl_bytes.
        """
        if self.num_direct_bytes is not None:
            return self.num_direct_bytes
        if self.num_nvl_bytes < 2 * RING_BYTES:
            return 0
        return self.num_nvl_bytes - RING_BYTES
