"""When SymmetricMemory may have multicast, and what is asked of torch's symmetric memory then.

Something stands for torch's symmetric memory, which needs GPUs; all else is what ships.
"""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup

from deep_comm import errors, local, processes
from deep_comm.backends import multicast
from deep_comm.ranks.rendezvous import Rendezvous
from deep_comm.symmetric import SymmetricMemory

DEVICE = torch.device("cuda", 0)
FORBIDS = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class Torch:
    """Stands for torch's symmetric memory: notes what is asked, and gives plain memory."""

    def __init__(
        self, window: int = 0x7000, supports: bool = True, fails: str = "", skew: int = 0
    ) -> None:
        self.asked: list[str] = []
        self.window, self.supports, self.fails, self.skew = window, supports, fails, skew

    def has_multicast_support(self, device_type: object, index: int) -> bool:
        self.asked.append("has_multicast_support")
        return self.supports

    def empty_strided_p2p(self, size: Any, stride: Any, dtype: Any, device: Any) -> torch.Tensor:
        assert device == DEVICE
        self.asked.append("empty_strided_p2p")
        memory = torch.full((size[0] + 256,), 7, dtype=dtype)
        begin = -memory.data_ptr() % 128 + self.skew
        return memory[begin : begin + size[0]]

    def rendezvous(self, memory: torch.Tensor, group: ProcessGroup) -> object:
        assert isinstance(group, ProcessGroup) and not memory.any()
        self.asked.append("rendezvous")
        if self.fails:
            raise RuntimeError(self.fails)
        bases = [memory.data_ptr() if rank == group.rank() else 64 * rank for rank in range(2)]
        return SimpleNamespace(buffer_ptrs=bases, multicast_ptr=self.window)

    def stand_in(self) -> Torch:
        multicast._SymmetricMemory = multicast.torch_symmetric = self  # type: ignore[misc,assignment]
        torch.cuda.synchronize = lambda device: None  # type: ignore[assignment]
        return self


def build(group: Any, stand: Torch, has_kernels: bool = True) -> Any:
    """On a rank, a process of its own: where the memory lies, or the error; and what was asked."""
    stand.stand_in()
    try:
        heap = multicast.MulticastHeap(Rendezvous(group), DEVICE, 256, has_kernels)
    except errors.UnsupportedError as error:
        return str(error), stand.asked
    assert heap.base == heap.peer_bases[group.rank()] == heap.memory().data_ptr()  # type: ignore
    return [heap.peer_bases[1 - group.rank()], heap.multicast_base], stand.asked


def forbidden_on_one(group: Any) -> Any:
    os.environ[FORBIDS] = str(group.rank())
    return build(group, Torch())


def test_torch_says_where_the_memory_of_all_ranks_lies() -> None:
    asked = ["has_multicast_support", "empty_strided_p2p", "rendezvous"]
    found = processes.run(build, 2, Torch())
    assert found == [([64, 0x7000], asked), ([0, 0x7000], asked)]


def test_one_rank_that_must_not_keeps_all_from_torch() -> None:
    (first, asked_first), (second, asked_second) = processes.run(forbidden_on_one, 2)
    assert first == second
    assert f"on rank 1 {FORBIDS}=1 forbids it" in first
    assert asked_first == asked_second == []


@pytest.mark.parametrize(
    ("stand", "has_kernels", "why", "last"),
    [
        (Torch(), False, "no multicast, which begins with sm_90", None),
        (Torch(supports=False), True, "its driver has no multicast", "has_multicast_support"),
        (Torch(skew=64), True, "not begin at a multiple of 128 bytes", "rendezvous"),
        (Torch(window=0), True, "could set up no multicast", "rendezvous"),
        (Torch(fails="overlapping devices"), True, "share the memory: overlap", "rendezvous"),
    ],
)
def test_what_cannot_be_had_is_refused_on_all_ranks(
    stand: Torch, has_kernels: bool, why: str, last: str | None
) -> None:
    for error, asked in processes.run(build, 2, stand, has_kernels):
        assert why in error
        assert (asked or [None])[-1] == last


@pytest.mark.parametrize("value", ["1", "0", "", "true", None])
def test_the_variable_forbids_as_it_does_in_torch(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """c10::utils::check_env: 1 alone is yes."""
    stand = Torch()
    monkeypatch.setattr(multicast, "_SymmetricMemory", stand)
    monkeypatch.delenv(FORBIDS, raising=False)
    if value is not None:
        monkeypatch.setenv(FORBIDS, value)
    reason = multicast.refusal(None, DEVICE, True)
    assert (FORBIDS in reason) == (value == "1")
    assert reason and not stand.asked  # without a group of torch's there is none, either


def test_without_being_asked_for_nothing_of_it_is_loaded() -> None:
    code = """
import sys
from deep_comm import local
from deep_comm.symmetric import SymmetricMemory
def fn(group):
    SymmetricMemory(group, 64, device="cpu").destroy()
local.run(fn, 2)
assert not {"deep_comm.backends.multicast", "torch.distributed._symmetric_memory"} & {*sys.modules}
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_one_rank_alone_has_nothing_to_multicast() -> None:
    def fn(group: Any) -> int:
        with SymmetricMemory(group, 64, device="cpu", multicast=True) as memory:
            return memory._context.heap.multicast_base

    assert local.run(fn, 1) == [0] and all(local.run(fn, 2))
