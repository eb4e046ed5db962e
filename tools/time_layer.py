"""Host time of steps of ExpertParallel beside the Buffer calls under them, on GPUs, in turn.

    torchrun --standalone --nproc-per-node 2 tools/time_layer.py [--tokens 16] [--rounds 12]

A round of each, then the next round of each, in one process a rank; medians of the rounds, of the
slower rank, in µs of the calling thread, launches and the host's waits included. "raw" are the two
calls of the Buffer that a step stands for, with the same arguments. Rounds of decode stand on both
sides of auto, as "decode" and "decode again": what differs between two rounds of the same thing is
the machine's. For auto it also says how often the others' words were not there in time, by rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import deep_comm
from deep_comm.bench.measure import clock_of, gather, host_round

HIDDEN, EXPERTS, TOPK = 7168, 256, 8
Steps = dict[str, Callable[[int], object]]


def experts(batch: deep_comm.ExpertBatch) -> torch.Tensor:
    return batch.x


def steps_of(layer: deep_comm.ExpertParallel, num_tokens: int, max_rows: int) -> Steps:
    device = layer.buffer.device
    torch.manual_seed(7 + dist.get_rank())
    x = torch.randn(num_tokens, HIDDEN, device=device).bfloat16()
    idx = torch.rand(num_tokens, EXPERTS, device=device).topk(TOPK, dim=1).indices
    weights = torch.rand(num_tokens, TOPK, device=device)
    buffer, slots = layer.buffer, layer.shape.num_slots

    def raw_decode(call: int) -> object:
        sent = buffer.low_latency_dispatch(
            x, idx, slots, EXPERTS, use_fp8=False, topk_weights=weights
        )
        return buffer.low_latency_combine(sent[0], idx, None, sent[2])[0]

    def raw_prefill(num_rows: int) -> object:
        sent = buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, num_experts=EXPERTS, expand=True,
            num_worst_tokens=num_rows, zero_padding=num_rows > 0,
        )  # fmt: skip
        return buffer.combine(sent[0], sent[4], topk_weights=sent[2], apply_weights=True)[0]

    def step(mode: Any, bounded: bool = False) -> Callable[[int], object]:
        return lambda call: layer(x, idx, weights, experts, mode=mode, bounded=bounded)

    return {
        "raw decode": raw_decode,
        "decode": step("decode"),
        "auto": step("auto"),
        "decode again": step("decode"),
        "raw counted": lambda call: raw_prefill(0),
        "counted": step("prefill"),
        "raw bounded": lambda call: raw_prefill(max_rows),
        "bounded": step("prefill", True),
    }


def ratio_of(works: list[float], before: list[float], behind: list[float]) -> str:
    turns = zip(works, before, behind, strict=True)
    low, median, high = statistics.quantiles([2 * w / (b + a) for w, b, a in turns], n=4)
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


def count_late(layer: deep_comm.ExpertParallel, counted: list[int]) -> None:
    """Steps of auto that look again."""
    steps: Any = layer._steps
    ask = steps._most

    def counting(state: Any) -> int:
        counted[0] += 1
        return int(ask(state))

    steps._most = counting


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--calls", type=int, default=100)
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host
    dist.init_process_group("gloo")
    max_rows = 4096
    with torch.inference_mode(), deep_comm.ExpertParallel(
        dist.group.WORLD, hidden=HIDDEN, num_experts=EXPERTS, num_topk=TOPK, max_tokens=512,
        decode_tokens=128, max_recv_rows=max_rows, timeout_s=20,
    ) as layer:  # fmt: skip
        steps = steps_of(layer, options.tokens, max_rows)
        late, num_auto = [0], 0
        clock = clock_of(device)
        for work in steps.values():
            for call in range(5):
                work(call)
        sums = {name: work(0) for name, work in steps.items()}
        torch.cuda.synchronize()
        first = sums["raw decode"]
        assert all(torch.equal(each, first) for each in sums.values()), "sums differ"
        count_late(layer, late)
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(options.rounds):
            for name, work in steps.items():
                is_long = "counted" in name or "bounded" in name
                calls = options.calls // 2 if is_long else options.calls
                times[name].append(host_round(work, calls, clock))
                num_auto += calls if name == "auto" else 0
        medians = {name: gather(statistics.median(found)) for name, found in times.items()}
        spreads = {name: gather(statistics.quantiles(found, n=4)) for name, found in times.items()}
        turns = {
            name: [max(ranks) for ranks in zip(*gather(found), strict=True)]
            for name, found in times.items()
        }
        late_by_rank = gather(late[0])
        layer.buffer.check()
    if dist.get_rank() == 0:
        print(
            f"{'host µs of a step':<18}{'slower':>8}{'faster':>8}  quartiles of rounds, slower rank"
        )
        for name, ranks in medians.items():
            slower = ranks.index(max(ranks))
            low, _, high = spreads[name][slower]
            print(f"{name:<18}{max(ranks):>8.1f}{min(ranks):>8.1f}  {low:.1f} to {high:.1f}")
        slower = {name: max(ranks) for name, ranks in medians.items()}
        print(
            "medians over turns of the slower rank's: auto over the decodes around it "
            f"{ratio_of(turns['auto'], turns['decode'], turns['decode again'])}, decode again over "
            f"decode {ratio_of(turns['decode again'], turns['decode'], turns['decode'])}"
        )
        print(
            "layer over raw: "
            + ", ".join(
                f"{name} {slower[name] - slower['raw ' + name.split()[0]]:.1f}"
                for name in slower
                if f"raw {name.split()[0]}" in slower and "again" not in name
            )
            + f"; auto over decode {slower['auto'] - slower['decode']:.1f}"
            f" ({slower['auto'] / slower['decode']:.3f}; decode again"
            f" {slower['decode again'] / slower['decode']:.3f}); words late {late_by_rank} of"
            f" {num_auto}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
