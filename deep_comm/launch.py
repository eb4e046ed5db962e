"""How the commands and the examples start their ranks."""

from __future__ import annotations

import argparse
import datetime
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


def is_rank() -> bool:
    """This process is a rank of torchrun."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def results(
    fn: Callable[..., Any], num_ranks: int, *args: object, timeout_s: float = 300.0
) -> list[Any]:
    """``fn(group, *args)`` on every rank, by rank. Under torchrun this is one of them, and its
    result the only one."""
    if not is_rank():
        # Every rank imports torch, which takes seconds.
        print(f"... starting {num_ranks} ranks", file=sys.stderr, flush=True)
        return processes.run(fn, num_ranks, *args, timeout_s=timeout_s)
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        # All ranks are on this host; without this gloo asks the resolver for the host's own name.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
    try:
        torch.set_num_threads(1)
        return [fn(dist.group.WORLD, *args)]
    finally:
        dist.destroy_process_group()


def on_ranks(
    fn: Callable[..., Any], num_ranks: int, *args: object, timeout_s: float = 300.0
) -> int:
    """Of ``results``: 0 if all are true."""
    return 0 if all(results(fn, num_ranks, *args, timeout_s=timeout_s)) else 1


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
