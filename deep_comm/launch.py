"""How the demo and the examples start their ranks."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from deep_comm import processes
from deep_comm.ranks.topology import MAX_RANKS_PER_NODE
from deep_comm.settings.command_line import at_least


def add_ranks(parser: argparse.ArgumentParser, default: int) -> None:
    """The option --ranks."""
    parser.add_argument(
        "--ranks",
        type=at_least(1, MAX_RANKS_PER_NODE),
        default=default,
        help=f"processes to start, without torchrun; at most {MAX_RANKS_PER_NODE}",
    )


def on_ranks(
    fn: Callable[..., Any], num_ranks: int, *args: object, timeout_s: float = 300.0
) -> int:
    """``fn(group, *args)`` on every rank; 0 if all return something true. Under torchrun this is
    one of them."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        # Every rank imports torch, which takes seconds.
        print(f"... starting {num_ranks} ranks", file=sys.stderr, flush=True)
        return 0 if all(processes.run(fn, num_ranks, *args, timeout_s=timeout_s)) else 1
    dist.init_process_group("gloo")
    try:
        torch.set_num_threads(1)
        return 0 if fn(dist.group.WORLD, *args) else 1
    finally:
        dist.destroy_process_group()


def device_of(group: Any) -> torch.device:
    """A GPU of this rank's own if all ranks of this machine can have one, else the host target."""
    local_rank = int(os.environ.get("LOCAL_RANK", group.rank()))
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", group.size()))
    if not torch.cuda.is_available() or torch.cuda.device_count() < num_local:
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def say(group: Any, text: str) -> None:
    if group.rank() == 0:
        print(text, flush=True)
