"""Collectives of deep_comm.tp beside NCCL, on the GPUs of one node, in turn.

    torchrun --standalone --nproc-per-node 2 tools/time_collectives.py [--sms 16,32] [--mb 1,256]

Checks first: the bits of the sum in float32 in rank order. Then a round of each, the next round of
each; medians of the rounds, of the slower rank, in µs. GB/s are what a rank receives over the
links. Columns are NCCL, the copy engines (all-gather alone) and this package with so many SMs; for
an all-reduce in one shot and in two. bf16. --mb: the smallest and the largest x, or output of an
all-gather, in MB.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from deep_comm import tp
from deep_comm.symmetric import SymmetricMemory

COLUMNS = 8192
ROUNDS = 9
Calls = dict[str, Callable[[], object]]


def checked(memory: SymmetricMemory, name: str, got: torch.Tensor, x: torch.Tensor) -> None:
    """The inputs of all ranks by NCCL, which copies them bit by bit."""
    parts = [torch.empty_like(x) for _ in range(memory.group_size)]
    dist.all_gather(parts, x)
    if name == "all_gather":
        wanted = torch.cat(parts)
    else:
        total = torch.zeros_like(x, dtype=torch.float32)
        for part in parts:
            total += part.float()
        wanted = total.to(x.dtype)
        if name == "reduce_scatter":
            wanted = wanted.chunk(memory.group_size)[memory.rank]
    if not torch.equal(got.view(torch.uint8), wanted.view(torch.uint8)):
        raise SystemExit(f"{name} of {list(x.shape)} is wrong on rank {memory.rank}")


def calls_of(name: str, memory: SymmetricMemory, num_bytes: int, sms: list[int]) -> Calls:
    ranks, device = memory.group_size, memory.device
    rows = max(ranks, num_bytes // (2 * COLUMNS) // ranks * ranks)
    shard = rows // ranks
    x = torch.randn(shard if name == "all_gather" else rows, COLUMNS, device=device).bfloat16()
    if name == "all_gather":
        out = torch.empty(rows, COLUMNS, dtype=x.dtype, device=device)
        peers = memory.empty((rows, COLUMNS), x.dtype)
        calls: Calls = {
            "NCCL": lambda: dist.all_gather_into_tensor(out, x),
            "engines": lambda: tp.all_gather(x, memory, out=peers),
        }
        forms: dict[str, Callable[[int], torch.Tensor]] = {
            "": lambda number: tp.all_gather(x, memory, num_sms=number)
        }
    elif name == "reduce_scatter":
        out = torch.empty(shard, COLUMNS, dtype=x.dtype, device=device)
        calls = {"NCCL": lambda: dist.reduce_scatter_tensor(out, x)}
        forms = {"": lambda number: tp.reduce_scatter(x, memory, num_sms=number)}
    else:
        added = x.clone()
        calls = {"NCCL": lambda: dist.all_reduce(added)}
        forms = {
            "one ": lambda number: tp.all_reduce(x, memory, method="one_shot", num_sms=number),
            "two ": lambda number: tp.all_reduce(x, memory, method="two_shot", num_sms=number),
        }
    for form, call in forms.items():
        for number in sms:
            checked(memory, name, call(number), x)
            calls[f"{form}{number}"] = lambda call=call, number=number: call(number)
    if name == "all_gather":
        checked(memory, name, tp.all_gather(x, memory, out=peers), x)
    torch.cuda.synchronize()
    memory.check()
    return calls


def microseconds(call: Callable[[], object], count: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.barrier()
    begin.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count * 1e3


def times_of(calls: Calls, num_bytes: int) -> dict[str, float]:
    count = max(5, min(50, (256 << 20) // num_bytes))
    rounds: dict[str, list[float]] = {key: [] for key in calls}
    for call in calls.values():
        microseconds(call, 3)
    for _ in range(ROUNDS):
        for key, call in calls.items():
            rounds[key].append(microseconds(call, count))
    medians = torch.tensor([statistics.median(each) for each in rounds.values()], device="cuda")
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return dict(zip(calls, medians.tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sms", default="16,32")
    parser.add_argument("--mb", default="0.5,256")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    sms = [int(number) for number in options.sms.split(",")]
    smallest, largest = (int(float(mb) * 1e6) for mb in options.mb.split(","))
    sizes = [smallest]
    while sizes[-1] * 4 <= largest:
        sizes.append(sizes[-1] * 4)
    ranks, is_first = dist.get_world_size(), dist.get_rank() == 0
    with SymmetricMemory(
        dist.group.WORLD, 2 * largest + (1 << 20), staging_bytes=largest + (1 << 20)
    ) as memory:
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            for num_bytes in sizes:
                took = times_of(calls_of(name, memory, num_bytes, sms), num_bytes)
                received = num_bytes * (ranks - 1) / ranks
                received *= 2 if name == "all_reduce" else 1
                cells = [
                    f"{key} {time:.1f} ({received / time / 1e3:.0f})" for key, time in took.items()
                ]
                if is_first:
                    line = f"{name:14} {num_bytes / 1e6:6.1f} MB  {'  '.join(cells)}"
                    print(line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
