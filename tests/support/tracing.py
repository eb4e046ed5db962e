"""Calls of Buffers that trace, on either target, and what their notes must say."""

from __future__ import annotations

from typing import Any

import torch

import deep_comm
from deep_comm import trace
from deep_comm.trace import Recording

NUM_EXPERTS = 8
HIDDEN = 256
CONFIG = deep_comm.Config(8, 4, 64)  # eight blocks

# What every block of a call notes, each group in its order. Of a combine's warps each notes that it
# has left, one after the other, and the note of any of them may remain. In a dispatch one thread
# notes that all has been sent, and at the same time another one that all has come.
STEPS_OF_EVERY_BLOCK = {
    "notify_dispatch": [("begun", "counted")],
    "dispatch": [("begun", "entered", "sent"), ("entered", "received")],
    "combine": [("begun", "entered", "received"), ("entered", "left")],
    "low_latency_dispatch": [("begun", "entered", "received")],
    "low_latency_combine": [("begun", "received")],
    "internode_notify": [("begun", "entered", "left")],
    "internode_dispatch": [("begun", "entered", "forwarded")],
    "internode_combine": [("begun", "entered", "forwarded", "left")],
}
# And what some note, between which of these.
STEPS_OF_SOME = {
    "notify_dispatch": ("counted", "entered", "left"), "dispatch": (), "combine": ("begun", "sent"),
    "low_latency_dispatch": ("begun", "counted", "sent"), "low_latency_combine": ("begun", "sent"),
    "internode_notify": (), "internode_dispatch": ("begun", "sent", "received"),
    "internode_combine": ("begun", "sent", "left"),
}  # fmt: skip


def inputs(seed: int, num_tokens: int, device: torch.device | str) -> list[torch.Tensor]:
    """x, topk_idx, topk_weights."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
    topk_idx = torch.randint(0, NUM_EXPERTS, (num_tokens, 2), generator=generator)
    return [tensor.to(device) for tensor in (x, topk_idx, torch.ones(num_tokens, 2))]


def _pairs(buffer: deep_comm.Buffer, device: torch.device | str, num_calls: int) -> Recording:
    for call in range(num_calls):
        x, topk_idx, weights = inputs(call * 8 + buffer.rank, 40, device)
        rows, _, _, _, handle, _ = buffer.dispatch(
            x, topk_idx=topk_idx, topk_weights=weights, num_experts=NUM_EXPERTS, config=CONFIG
        )
        buffer.combine(rows, handle, config=CONFIG)
    return buffer.trace()


def normal_calls(
    group: Any, device: torch.device | str, num_calls: int, keep: int = 4, direct: bool = True
) -> Recording:
    """So many dispatches and combines of a Buffer that keeps ``keep`` calls of each kernel."""
    num_bytes = 256 << 20 if direct else 32 << 20
    with deep_comm.Buffer(
        group, num_bytes, device=device, timeout_s=60, trace=keep,
        num_direct_bytes=None if direct else 0,
    ) as buffer:  # fmt: skip
        return _pairs(buffer, device, num_calls)


def internode_calls(
    group: Any,
    device: torch.device | str,
    num_calls: int,
    keep: int = 4,
    direct: bool = True,
    rail: str | None = None,
) -> Recording:
    """The same with a rank a node for every two."""
    with deep_comm.Buffer(
        group, 256 << 20, 64 << 20, device=device, timeout_s=60, trace=keep, rail=rail,
        num_direct_bytes=128 << 20 if direct else 0, ranks_per_node=group.size() // 2,
    ) as buffer:  # fmt: skip
        return _pairs(buffer, device, num_calls)


def low_latency_calls(
    group: Any, device: torch.device | str, num_calls: int, keep: int = 4
) -> Recording:
    num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(
        16, HIDDEN, group.size(), NUM_EXPERTS
    )
    with deep_comm.Buffer(
        group, 0, num_bytes, low_latency_mode=True, device=device, timeout_s=60, trace=keep
    ) as buffer:
        for call in range(num_calls):
            x, topk_idx, weights = inputs(call * 8 + group.rank(), 8, device)
            rows, _, handle, _, _ = buffer.low_latency_dispatch(
                x, topk_idx, 16, NUM_EXPERTS, use_fp8=False
            )
            buffer.low_latency_combine(rows, topk_idx, weights, handle)
        return buffer.trace()


def late_combine(group: Any, device: torch.device | str, late_rank: int, end: Any) -> str:
    """A combine that one rank does not come to: the story of the others' PeerTimeout. ``end``:
    waits for all ranks."""
    with deep_comm.Buffer(group, 256 << 20, device=device, timeout_s=0.5, trace=2) as buffer:
        x, topk_idx, _ = inputs(group.rank(), 40, device)
        rows, _, _, _, handle, _ = buffer.dispatch(
            x, topk_idx=topk_idx, num_experts=NUM_EXPERTS, config=CONFIG
        )
        buffer.trace()  # the dispatch has ended
        try:
            if group.rank() == late_rank:
                return ""
            buffer.combine(rows, handle, config=CONFIG)
            buffer.trace()
            buffer.check()
        except deep_comm.PeerTimeout as error:
            assert error.story in getattr(error, "__notes__", [error.story])  # Python 3.11
            return error.story
        finally:
            end(group)
    return "no PeerTimeout"


def require_steps(recordings: list[Recording], kernel: str, num_calls: int) -> None:
    """Every block of every rank has noted the kernel's steps, in their order, in so many calls."""
    ordered = [*STEPS_OF_EVERY_BLOCK[kernel], STEPS_OF_SOME[kernel]]
    every = {step for steps in STEPS_OF_EVERY_BLOCK[kernel] for step in steps}
    known = every.union(STEPS_OF_SOME[kernel])
    numbers = [[call for name, call in each.calls if name == kernel] for each in recordings]
    assert len(numbers[0]) == num_calls
    assert all(each == numbers[0] for each in numbers), numbers
    for recording in recordings:
        for call in numbers[0]:
            by_block: dict[int, dict[str, int]] = {}
            for event in recording.of_call(kernel, call):
                by_block.setdefault(event.block, {})[event.step] = event.time_ns
            assert by_block.keys() == set(range(len(by_block)))
            for block, noted in by_block.items():
                assert every <= noted.keys() <= known, (recording.rank, block, noted)
                for steps in ordered:
                    times = [noted[step] for step in steps if step in noted]
                    assert times == sorted(times), (recording.rank, block, noted)
            seen = {step for noted in by_block.values() for step in noted}
            assert seen == known, (recording.rank, call)


def require_merged(recordings: list[Recording]) -> str:
    """They merge: clocks are known, every kernel has a row for each step. The summary."""
    alignment = trace.align(recordings)
    assert all(error < 1e9 for error in alignment.errors_ns.values()), alignment
    text = trace.summarise(recordings, alignment)
    assert all(kernel in text for kernel, _ in recordings[0].calls)
    merged = trace.chrome_trace(recordings, {recordings[0].buffer: alignment})
    slices = [event for event in merged["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == {recording.rank for recording in recordings}
    assert all(event["dur"] >= 0 and event["ts"] >= -1e-3 for event in slices)
    return text
