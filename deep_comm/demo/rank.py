"""What each rank of the demo does; see `deep_comm.demo`."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from deep_comm import Buffer, Config
from deep_comm.bench.payload import same_bits
from deep_comm.demo import report
from deep_comm.demo.forward import Forward, forward
from deep_comm.demo.layer import HIDDEN, NUM_EXPERTS, NUM_TOPK, Experts, Tokens, split, tokens_of
from deep_comm.ranks.rendezvous import all_gather_object

NUM_RDMA_BYTES = 16 << 20  # not allocated inside one node


def share_of(tokens: Tokens, sizes: Sequence[int], rank: int) -> Tokens:
    start = sum(sizes[:rank])
    rows = slice(start, start + sizes[rank])
    return Tokens(tokens.x[rows], tokens.topk_idx[rows], tokens.topk_weights[rows])


def has_gpus() -> bool:
    return (
        torch.cuda.device_count() >= 2 and importlib.util.find_spec("deep_comm._cuda") is not None
    )


def run(_group: Any, arguments: argparse.Namespace) -> bool:
    """One rank, however it was started; true if every bit is right."""
    torch.set_num_threads(1)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    def say(text: str) -> None:
        if rank == 0 and not arguments.json:
            print(f"[demo] {text}", flush=True)

    device = torch.device("cpu")
    if arguments.device == "cuda" or (arguments.device is None and has_gpus()):
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    text = arguments.file.read_bytes()[: arguments.tokens]
    target = (
        f"CUDA ({torch.cuda.get_device_name(device)})"
        if device.type == "cuda"
        else "the host target"
    )
    say(f"{len(text)} bytes of {arguments.file.name}, {num_ranks} ranks on {target}")
    say(f"{NUM_EXPERTS} experts, top-{NUM_TOPK}, hidden {HIDDEN}, bfloat16")

    tokens = tokens_of(text)
    sizes = split(len(text), num_ranks)
    mine = share_of(tokens, sizes, rank)
    experts = Experts(device)
    num_nvl_bytes = Config().get_nvl_buffer_size_hint(2 * HIDDEN, num_ranks)
    with Buffer(dist.group.WORLD, num_nvl_bytes, NUM_RDMA_BYTES, device=device) as buffer:
        num_nodes = max(1, len(buffer.rail_put_bytes))
        if num_nodes > 1:
            say(f"{num_nodes} nodes of {num_ranks // num_nodes} ranks")
        say("first forward pass (warm-up)")
        first = forward(buffer, mine, experts, device)
        dist.barrier()
        say("second forward pass (measured)")
        second = forward(buffer, mine, experts, device)
        assert first.combined_x is not None and second.combined_x is not None
        repeats = same_bits(first.combined_x, second.combined_x)

    forwards: list[Forward] = all_gather_object(dist.group.WORLD, second)
    repeated: list[bool] = all_gather_object(dist.group.WORLD, repeats)
    problems: list[str] = []
    if rank == 0:
        say("the same layer in one process, for comparison")
        shares = [share_of(tokens, sizes, peer) for peer in range(num_ranks)]
        problems = report.check(forwards, shares, experts, num_ranks // num_nodes)
        problems += [
            f"rank {peer}: two passes gave different bits"
            for peer in range(num_ranks)
            if not repeated[peer]
        ]
        if arguments.json:
            found = {"ranks": report.rows(forwards), "problems": problems}
            print(json.dumps({"verdict": "FAILED" if problems else "OK", **found}, indent=2))
        else:
            print(report.table(forwards), flush=True)
        for problem in problems:
            say(f"WRONG: {problem}")
        if not problems:
            say("dispatched rows and combined output equal the single-process layer bit for bit")
    verdict: bool = all_gather_object(dist.group.WORLD, not problems)[0]  # rank 0's
    say(f"verdict: {'OK' if verdict else 'FAILED'}")
    return verdict
