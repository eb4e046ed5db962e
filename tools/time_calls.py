"""Mean time of back-to-back calls on GPUs, direct and ring mode side by side; a
short look between changes.

    torchrun --standalone --nproc-per-node 4 tools/time_calls.py --sms 8,24,48 [--tokens 4096,1024]

Rows of both modes and sums of both are compared bit for bit first. Times are the slowest
rank's, in µs; g: the same call in a CUDA graph of ten. `python -m deep_comm.bench` measures the
same and more, with percentiles.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from deep_comm import Buffer, Config

HIDDEN, EXPERTS, TOPK = 7168, 256, 8


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def slowest(value: float, group: dist.ProcessGroup) -> float:
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor.item()


class Timer:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def _run(self, work: Callable[[], object], num_calls: int) -> float:
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(num_calls):
            work()
        end.record()
        torch.cuda.synchronize()
        return slowest(begin.elapsed_time(end) / num_calls * 1e3, self._group)

    def eager(self, work: Callable[[], object]) -> float:
        for _ in range(3):
            work()
        return self._run(work, 20)

    def graph(self, work: Callable[[], object]) -> float:
        work()
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(10):
                work()  # outputs of one call make room for the next, as they do in a model
        graph.replay()
        return self._run(graph.replay, 3) / 10


def measure(
    tokens: int, sms: list[int], send: int, slots: int, timer: Timer, gloo: dist.ProcessGroup
) -> None:
    rank = dist.get_rank()
    torch.manual_seed(7 + rank)
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    quantised = x.to(torch.float8_e4m3fn), torch.rand(tokens, HIDDEN // 128, device="cuda")
    idx = torch.rand(tokens, EXPERTS, device="cuda").topk(TOPK, dim=1).indices
    weights = torch.rand(tokens, TOPK, device="cuda")
    with (
        Buffer(
            gloo, 5 * tokens * dist.get_world_size() * HIDDEN * 2 + (128 << 20), timeout_s=5
        ) as direct,
        Buffer(gloo, 512 << 20, num_direct_bytes=0, timeout_s=5) as rings,
    ):
        per_rank, _, per_expert, mask, _ = direct.get_dispatch_layout(idx, EXPERTS)
        routing = dict(topk_idx=idx, topk_weights=weights, num_tokens_per_rank=per_rank,
                       is_token_in_rank=mask, num_tokens_per_expert=per_expert)  # fmt: skip
        for num_sms in sms:
            config = Config(num_sms, send, slots)
            one = direct.dispatch(x, config=config, **routing)
            other = rings.dispatch(x, config=config, **routing)
            assert torch.equal(one[0], other[0]) and torch.equal(
                one[4].recv_src_idx, other[4].recv_src_idx
            )
            sums = [
                b.combine(r[0], r[4], config=config)[0] for b, r in ((direct, one), (rings, other))
            ]
            assert torch.equal(*sums)
            calls: dict[str, Callable[[], object]] = {
                "direct": lambda: direct.dispatch(x, handle=one[4], config=config),
                "direct fp8": lambda: direct.dispatch(quantised, handle=one[4], config=config),
                "rings": lambda: rings.dispatch(x, handle=other[4], config=config),
                "rings fp8": lambda: rings.dispatch(quantised, handle=other[4], config=config),
                "combine": lambda: direct.combine(one[0], one[4], config=config),
                "combine rings": lambda: rings.combine(other[0], other[4], config=config),
            }
            line = [
                f"{name} {timer.eager(call):.1f} (g {timer.graph(call):.1f})"
                for name, call in calls.items()
            ]
            uncached = timer.eager(lambda: direct.dispatch(x, config=config, **routing))
            if rank == 0:
                print(
                    f"{tokens} tokens, {num_sms} SMs: {', '.join(line)}, direct uncached "
                    f"{uncached:.1f}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=numbers, default=[4096])
    parser.add_argument("--sms", type=numbers, default=[8, 24, 48])
    parser.add_argument("--send", type=int, default=8)
    parser.add_argument("--slots", type=int, default=64)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    gloo = dist.new_group(backend="gloo")
    for tokens in options.tokens:
        measure(tokens, options.sms, options.send, options.slots, Timer(gloo), gloo)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
