"""Heaps of ranks that are threads of one process: plain memory, found by its address."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

from deep_comm.errors import AllocationError, DeepCommError
from deep_comm.ranks.rendezvous import Rendezvous


class Block:
    """Memory that is freed when its owner and every peer have let go of it."""

    def __init__(self, address: int, num_bytes: int, free: Callable[[int], None]) -> None:
        self.address = address
        self.num_bytes = num_bytes
        # At exit the process gives everything back at once; freeing piecemeal could only fail.
        weakref.finalize(self, free, address).atexit = False


_lock = threading.Lock()
_blocks: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()


T = TypeVar("T")


def allocated(num_bytes: int, allocate: Callable[[], T]) -> T:
    """What ``allocate`` returns, which fails if there are not ``num_bytes``."""
    try:
        return allocate()
    except (MemoryError, OSError, RuntimeError, ValueError) as error:
        raise AllocationError(num_bytes, str(error)) from error


def register(block: Block) -> None:
    """Make ``block`` known to the other ranks of this process."""
    with _lock:
        _blocks[block.address] = block


def find(address: int) -> Block:
    with _lock:
        block = _blocks.get(address)
    if block is None:
        raise DeepCommError(f"no heap at {address:#x} in this process")
    return block


def exchange(rendezvous: Rendezvous, create: Callable[[], Block]) -> list[Block]:
    """Create this rank's block; returns the blocks of all ranks. Collective.

    Each rank holds on to all of them: a peer that ends early must not pull memory away from kernels
    that still write to it.
    """
    own: list[Block] = []

    def create_and_register() -> int:
        own.append(create())
        register(own[0])
        return own[0].address

    addresses = rendezvous.all_gather_result("allocate its heap", create_and_register)
    blocks = [find(address) for address in addresses]
    rendezvous.barrier()  # nobody lets go of a block before all have found it
    return blocks
