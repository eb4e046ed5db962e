"""Long sequences of operations, the same on all targets: bodies of one rank."""

from __future__ import annotations

from typing import Any

import torch

import deep_comm
from deep_comm.ranks.rendezvous import Rendezvous

HIDDEN, EXPERTS = 64, 6


def _x(call: int, rank: int, num_tokens: int, device: torch.device) -> torch.Tensor:
    """Every call's rows differ from those of the calls before, in exact bfloat16 integers."""
    columns = torch.arange(HIDDEN, device=device)
    tokens = torch.arange(num_tokens, device=device)[:, None]
    return ((columns + 3 * tokens + 7 * rank + call) % 128).bfloat16()


def many_calls(group: Any, device: torch.device, num_calls: int, generation: int) -> int:
    """``num_calls`` of dispatch, cached dispatch and combine in turn, each
    checked; returns how many.
    """
    rank, num_tokens = group.rank(), 3 + 2 * group.rank()
    idx = (torch.arange(num_tokens)[:, None] * 2 + torch.tensor([0, 3, 5])) % EXPERTS
    idx[0, 1] = -1
    idx = idx.to(device)
    weights = torch.ones(idx.shape, device=device)
    config = deep_comm.Config(2, 2, 4)
    with deep_comm.Buffer(
        group, 2 << 20, num_direct_bytes=1 << 20, device=device, timeout_s=60
    ) as buffer:
        synchronise(group)
        assert buffer.runtime is not None
        if generation:
            buffer.runtime.set_generation(generation)
            synchronise(group)
        done = 0
        while done < num_calls:
            x = _x(done, rank, num_tokens, device)
            if done % 3 == 0:
                routing = dict(topk_idx=idx, topk_weights=weights, num_experts=EXPERTS)
                received, _, _, _, handle, _ = buffer.dispatch(x, config=config, **routing)
                num_ranks = handle.is_token_in_rank.sum(1, keepdim=True)
            else:
                received = buffer.dispatch(x, handle=handle, config=config)[0]
            combined = buffer.combine(received, handle, config=config)[0]
            good = torch.equal(combined, (x.float() * num_ranks).bfloat16())
            if not good:
                raise AssertionError(f"rank {rank}: wrong sums in operation {done}")
            done += 2
    return done


def make_and_destroy(group: Any, device: torch.device) -> None:
    """A Buffer, one operation of each kind, and its end."""
    buffer = deep_comm.Buffer(
        group, 24 << 20, num_direct_bytes=8 << 20, device=device, timeout_s=60
    )
    x = _x(0, group.rank(), 8, device)
    idx = torch.arange(8, device=device)[:, None] % EXPERTS
    received, _, _, _, handle, _ = buffer.dispatch(
        x, topk_idx=idx, topk_weights=torch.ones(8, 1, device=device), num_experts=EXPERTS
    )
    assert torch.equal(buffer.combine(received, handle)[0], x)
    if device.type == "cpu":
        buffer.get_local_buffer_tensor(torch.uint8).fill_(1)  # touch every page of the data region
    del received, handle
    buffer.destroy()


def synchronise(group: Any) -> None:
    """A barrier of the hosts, of either kind of group, behind all of the device's work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    Rendezvous(group).barrier()
