"""Host time of calls of a Buffer: microseconds of the calling thread.

    python tools/time_calls.py [--kinds normal,low-latency,nodes] [--tokens 1024] [--no-launch]

    steady     the same call again, with the receive region
    changing   another number of tokens in every call
    first      the first call of this form of a new Buffer; other Buffers made such calls before
    second     the call after it
    no region  the same call again, of a Buffer without a receive region: rows go through rings

All figures are medians. One rank, so that nothing waits for a peer; calls that wait for counts are
left out. `--no-launch` leaves the launches out, which shows this package's own part; so does a
machine without a GPU, over the CUDA backend with stubbed driver calls. `nodes`: two ranks that are
threads and nodes, on the host target, without launches. Calls of torch come first: they tell a
slow machine from a slow package. For times of ExpertParallel see time_layer.py.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import deep_comm
from deep_comm import local

HIDDEN, TOPK = 7168, 8
ROUNDS, CALLS = 30, 40
NUM_BUFFERS = 11  # for first calls
NUM_COUNTS = 8  # numbers of tokens, for calls that change them
HAS_GPU = torch.cuda.is_available()
Calls = dict[str, Callable[[], object]]
Forms = Callable[[deep_comm.Buffer, int, int], Calls]  # (buffer, tokens, most tokens)


def synchronize() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def microseconds(call: Callable[[], object]) -> float:
    """Median of rounds of calls back to back; the device is far behind the host."""
    rounds = []
    for _ in range(ROUNDS):
        synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - begin) / CALLS * 1e6)
    synchronize()
    return statistics.median(rounds)


def torch_calls(device: torch.device) -> Calls:
    x = torch.ones(16, HIDDEN, device=device).bfloat16()
    calls: Calls = {"torch.empty": lambda: torch.empty(16, HIDDEN, dtype=x.dtype, device=device)}
    if HAS_GPU:
        calls["torch: x + x"] = lambda: x + x
        calls["torch: event.record()"] = torch.cuda.Event().record
    return calls


def normal_forms(buffer: deep_comm.Buffer, num_tokens: int, max_tokens: int) -> Calls:
    experts, device = 256, buffer.device
    x = torch.randn(num_tokens, HIDDEN, device=device).bfloat16()
    weights, idx = torch.rand(num_tokens, experts, device=device).topk(TOPK)
    quantised = x.to(torch.float8_e4m3fn), torch.ones(num_tokens, HIDDEN // 128, device=device)
    routing = dict(topk_idx=idx, topk_weights=weights)
    num_ranks = buffer.group_size
    layout = {}
    if num_ranks == 1:  # by hand, so that no call of the Buffer comes before the timed ones
        layout = dict(
            num_tokens_per_rank=torch.full((1,), num_tokens, dtype=torch.int32, device=device),
            num_tokens_per_expert=idx.flatten().bincount(minlength=experts).int(),
            is_token_in_rank=torch.ones(num_tokens, 1, dtype=torch.bool, device=device),
        )
    rows, _, recv_weights, _, handle, _ = buffer.dispatch(x, **routing, num_experts=experts)
    config = deep_comm.Config(24, 8, 256)
    configured = buffer.dispatch(x, **routing, num_experts=experts, config=config)[4]
    bound = num_ranks * max_tokens
    calls: Calls = {
        "get_dispatch_layout": lambda: buffer.get_dispatch_layout(idx, experts),
        "cached dispatch": lambda: buffer.dispatch(x, handle=handle),
        "cached dispatch, config": lambda: buffer.dispatch(x, handle=configured, config=config),
        "cached dispatch, FP8": lambda: buffer.dispatch(quantised, handle=handle),
        "cached dispatch, cast": lambda: buffer.dispatch(x, handle=handle, use_fp8=True),
        "cached dispatch, async": lambda: buffer.dispatch(x, handle=handle, async_finish=True),
        "dispatch, num_worst_tokens": lambda: buffer.dispatch(
            x, **routing, num_experts=experts, num_worst_tokens=bound
        ),
        "combine": lambda: buffer.combine(rows, handle),
        "combine, weights": lambda: buffer.combine(rows, handle, topk_weights=recv_weights),
        "combine, async": lambda: buffer.combine(rows, handle, async_finish=True),
    }
    if layout:
        calls["the same, layout given"] = lambda: buffer.dispatch(
            x, **routing, **layout, num_worst_tokens=bound
        )
    return calls


def low_latency_forms(buffer: deep_comm.Buffer, num_tokens: int, max_tokens: int) -> Calls:
    experts, device = 8, buffer.device
    x = torch.randn(num_tokens, HIDDEN, device=device).bfloat16()
    weights, idx = torch.rand(num_tokens, experts, device=device).topk(TOPK)
    there, back = buffer.low_latency_dispatch, buffer.low_latency_combine
    calls: Calls = {}
    for name, options in (("", {}), (", compact", dict(compact=True))):
        handle = there(x, idx, max_tokens, experts, use_fp8=False, **options)[2]
        rows = torch.ones(handle.rows_shape, device=device, dtype=torch.bfloat16)

        def dispatch(options: dict[str, Any] = options, **more: Any) -> Any:
            return there(x, idx, max_tokens, experts, **options, **more)

        def combine(handle: Any = handle, rows: Any = rows, **more: Any) -> Any:
            return back(rows, idx, weights, handle, **more)

        calls[f"low_latency_dispatch{name}"] = dispatch
        calls[f"low_latency_combine{name}"] = combine
        if not name:
            calls |= {
                "low_latency_dispatch, BF16": lambda d=dispatch: d(use_fp8=False),
                "low_latency_dispatch and hook": lambda d=dispatch: d(return_recv_hook=True)[4](),
                "low_latency_combine and hook": lambda c=combine: c(return_recv_hook=True)[2](),
                "low_latency_dispatch, async": lambda d=dispatch: d(async_finish=True),
            }
    return calls


@contextlib.contextmanager
def launches_left_out(buffer: deep_comm.Buffer, num_rows: int, leave_out: bool) -> Iterator[None]:
    engine: Any = buffer._context.engine
    if leave_out:
        engine.skips_launches = True
        if hasattr(engine, "stub_counts"):  # nothing is launched that could bring counts
            engine.stub_counts = num_rows, num_rows, True, [0] * 256
    yield
    if leave_out:
        engine.skips_launches = False
        if hasattr(engine, "stub_counts"):
            engine.stub_counts = None


class Table:
    def __init__(self, group: Any, forms: Forms, num_tokens: int, leave_out: bool) -> None:
        self._group, self._forms = group, forms
        self._num_tokens, self._leave_out = num_tokens, leave_out
        first, second = self._first()
        self.columns = {
            "steady": self._steady(),
            "changing": self._changing(),
            "first": first,
            "second": second,
        }
        if forms is normal_forms:
            self.columns["no region"] = self._steady(num_direct_bytes=0)

    def _buffer(self, **options: Any) -> deep_comm.Buffer:
        size = deep_comm.Buffer.get_low_latency_rdma_size_hint(self._num_tokens, HIDDEN, 1, 8)
        return deep_comm.Buffer(
            self._group, 512 << 20, size, low_latency_mode=True, timeout_s=20, **options
        )

    def _make(self, buffer: deep_comm.Buffer, num_tokens: int) -> Calls:
        return self._forms(buffer, num_tokens, self._num_tokens)

    def _steady(self, **options: Any) -> dict[str, float]:
        with self._buffer(**options) as buffer:
            calls = self._make(buffer, self._num_tokens)
            for call in calls.values():
                call()
            with launches_left_out(buffer, self._num_tokens, self._leave_out):
                return {name: microseconds(call) for name, call in calls.items()}

    def _changing(self) -> dict[str, float]:
        with self._buffer() as buffer:
            counts = [
                self._num_tokens * step // NUM_COUNTS or 1 for step in range(1, 1 + NUM_COUNTS)
            ]
            sizes = [self._make(buffer, count) for count in counts]
            with launches_left_out(buffer, self._num_tokens, self._leave_out):
                found = {}
                for name in sizes[0]:
                    calls = itertools.cycle([calls[name] for calls in sizes])
                    found[name] = microseconds(lambda calls=calls: next(calls)())
                return found

    def _first(self) -> list[dict[str, float]]:
        """Of the first call and of the second one: each alone, with the device idle."""
        found: tuple[dict[str, list[float]], ...] = ({}, {})
        for _ in range(NUM_BUFFERS):
            with self._buffer() as buffer:
                calls = self._make(buffer, self._num_tokens)
                with launches_left_out(buffer, self._num_tokens, self._leave_out):
                    for (name, call), times in itertools.product(calls.items(), found):
                        synchronize()
                        begin = time.perf_counter()
                        call()
                        times.setdefault(name, []).append((time.perf_counter() - begin) * 1e6)
        # The process's first Buffer loads kernels.
        return [
            {name: statistics.median(each[1:]) for name, each in times.items()} for times in found
        ]


def nodes_columns(group: Any, num_tokens: int) -> dict[str, dict[str, float]]:
    steady: dict[str, float] = {}
    with deep_comm.Buffer(
        group, 512 << 20, 256 << 20, num_direct_bytes=64 << 20, ranks_per_node=1, device="cpu",
        timeout_s=120,
    ) as buffer:  # fmt: skip
        calls = normal_forms(buffer, num_tokens, num_tokens)
        for call in calls.values():
            call()
        group.barrier()
        if group.rank() == 0:
            with launches_left_out(buffer, num_tokens, True):
                steady = {name: microseconds(call) for name, call in calls.items()}
        group.barrier()
    return {"steady": steady}


def show(title: str, columns: dict[str, dict[str, float]]) -> None:
    print(f"\n{title:<34}" + "".join(f"{column:>11}" for column in columns))
    for name in next(iter(columns.values())):
        print(f"{name:<34}" + "".join(f"{times[name]:>11.1f}" for times in columns.values()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default="normal,low-latency")
    parser.add_argument(
        "--tokens",
        type=int,
        default=0,
        help="most tokens; default: 1024, low latency 128; 4 on CPU",
    )
    parser.add_argument("--no-launch", action="store_true")
    options = parser.parse_args()
    leave_out = options.no_launch or not HAS_GPU

    def table(group: Any, forms: Forms, num_tokens: int) -> dict[str, dict[str, float]]:
        columns = {"steady": {k: microseconds(v) for k, v in torch_calls(device).items()}}
        show("µs of the calling thread", columns)
        return Table(group, forms, num_tokens, leave_out).columns

    device = torch.device("cuda" if HAS_GPU else "cpu")
    for kind in options.kinds.split(","):
        default = 4 if not HAS_GPU else 128 if kind == "low-latency" else 1024
        num_tokens = options.tokens or default
        title = f"{kind}, {num_tokens} tokens" + (", no launches" if leave_out else "")
        if kind == "nodes":
            run = local.run(lambda group, n=num_tokens: nodes_columns(group, n), 2, timeout_s=300)
            show(title, run[0])
            continue
        forms = normal_forms if kind == "normal" else low_latency_forms
        with contextlib.ExitStack() as stack:
            if not HAS_GPU:
                sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
                import fake_cuda

                stack.enter_context(fake_cuda.installed()).is_silent = True
            run = local.run(
                lambda group, f=forms, n=num_tokens: table(group, f, n), 1, timeout_s=600
            )
        show(title, run[0])


if __name__ == "__main__":
    main()
