"""What the calls of a Buffer cost the calling thread, in microseconds:
``python tests/support/host_time.py``.

One rank, so that nothing waits for a peer. On a GPU each call is timed twice: as it is, many at
once, the GPU far behind the host; and with the launch left out, which is this package's own part.
Without a GPU the latter alone, over the CUDA backend with stubbed driver calls (fake_cuda). Figures
are the least of many rounds. Calls of torch come first: they tell a slow machine from a slow
package. ``--kinds nodes``: of two ranks that are threads and nodes, on the host target, which has
no streams; launches left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import deep_comm
from deep_comm import local
from deep_comm.layer.host_counters import HostCounters

ROUNDS, CALLS = 60, 40
HAS_GPU = torch.cuda.is_available()
Calls = dict[str, Callable[[], object]]


def microseconds(call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        _synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, time.perf_counter() - begin)
    _synchronize()
    return best / CALLS * 1e6


def _synchronize() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def torch_calls(device: torch.device) -> Calls:
    """What every call of a Buffer is made of, in torch's own words."""
    x = torch.ones(16, 7168, device=device).bfloat16()
    calls: Calls = {"torch.empty": lambda: torch.empty(16, 7168, dtype=x.dtype, device=device)}
    if HAS_GPU:
        calls["torch: x + x"] = lambda: x + x
        calls["torch: the same, out given"] = lambda: torch.add(x, x, out=x)
        calls["torch: event.record()"] = torch.cuda.Event().record
    return calls


def normal_calls(buffer: deep_comm.Buffer, num_tokens: int) -> Calls:
    hidden, topk, experts = 7168, 8, 256
    device = buffer.device
    x = torch.randn(num_tokens, hidden, device=device).bfloat16()
    scores = torch.rand(num_tokens, experts, device=device)
    weights, idx = scores.topk(topk)
    quantised = x.to(torch.float8_e4m3fn), torch.ones(num_tokens, hidden // 128, device=device)
    rows, _, recv_weights, _, handle, _ = buffer.dispatch(
        x, topk_idx=idx, topk_weights=weights, num_experts=experts
    )
    config = deep_comm.Config(24, 8, 256)
    configured = buffer.dispatch(
        x, topk_idx=idx, topk_weights=weights, num_experts=experts, config=config
    )[4]
    per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(idx, experts)
    layout = dict(
        num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=mask
    )
    routing = dict(topk_idx=idx, topk_weights=weights)
    return {
        "get_dispatch_layout": lambda: buffer.get_dispatch_layout(idx, experts),
        "cached dispatch": lambda: buffer.dispatch(x, handle=handle),
        "cached dispatch, config": lambda: buffer.dispatch(x, handle=configured, config=config),
        "cached dispatch, FP8": lambda: buffer.dispatch(quantised, handle=handle),
        "cached dispatch, cast": lambda: buffer.dispatch(x, handle=handle, use_fp8=True),
        "cached dispatch, async": lambda: buffer.dispatch(x, handle=handle, async_finish=True),
        "dispatch, num_worst_tokens": lambda: buffer.dispatch(
            x, **routing, num_experts=experts, num_worst_tokens=2 * num_tokens
        ),
        "the same, layout given": lambda: buffer.dispatch(
            x, **routing, **layout, num_worst_tokens=2 * num_tokens
        ),
        "dispatch": lambda: buffer.dispatch(x, **routing, num_experts=experts),
        "dispatch, cast": lambda: buffer.dispatch(x, **routing, num_experts=experts, use_fp8=True),
        "combine": lambda: buffer.combine(rows, handle),
        "combine, weights": lambda: buffer.combine(rows, handle, topk_weights=recv_weights),
    }


def low_latency_calls(buffer: deep_comm.Buffer, num_tokens: int) -> Calls:
    hidden, topk, experts = 7168, 8, 8
    device = buffer.device
    x = torch.randn(num_tokens, hidden, device=device).bfloat16()
    weights, idx = torch.rand(num_tokens, experts, device=device).topk(topk)
    there, back = buffer.low_latency_dispatch, buffer.low_latency_combine
    calls: Calls = {}
    for name, options in (("", {}), (", compact", dict(compact=True))):
        handle = there(x, idx, num_tokens, experts, **options)[2]
        rows = torch.ones(handle.rows_shape, device=device, dtype=torch.bfloat16)

        def dispatch(options: dict[str, Any] = options, **more: Any) -> Any:
            return there(x, idx, num_tokens, experts, **options, **more)

        def combine(handle: Any = handle, rows: Any = rows, **more: Any) -> Any:
            return back(rows, idx, weights, handle, **more)

        calls[f"low_latency_dispatch{name}"] = dispatch
        calls[f"low_latency_combine{name}"] = combine
        if not name:
            calls["low_latency_dispatch, BF16"] = lambda: there(
                x, idx, num_tokens, experts, use_fp8=False
            )
            calls["low_latency_dispatch and hook"] = lambda d=dispatch: d(return_recv_hook=True)[
                4
            ]()
            calls["low_latency_combine and hook"] = lambda c=combine: c(return_recv_hook=True)[2]()
            calls["low_latency_dispatch, async"] = lambda d=dispatch: d(async_finish=True)
    return calls


def layer_calls(layer: deep_comm.ExpertParallel, num_tokens: int, max_rows: int) -> Calls:
    """Steps of ExpertParallel, and the two calls of the Buffer that each of them makes."""
    shape, buffer = layer.shape, layer.buffer
    x = torch.randn(num_tokens, shape.hidden, device=buffer.device).bfloat16()
    scores = torch.rand(num_tokens, shape.num_experts, device=buffer.device)
    weights, idx = scores.topk(shape.num_topk)
    experts, slots = shape.num_experts, shape.num_slots

    def raw_decode() -> None:
        sent = buffer.low_latency_dispatch(
            x, idx, slots, experts, use_fp8=False, topk_weights=weights
        )
        buffer.low_latency_combine(sent[0], idx, None, sent[2])

    def raw_prefill(num_rows: int) -> None:
        sent = buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, num_experts=experts, expand=True,
            num_worst_tokens=num_rows, zero_padding=num_rows > 0,
        )  # fmt: skip
        buffer.combine(sent[0], sent[4], topk_weights=sent[2], apply_weights=True)

    def step(**options: Any) -> Callable[[], object]:
        return lambda: layer(x, idx, weights, lambda batch: batch.x, **options)

    return {
        "decode, the Buffer's calls": raw_decode,
        "decode, layer": step(mode="decode"),
        "auto, layer": step(mode="auto"),
        "counted prefill, the Buffer's calls": lambda: raw_prefill(0),
        "counted prefill, layer": step(mode="prefill"),
        "bounded prefill, the Buffer's calls": lambda: raw_prefill(max_rows),
        "bounded prefill, layer": step(mode="prefill", bounded=True),
    }


def layer_table(group: Any, num_tokens: int) -> list[tuple[str, ...]]:
    """Without launches. Of one rank, with the words that ranks of one host share."""
    hidden, topk, experts, max_rows = 1024, 8, 8, 256
    with torch.inference_mode(), deep_comm.ExpertParallel(
        group, hidden=hidden, num_experts=experts, num_topk=topk, max_tokens=64, decode_tokens=32,
        max_recv_rows=max_rows, timeout_s=20, device=None if HAS_GPU else "cpu",
    ) as layer:  # fmt: skip
        layer._steps.use_counters(HostCounters.create(layer.buffer._context.rendezvous))
        calls = layer_calls(layer, num_tokens, max_rows)
        for _ in range(3):
            for call in calls.values():
                call()
        engine: Any = layer.buffer._context.engine
        engine.skips_launches = True
        if hasattr(engine, "stub_counts"):
            counts = [num_tokens * topk // experts] * experts
            engine.stub_counts = num_tokens, num_tokens, True, counts
        return [(name, "-", f"{microseconds(call):.1f}") for name, call in calls.items()]


def _without_counts(buffer: deep_comm.Buffer, num_rows: int) -> None:
    """Nothing was launched that could tell how many rows come."""
    engine = buffer._context.engine
    engine.skips_launches = True
    if hasattr(engine, "stub_counts"):
        engine.stub_counts = num_rows, num_rows, True, [0] * 256


def table(group: Any, num_tokens: int, kinds: list[str]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    size = deep_comm.Buffer.get_low_latency_rdma_size_hint(num_tokens, 7168, 1, 8)
    with deep_comm.Buffer(group, 512 << 20, size, low_latency_mode=True, timeout_s=20) as buffer:
        for name, call in torch_calls(buffer.device).items():
            rows.append((name, f"{microseconds(call):.1f}", ""))
        calls: Calls = {}
        for kind in kinds:
            make = normal_calls if kind == "normal" else low_latency_calls
            calls.update(make(buffer, num_tokens))
        for name, call in calls.items():
            as_it_is = f"{microseconds(call):.1f}" if HAS_GPU else "-"
            own = "-"
            # These wait for what a launch brings.
            if not HAS_GPU or name not in ("dispatch", "dispatch, cast"):
                _without_counts(buffer, num_tokens)
                own = f"{microseconds(call):.1f}"
                buffer._context.engine.skips_launches = False
                if not HAS_GPU:
                    buffer._context.engine.stub_counts = None
            rows.append((name, as_it_is, own))
    return rows


def nodes_table(group: Any, num_tokens: int) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    with deep_comm.Buffer(
        group, 512 << 20, 256 << 20, num_direct_bytes=64 << 20, ranks_per_node=1, device="cpu",
        timeout_s=120,
    ) as buffer:  # fmt: skip
        calls = normal_calls(buffer, num_tokens)
        del calls["dispatch"], calls["dispatch, cast"]  # which wait for what a launch brings
        for call in calls.values():
            call()
        group.barrier()
        if group.rank() == 0:
            engine: Any = buffer.runtime
            engine.skips_launches = True
            rows = [
                (f"{name}, nodes", "-", f"{microseconds(call):.1f}") for name, call in calls.items()
            ]
            engine.skips_launches = False
        group.barrier()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tokens", type=int, default=0, help="a rank; default: 1024, 4 without a GPU"
    )
    parser.add_argument("--kinds", default="normal,low-latency")
    arguments = parser.parse_args()
    num_tokens = arguments.tokens or (1024 if HAS_GPU else 4)
    kinds = arguments.kinds.split(",")
    if kinds == ["nodes"]:
        return show(local.run(lambda group: nodes_table(group, num_tokens), 2, timeout_s=300)[0])

    def body(group: Any) -> list[tuple[str, ...]]:
        if kinds == ["layer"]:
            return layer_table(group, num_tokens)
        return table(group, num_tokens, kinds)

    if HAS_GPU:
        rows = local.run(body, 1, timeout_s=300)[0]
    else:
        import fake_cuda

        with fake_cuda.installed() as log:
            log.is_silent = True
            rows = local.run(body, 1, timeout_s=300)[0]
    show(rows)


def show(rows: list[tuple[str, ...]]) -> None:
    print(f"{'µs of the calling thread':<34}{'as it is':>10}{'no launch':>11}")
    for name, as_it_is, own in rows:
        print(f"{name:<34}{as_it_is:>10}{own:>11}")


if __name__ == "__main__":
    main()
