"""Dispatch and combine between nodes: checked bit for bit, then timed beside what the rail carries.

    python -m deep_comm.bench.nodes --ranks 4 --ranks-per-node 2        # logical nodes of this host
    torchrun --nnodes 2 --nproc-per-node 8 … -m deep_comm.bench.nodes       # hosts are nodes

Of every operation, with --fp8 also a dispatch that casts on its way: the time of a call on the
slowest rank, the bytes that the busiest rail carried (of a cached dispatch exactly one slot a token
and remote node, which is a verdict) and, where --gb-per-s says how fast the rail is, for which
share of the time that keeps it busy. --single-tier also times the same calls with all ranks as one
node.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deep_comm import Buffer, Config, env, reference_internode
from deep_comm.bench.payload import same_bits
from deep_comm.checks import SCALE_BLOCK
from deep_comm.examples.launch import device_of, on_ranks, say
from deep_comm.reference_low_latency import quantise
from deep_comm.rendezvous import Rendezvous


@dataclass(frozen=True)
class Options:
    """Shapes are of one rank; see the help."""

    ranks_per_node: int | None
    rail: str | None
    tokens: int
    check_tokens: int
    hidden: int
    experts: int
    topk: int
    sms: int
    slots: int
    rail_send: int
    calls: int
    gb_per_s: float | None
    single_tier: bool
    rings: bool
    fp8: bool
    device: str | None
    timeout_s: float


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deep_comm.bench.nodes", description=__doc__.split("\n\n")[0]
    )
    add = parser.add_argument
    add("--ranks", type=int, default=4, help="processes to start (not under torchrun)")
    add("--ranks-per-node", type=int, help="logical nodes; default: hosts are nodes")
    add("--rail", help="nvshmem, software or simulated; default: as Buffer(rail=)")
    add("--tokens", type=int, help="default: 64; on GPUs 4096")
    add("--check-tokens", type=int, default=64, help="of the calls that are compared bit for bit")
    add("--hidden", type=int, help="default: 256; on GPUs 7168")
    add("--experts", type=int, default=256)
    add("--topk", type=int, default=8)
    add("--sms", type=int, help="two are a channel; default: 4; on GPUs 24")
    add("--slots", type=int, default=256, help="of a ring inside the node")
    add("--rail-send", type=int, default=6, help="rows of a put")
    add("--calls", type=int, help="timed calls; default: 2; on GPUs 20")
    add("--gb-per-s", type=float, help="speed of a rail: the software NIC keeps to it")
    add("--single-tier", action="store_true", help="also as one node, if that can be")
    add("--rings", action="store_true", help="bounded memory: no receive region, no staging")
    add("--fp8", action="store_true", help="also a cached dispatch with use_fp8")
    add("--device", choices=("cpu", "cuda"), help="default: a GPU a rank if there are so many")
    add("--timeout-s", type=float, default=60.0)
    return parser


def _inputs(
    options: Options, rank: int, num_tokens: int, device: torch.device
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, options.hidden, generator=generator).bfloat16()
    idx = torch.rand(num_tokens, options.experts, generator=generator).topk(options.topk).indices
    weights = torch.rand(num_tokens, options.topk, generator=generator)
    return x.to(device), idx.to(device), weights.to(device)


def _is_right(buffer: Buffer, options: Options, config: Config, ranks_per_node: int) -> bool:
    """One dispatch and combine against the reference. Every rank knows all inputs."""
    num_ranks, host = buffer.group_size, torch.device("cpu")
    inputs = [_inputs(options, rank, options.check_tokens, host) for rank in range(num_ranks)]
    x, idx, weights = (part.to(buffer.device) for part in inputs[buffer.rank])
    recv_x, _, recv_weights, _, handle, _ = buffer.dispatch(
        x, topk_idx=idx, topk_weights=weights, num_experts=options.experts, config=config
    )
    combined_x, combined_weights, _ = buffer.combine(
        recv_x, handle, topk_weights=recv_weights, config=config
    )
    expected = reference_internode.dispatch(
        [part[0] for part in inputs], [part[1] for part in inputs], options.experts, ranks_per_node,
        [part[2] for part in inputs], num_channels=config.num_sms // 2, expert_alignment=1,
        num_worst_tokens=0,
    )  # fmt: skip
    received = [rank.received for rank in expected]
    all_weights = [r.recv_topk_weights for r in received if r.recv_topk_weights is not None]
    wanted, wanted_weights = reference_internode.combine(
        [r.recv_x for r in received], expected, all_weights, [None] * num_ranks
    )[buffer.rank]

    def same(got: Tensor, want: Tensor | None) -> bool:
        return want is not None and same_bits(got.cpu(), want)

    return (
        same(recv_x, expected[buffer.rank].received.recv_x)
        and same(combined_x, wanted)
        and same(combined_weights, wanted_weights)
    )


def _casts_right(buffer: Buffer, x: Tensor, handle: Any, config: Config) -> bool:
    """A dispatch that casts on its way against one of what the reference casts."""
    on_its_way, *_ = buffer.dispatch(x, handle, config=config, use_fp8=True)
    given, *_ = buffer.dispatch(quantise(x), handle, config=config)
    return all(same_bits(got, want) for got, want in zip(on_its_way, given, strict=True))


def _seconds(device: torch.device, call: Callable[[], object], num_calls: int) -> float:
    """Of one call, by events on GPUs, behind a call that finds an idle device and leads in."""
    call()
    if device.type == "cpu":
        begun = time.perf_counter()
        for _ in range(num_calls):
            call()
        return (time.perf_counter() - begun) / num_calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(num_calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / num_calls


def _carried(buffer: Buffer) -> int:
    """Bytes that this rank has put so far, once its kernels have ended
    and its NIC has taken all.
    """
    if buffer.device.type == "cuda":
        torch.cuda.synchronize()
    assert buffer.runtime is not None
    buffer.runtime.quiet_rail()
    return sum(map(sum, buffer.rail_put_bytes))


def _slot_bytes(options: Options, ranks_per_node: int, is_fp8: bool) -> int:
    """Of a row of a cached dispatch on the rail."""
    row_bytes, scales = 2 * options.hidden, 0
    if is_fp8:
        row_bytes, scales = options.hidden, options.hidden // SCALE_BLOCK * 4
    if options.rings:  # row, scales, source token, mask
        return -(-(row_bytes + -(-(scales + 8) // 16) * 16) // 128) * 128
    # Scales, source token and a place at each rank; row.
    return -(-(scales + 4 + 4 * ranks_per_node) // 128) * 128 + -(-row_bytes // 128) * 128


def _make_buffer(
    group: Any, options: Options, config: Config, ranks_per_node: int | None
) -> Buffer:
    num_ranks = group.size()
    sizes = (2 * options.hidden, num_ranks, ranks_per_node)
    nvl_bytes = config.get_nvl_buffer_size_hint(*sizes)
    rdma_bytes = config.get_rdma_buffer_size_hint(*sizes)
    direct_bytes = 0
    if not options.rings:
        # A few calls' outputs, and a slot for each row on either side of the rail.
        tokens = max(options.tokens, options.check_tokens)
        row_bytes = 2 * options.hidden + 16 * options.topk + 64
        direct_bytes = 6 * num_ranks * tokens * row_bytes + (1 << 20)
        slot_bytes = -(-2 * options.hidden // 128) * 128 + 256 + 8 * options.topk
        rdma_bytes = max(rdma_bytes, 2 * num_ranks * tokens * slot_bytes)
    return Buffer(
        group,
        nvl_bytes + direct_bytes,
        rdma_bytes if ranks_per_node != num_ranks else 0,
        num_direct_bytes=direct_bytes,
        ranks_per_node=ranks_per_node,
        device=_device(group, options),
        num_max_experts=options.experts,
        timeout_s=options.timeout_s,
        rail=options.rail if ranks_per_node != num_ranks else None,
    )


def _device(group: Any, options: Options) -> torch.device:
    return torch.device("cpu") if options.device == "cpu" else device_of(group)


def _measure(
    group: Any, options: Options, config: Config, ranks_per_node: int | None
) -> tuple[dict[str, tuple[float, int]], bool]:
    """Operation -> seconds of a call, bytes on the rail; and whether all was right."""
    with _make_buffer(group, options, config, ranks_per_node) as buffer:
        is_internode, per_node = buffer.num_nodes > 1, buffer.ranks_per_node
        is_right = not is_internode or _is_right(buffer, options, config, per_node)
        x, idx, _ = _inputs(options, group.rank(), options.tokens, buffer.device)
        layout = buffer.get_dispatch_layout(idx, options.experts)
        recv_x, *_, handle, _ = buffer.dispatch(
            x, topk_idx=idx, num_experts=options.experts, config=config
        )
        measured: dict[str, tuple[float, int]] = {}
        calls: dict[str, Callable[[], object]] = {
            "cached dispatch": lambda: buffer.dispatch(x, handle, config=config),
            "combine": lambda: buffer.combine(recv_x, handle, config=config),
        }
        if options.fp8:
            is_right &= _casts_right(buffer, x, handle, config)
            calls["FP8 dispatch"] = lambda: buffer.dispatch(x, handle, config=config, use_fp8=True)
        for name, call in calls.items():
            call()
            before = _carried(buffer) if is_internode else 0
            Rendezvous(group).barrier()
            seconds = _seconds(buffer.device, call, options.calls)
            buffer.check()
            num_calls = options.calls + 1
            num_bytes = (_carried(buffer) - before) // num_calls if is_internode else 0
            measured[name] = seconds, num_bytes
        if is_internode:
            own = group.rank() // per_node
            assert layout[1] is not None
            crossing = sum(int(layout[1][node]) for node in range(buffer.num_nodes) if node != own)
            for name in measured.keys() - {"combine"}:
                slot = _slot_bytes(options, per_node, name == "FP8 dispatch")
                is_right &= measured[name][1] == crossing * slot
        return measured, is_right


def rank_main(group: Any, options: Options) -> bool:
    on_gpu = _device(group, options).type == "cuda"
    if options.gb_per_s is not None:
        env.NIC_GB_PER_S.set(str(options.gb_per_s))
    chosen = {
        "tokens": options.tokens or (4096 if on_gpu else 64),
        "hidden": options.hidden or (7168 if on_gpu else 256),
        "sms": options.sms or (24 if on_gpu else 4),
        "calls": options.calls or (20 if on_gpu else 2),
    }
    options = Options(**{**vars(options), **chosen})
    config = Config(
        options.sms, min(6, options.slots), options.slots, options.rail_send,
        max(128, 4 * options.rail_send),
    )  # fmt: skip
    ways: list[int | None] = [options.ranks_per_node]
    if options.single_tier:
        ways.append(group.size())
    is_right = True
    say(group, f"{options.tokens} tokens x {options.hidden}, {options.sms} SMs")
    times: list[dict[str, float]] = []
    for way in ways:
        measured, own_right = _measure(group, options, config, way)
        gathered = Rendezvous(group).all_gather_object((measured, own_right))
        is_right &= all(right for _, right in gathered)
        times.append({})
        for name in measured:
            seconds = max(rank[name][0] for rank, _ in gathered)
            num_bytes = max(rank[name][1] for rank, _ in gathered)
            times[-1][name] = seconds
            tiers = "one node" if way == group.size() else "nodes"
            line = f"{tiers:9} {name:16} {1e6 * seconds:9.0f} us"
            if num_bytes:
                line += f"  {num_bytes / 1e6:8.2f} MB on the rail,"
                line += f" {num_bytes / seconds / 1e9:6.1f} GB/s"
            if num_bytes and options.gb_per_s is not None:
                line += f", busy {100 * num_bytes / options.gb_per_s / 1e9 / seconds:.0f} %"
            say(group, line)
    if len(times) == 2:
        ratios = ", ".join(f"{name} {times[0][name] / times[1][name]:.2f}" for name in times[0])
        say(group, f"two tiers / one: {ratios}")
    say(
        group,
        "every bit and every byte as it should be" if is_right else "WRONG rows, sums or bytes",
    )
    return is_right


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = vars(make_parser().parse_args(arguments))
    num_ranks = parsed.pop("ranks")
    return on_ranks(rank_main, num_ranks, Options(**parsed), timeout_s=900.0)


if __name__ == "__main__":
    sys.exit(main())
