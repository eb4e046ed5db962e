"""The GPU target: the same Engine as in `_core`, launching on CUDA, and the memory it works in.

Streams are ``cudaStream_t`` as ``int``. The caller makes the right device
current before every call.
"""

from collections.abc import Sequence

architectures: str  # "90a ptx90"

class Engine:
    traces_low_latency: bool
    # as in _core, without `simulation`; see there for the methods and their arguments
    def __init__(
        self,
        *,
        rank: int,
        num_ranks: int,
        device: int,
        peer_bases: Sequence[int],
        heap_bytes: int,
        num_max_experts: int,
        timeout_ns: int,
        begins_early: bool = True,
    ) -> None: ...

def allocate(device: int, num_bytes: int) -> int:
    """Zeroed cudaMalloc memory, shareable by CUDA IPC."""

def free(device: int, address: int) -> None: ...
def ipc_handle(address: int) -> bytes:
    """64 bytes naming the allocation to other processes of this host."""

def ipc_open(device: int, handle: bytes) -> int: ...
def ipc_close(device: int, address: int) -> None: ...
def enable_peer_access(device: int, peer_device: int) -> None:
    """For ranks that are threads of one process; does nothing when already
    enabled or the same device.
    """

def can_access_peer(device: int, peer_device: int) -> bool: ...
def num_sms(device: int) -> int: ...
def current_device() -> int: ...
def streams(device: int) -> object:
    """A door (csrc/bind/doors.hpp) to the streams of a device, for _core.Streams."""

# ---- for deep_comm.bench: the link limit ----

def push_rows(
    *,
    destinations: Sequence[
        int
    ],  # [num_ranks] receive area of every rank: num_ranks * num_rows_per_peer rows
    src: int,  # (num_ranks - 1) * num_rows_per_peer rows
    rank: int,
    num_rows_per_peer: int,
    row_bytes: int,  # a multiple of 16
    num_blocks: int,
    num_warps: int,  # of a block, at most max_push_warps
    stream: int,
) -> None:
    """Pushes rows to every other rank with bulk copies: no counts, no flags, no barriers.

    Row t goes to rank (rank + 1 + t % (num_ranks - 1)) % num_ranks, row rank * num_rows_per_peer +
    t // (num_ranks - 1) there.
    """

def max_push_warps(row_bytes: int) -> int: ...
def launch_empty(stream: int, /) -> None:
    """A kernel that does nothing, launched as the engine launches its own."""

def copy_async(*, dst: int, src: int, num_bytes: int, stream: int) -> None:
    """cudaMemcpyAsync between any two reachable addresses; a copy engine's work between devices."""
