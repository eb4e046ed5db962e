"""Servers that take one thing after the other, many of them at once."""

from __future__ import annotations

import torch
from torch import Tensor


def serve(free: Tensor, ready: Tensor, work: Tensor) -> tuple[Tensor, Tensor]:
    """(when each is finished, when the servers are free again): first come, first served.

    Args:
        free: [...] from when on a server is free.
        ready: [..., J] when its jobs come.
        work: [..., J] how long each takes; 0: no job.
    """
    come, order = torch.where(work > 0, ready, 0.0).sort(dim=-1)
    took = work.gather(-1, order)
    done = took.cumsum(-1)
    # A job is finished when it and all behind some earlier start are: the latest of these.
    start = torch.maximum(come, free[..., None])
    finished = done + (start - (done - took)).cummax(-1).values
    result = torch.empty_like(finished).scatter_(-1, order, finished)
    return result, torch.where(done[..., -1] > 0, finished[..., -1], free)


def drain(free: Tensor, ready: Tensor, work: Tensor) -> Tensor:
    """When servers are free again that get ``work`` [...], the first of it at ``ready`` [...]."""
    return torch.where(work > 0, torch.maximum(free, ready) + work, free)
