"""Puts gloo in NCCL's place, for ranks on the host and for ranks that share a GPU, which NCCL
refuses."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from servers.in_server import host_copies  # noqa: F401  registers it


def _init_process_group(backend: str = "", device_id: Any = None, **options: Any) -> None:
    _real_init("host_copies", **options)


# What gloo has less than NCCL: shapes that differ, and payloads of few bits.
def _all_gather_into_tensor(output: torch.Tensor, x: torch.Tensor, **options: Any) -> None:
    _real_all_gather(output.view(-1), x.contiguous().view(-1), **options)


def _all_to_all_single(output: torch.Tensor, x: torch.Tensor, *splits: Any, **options: Any) -> None:
    def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.dim() == 1 else tensor.view(torch.uint8)

    _real_all_to_all(as_bytes(output), as_bytes(x.contiguous()), *splits, **options)


_real_init = dist.init_process_group
_real_all_gather = dist.all_gather_into_tensor
_real_all_to_all = dist.all_to_all_single
dist.init_process_group = _init_process_group
dist.all_gather_into_tensor = _all_gather_into_tensor
dist.all_to_all_single = _all_to_all_single
