"""The rail over NVSHMEM. Everything but version, kernels and is_up needs a started library."""

version: int  # of the headers: 10000 major + 100 minor + patch

def kernels() -> int:
    """Address of the table of kernels, for Engine.enable_internode."""

def is_up() -> bool: ...
def attach() -> None:
    """Once a process: this module's kernels use the library that runs."""

def place() -> tuple[int, int]:
    """This PE and how many there are."""

def allocate(num_bytes: int) -> int:
    """Collective over all PEs; 0: no room."""

def release(address: int) -> None:
    """Collective over all PEs."""

def peer_address(address: int, pe: int) -> int:
    """Where this GPU's stores reach a PE's part of the allocation; 0: nowhere."""

def clear(address: int, num_bytes: int) -> None: ...
def settle() -> None:
    """Waits until all that this PE has put has landed."""

def queues(num_qps: int) -> int:
    """Collective: address of handles of explicit queues; 0: there is the default one alone."""
