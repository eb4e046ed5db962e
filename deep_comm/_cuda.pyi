"""The GPU target: the same Engine as in `_core`, launching on CUDA, and the memory it works in.

Streams are ``cudaStream_t`` as ``int``. The caller makes the right device current before every call.
"""

from collections.abc import Sequence

from deep_comm._core import Counts, ErrorRecord

architectures: str  # "90a"

class Engine:
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
    ) -> None: ...

def allocate(device: int, num_bytes: int) -> int:
    """Zeroed cudaMalloc memory, shareable by CUDA IPC."""

def free(device: int, address: int) -> None: ...
def ipc_handle(address: int) -> bytes:
    """64 bytes naming the allocation to other processes of this host."""

def ipc_open(device: int, handle: bytes) -> int: ...
def ipc_close(device: int, address: int) -> None: ...
def enable_peer_access(device: int, peer_device: int) -> None:
    """For ranks that are threads of one process; does nothing when already enabled or the same device."""

def can_access_peer(device: int, peer_device: int) -> bool: ...
def num_sms(device: int) -> int: ...
