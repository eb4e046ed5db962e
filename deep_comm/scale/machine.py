"""The machines of the model: rates in GB/s (10^9 bytes a second), times in microseconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """One node's GPUs and their NICs, all alike.

    Attributes:
        nic_gb_per_s: one GPU's NIC, in either direction.
        nic_latency_us: from a put's last byte leaving to its signal being
            seen by the peer's kernel.
        nic_message_us: a NIC handles no message in less.
        nvlink_gb_per_s: one GPU's NVLink for rows of kernels, in either direction.
        nvlink_latency_us: of a flag between GPUs of a node.
        sm_gb_per_s: what the warps of one SM copy, read and written once.
        call_us: a kernel over both tiers without rows: launch, entry barrier, exit.
        low_latency_us: a low-latency operation without its bytes: launch, quantising, flags,
            and the way of one message.
    """

    name: str
    nic_gb_per_s: float
    nvlink_gb_per_s: float
    nic_latency_us: float = 5.0
    nic_message_us: float = 0.05
    nvlink_latency_us: float = 1.3
    sm_gb_per_s: float = 33.0
    call_us: float = 40.0
    low_latency_us: float = 37.0


# Two numbers are fitted, each to one published figure (published.py): NVLink to dispatch on 8
# ranks, low_latency_us to low-latency dispatch on 16. The NIC has its line rate.
H800 = Machine("H800, ConnectX-7", nic_gb_per_s=50.0, nvlink_gb_per_s=142.0)

# NVLink as measured (docs/performance.md); the rest as above: nothing of this
# engine has run on a NIC yet.
H200 = Machine("H200, ConnectX-7", nic_gb_per_s=50.0, nvlink_gb_per_s=371.0)

MACHINES = {"h800": H800, "h200": H200}
