"""Runs the Triton kernels of adapters on the host: the few words of the language they use.

A pointer is a flat tensor with offsets; a program is a call of the kernel's own function.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class _Pointer:
    def __init__(self, memory: Tensor, offsets: Any = 0) -> None:
        self.memory, self.offsets = memory, offsets

    def __add__(self, offsets: Any) -> _Pointer:
        return _Pointer(self.memory, self.offsets + offsets)

    def __sub__(self, offsets: Any) -> _Pointer:
        return _Pointer(self.memory, self.offsets - offsets)


_program: tuple[int, ...] = ()


def _load(pointer: _Pointer, mask: Tensor | None = None, other: Any = 0) -> Tensor:
    offsets = torch.as_tensor(pointer.offsets)
    if mask is None:
        return pointer.memory[offsets]
    if pointer.memory.numel() == 0:
        return torch.full(offsets.shape, other, dtype=pointer.memory.dtype)
    values = pointer.memory[torch.where(mask, offsets, 0)]
    return torch.where(mask, values, torch.as_tensor(other, dtype=values.dtype))


def _store(pointer: _Pointer, value: Any, mask: Tensor | None = None) -> None:
    offsets = torch.as_tensor(pointer.offsets)
    values = torch.as_tensor(value).to(pointer.memory.dtype).expand(offsets.shape)
    if mask is None:
        pointer.memory[offsets] = values
    else:
        mask = mask.expand(offsets.shape)
        pointer.memory[offsets[mask]] = values[mask]


class _Kernel:
    def __init__(self, fn: Callable[..., None]) -> None:
        self._fn = fn

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            global _program
            for word in ("num_warps", "num_stages"):
                kwargs.pop(word, None)
            pointers = [_Pointer(a.view(-1)) if isinstance(a, Tensor) else a for a in args]
            sizes = grid(kwargs) if callable(grid) else grid
            for _program in itertools.product(*(range(size) for size in sizes)):
                self._fn(*pointers, **kwargs)

        return launch


def _jit(fn: Any = None, **_: object) -> Any:
    return _Kernel(fn) if fn is not None else _Kernel


tl = SimpleNamespace(
    program_id=lambda axis: _program[axis], arange=torch.arange, load=_load, store=_store,
    where=lambda mask, a, b: torch.where(mask, torch.as_tensor(a), torch.as_tensor(b)),
    constexpr=int,
)  # fmt: skip
triton = SimpleNamespace(jit=_jit, cdiv=lambda a, b: -(-a // b), language=tl)
