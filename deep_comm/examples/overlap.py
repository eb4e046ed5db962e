"""Communication behind computation: two batches in turn, and shared experts between send and
receive.

Runs the same model three times: one step after the other; with shared experts while tokens travel;
with the batch in two halves, one of which computes while the other one's tokens travel. Compares
the results bit by bit.

``--trace FOLDER`` says how much of the communication had computation beside it. It writes a Chrome
trace of rank 0 for each way and, with matplotlib, a picture by stream of all ways, overlap.png, and
an SVG for each. The host target has no streams: one thread does everything, and nothing is hidden.

Kernels run beside each other where each finds SMs. A library's matrix product takes all SMs as long
as it runs, so a dispatch after it waits for its end. With ``--leave-sms`` the products that run
beside communication leave some SMs free, and are about an eighth slower; those of the experts take
all. Halves of a batch must be large enough that their products are no slower than the whole one's.
"""

from __future__ import annotations

import ctypes
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

import deep_comm
from deep_comm.launch import add_ranks, device_of, on_ranks, say
from deep_comm.ranks.topology import first_expert, num_local_experts
from deep_comm.settings import command_line
from deep_comm.settings.command_line import at_least
from deep_comm.trace import picture

NUM_LAYERS = 3
NUM_PASSES, NUM_TURNS = 3, 3


@dataclass(frozen=True)
class Sizes:
    hidden: int
    intermediate: int
    experts: int
    topk: int


class Model:
    """Layers of something like attention, a gate, gated experts and a shared expert; weights from
    seeds."""

    def __init__(
        self,
        group: Any,
        sizes: Sizes,
        num_tokens: int,
        device: torch.device,
        mode: Any,
        free_sms: int,
    ) -> None:
        self.sizes = sizes
        self.leaving_sms = functools.partial(leaving_sms, device, free_sms)
        hidden, width = sizes.hidden, sizes.intermediate
        self.parallel = deep_comm.ExpertParallel(
            group, hidden=hidden, num_experts=sizes.experts, num_topk=sizes.topk,
            max_tokens=num_tokens, decode_tokens=num_tokens, mode=mode, device=device,
        )  # fmt: skip

        def weight(seed: int, *shape: int) -> Tensor:
            generator = torch.Generator(device).manual_seed(seed)
            values = torch.randn(shape, generator=generator, device=device) / shape[0] ** 0.5
            return values.to(torch.bfloat16)

        rank, num_ranks = group.rank(), group.size()
        self.first = first_expert(rank, sizes.experts, num_ranks)
        local = range(self.first, self.first + num_local_experts(rank, sizes.experts, num_ranks))
        self.mix, self.gate = weight(1, hidden, hidden), weight(2, hidden, sizes.experts)
        # Of every expert, gate and up projection side by side. The shared expert comes first.
        self.up = torch.stack([weight(100 + idx, hidden, 2 * width) for idx in (-1, *local)])
        self.down = torch.stack([weight(1000 + idx, width, hidden) for idx in (-1, *local)])

    def attention(self, x: Tensor) -> Tensor:
        """Row by row, so that a batch may be halved: only its cost is attention's."""
        return x + torch.tanh(x @ self.mix)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, idx = (x @ self.gate).float().softmax(-1).topk(self.sizes.topk)
        return idx, weights

    def compute(self, batch: deep_comm.ExpertBatch) -> Tensor:
        up, down = self.up[1:], self.down[1:]
        if batch.is_masked:
            return torch.bmm(_gated(torch.bmm(batch.masked(), up)), down).view(batch.x.shape)
        if batch.x.shape[0] == 0:
            return batch.x
        ends = batch.offsets[1:]
        return grouped_mm(_gated(grouped_mm(batch.x, up, ends)), down, ends)

    def shared_experts(self, x: Tensor) -> Tensor:
        return _gated(x @ self.up[0]) @ self.down[0]


def _gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def grouped_mm(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows of each group times the group's matrix; int32 [groups], where groups end."""
    if hasattr(torch.nn.functional, "grouped_mm"):
        return torch.nn.functional.grouped_mm(x, weights, offs=ends)
    return torch._grouped_mm(x, weights, offs=ends)  # before torch 2.10: GPUs alone


@contextmanager
def leaving_sms(device: torch.device, num_sms: int) -> Iterator[None]:
    """Matrix products that are queued inside leave so many SMs free.

    torch's grouped products listen to its carve-out, those of cuBLAS to the count of its handle.
    """
    if num_sms == 0 or device.type != "cuda":
        yield
        return
    most = torch.cuda.get_device_properties(device).multi_processor_count
    set_carveout = getattr(torch._C, "_set_sm_carveout_experimental", lambda num_sms: None)
    set_carveout(num_sms)
    _set_cublas_sms(most - num_sms)
    try:
        yield
    finally:
        set_carveout(None)
        _set_cublas_sms(0)


def _set_cublas_sms(num_sms: int) -> None:
    """Of torch's handle of this thread; 0: all. torch has no function for it."""
    major = (torch.version.cuda or "").split(".")[0]
    library = _load(f"libcublas.so.{major}")  # the one that torch has loaded
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    status = library.cublasSetSmCountTarget(handle, num_sms)
    if status != 0:
        raise RuntimeError(f"cublasSetSmCountTarget({num_sms}) returned {status}")


_load = functools.cache(ctypes.CDLL)


def one_after_the_other(model: Model, x: Tensor) -> Tensor:
    for _ in range(NUM_LAYERS):
        h = model.attention(x)
        x = h + (model.parallel(h, *model.route(h), model.compute) + model.shared_experts(h))
    return x


def shared_between(model: Model, x: Tensor) -> Tensor:
    for _ in range(NUM_LAYERS):
        h = model.attention(x)
        with model.parallel.dispatch_async(h, *model.route(h)) as sent, model.leaving_sms():
            shared = model.shared_experts(h)  # while tokens travel
        batch = sent.result()
        with model.parallel.combine_async(batch, model.compute(batch)) as returning:
            pass  # nothing is left to do here; forward(shared=) is this whole block
        x = h + (returning.result() + shared)
    return x


def two_batches(model: Model, x: Tensor) -> Tensor:
    """Each half computes what it has while the other half's rows are on their way.

    a   attention ·          experts ·           (next layer) attention
    b             attention ·        experts ·
        ├ dispatch a ┤├ dispatch b ┤├ combine a ┤├ combine b ┤
    """
    parallel = model.parallel
    a, b = x.split([x.shape[0] - x.shape[0] // 2, x.shape[0] // 2])
    finish_b: Callable[[], Tensor] = functools.partial(torch.clone, b)
    for _ in range(NUM_LAYERS):
        with model.leaving_sms():
            h_a = model.attention(a)  # while b's sums of the layer before travel
        sent_a = parallel.dispatch_async(h_a, *model.route(h_a))
        with model.leaving_sms():
            h_b = model.attention(finish_b())  # while a's tokens travel
        batch_a = sent_a.result()
        sent_b = parallel.dispatch_async(h_b, *model.route(h_b))
        with model.leaving_sms():
            shared_a = model.shared_experts(h_a)  # while b's tokens travel
        rows_a = model.compute(batch_a)
        batch_b = sent_b.result()
        back_a = parallel.combine_async(batch_a, rows_a)
        with model.leaving_sms():
            shared_b = model.shared_experts(h_b)  # while a's sums travel
        rows_b = model.compute(batch_b)
        a = h_a + (back_a.result() + shared_a)
        back_b = parallel.combine_async(batch_b, rows_b)

        def finish_b(h: Tensor = h_b, back: Any = back_b, shared: Tensor = shared_b) -> Tensor:
            return h + (back.result() + shared)

    return torch.cat([a, finish_b()])


WAYS = {"sequential": one_after_the_other, "shared": shared_between, "two-batch": two_batches}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def _named_ranges(model: Model) -> Iterator[None]:
    """On the host target communication is calls, not kernels: they get names in the trace."""
    calls: Any = model.parallel._steps.calls
    plain = vars(calls).copy()

    def named(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with record_function(picture.RANGE + name):
                result = call(*args)
            if callable(result):  # receives what has been sent
                return named(name + " receive", result)
            if isinstance(result, tuple):
                return (result[0], named(name + " receive", result[1]))
            return result

        return run

    for name in ("decode", "prefill", "begin_decode", "begin_prefill"):
        setattr(calls, name, named("dispatch", plain[name]))
    for name in ("combine", "begin_combine"):
        setattr(calls, name, named("combine", plain[name]))
    try:
        yield
    finally:
        vars(calls).update(plain)


def _trace(
    way: str, model: Model, step: Callable[[], Tensor], device: torch.device, folder: Path
) -> Sequence[picture.Span]:
    on_gpu = device.type == "cuda"
    ranges = nullcontext() if on_gpu else _named_ranges(model)
    file = folder / f"{way}.json"
    with ranges:
        spans = picture.record(file, step, on_gpu)
    print(f"{way}: {picture.summary(spans)}; {file}", flush=True)
    return spans


def _share_of_equal_tokens(y: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of the rows of ``y``, the share that differs from ``wanted``'s by rounding alone."""
    difference = (y.float() - wanted.float()).norm(dim=1)
    return (difference <= 0.02 * wanted.float().norm(dim=1)).float().mean().item()


def rank_main(
    group: Any, num_tokens: int, sizes: Sizes, mode: str, folder: str | None, free_sms: int
) -> bool:
    device = device_of(group)
    rank = group.rank()
    model = Model(group, sizes, num_tokens, device, mode, free_sms)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, sizes.hidden, generator=generator).to(device, torch.bfloat16)
    results: dict[str, Tensor] = {}
    times_ms: dict[str, list[float]] = {way: [] for way in WAYS}
    with torch.inference_mode():
        # A GPU does not stay as fast as it was: the ways take turns.
        for turn in range(NUM_TURNS if device.type == "cuda" else 1):
            for way, run in WAYS.items():
                if turn == 0:
                    results[way] = run(model, x)  # also the warm-up
                run(model, x)
                _synchronize(device)
                torch.distributed.barrier(group)
                started = time.perf_counter()
                for _ in range(NUM_PASSES):
                    run(model, x)
                _synchronize(device)
                times_ms[way].append((time.perf_counter() - started) / NUM_PASSES / 1e-3)
        sequential_ms = statistics.median(times_ms["sequential"])
        for way in WAYS:
            pass_ms = statistics.median(times_ms[way])
            say(
                group,
                f"{way:>10}: {pass_ms:.2f} ms a pass of {NUM_LAYERS} layers, "
                f"{pass_ms / sequential_ms - 1:+.1%}",
            )
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            traces: dict[str, Sequence[picture.Span]] = {}
            for way, run in WAYS.items():
                torch.distributed.barrier(group)
                if rank == 0:
                    step = lambda run=run: run(model, x)
                    traces[way] = _trace(way, model, step, device, Path(folder))
                else:
                    run(model, x)
                    _synchronize(device)
            if rank == 0:
                file = Path(folder) / "overlap.png"
                is_written = picture.write(file, traces, device.type == "cpu")
                for way, spans in traces.items():
                    picture.write(Path(folder) / f"{way}.svg", {way: spans}, device.type == "cpu")
                print(file if is_written else picture.MISSING, flush=True)
    model.parallel.destroy()
    wanted = results["sequential"]
    if device.type == "cpu":
        is_right = all(torch.equal(y, wanted) for y in results.values())
    else:
        # Halves are other shapes, for which a GPU's matrix products may add in another order, and a
        # token whose experts are nearly level may then choose others in the next layer.
        share = min(_share_of_equal_tokens(y, wanted) for y in results.values())
        print(f"rank {rank}: {share:.2%} of the tokens are the same in all ways", flush=True)
        is_right = share >= 0.97
    say(group, "all ways give the same results" if is_right else "the ways give OTHER results")
    return is_right


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line.parser(
        "examples overlap", __doc__ or "", "deep_comm examples overlap --trace traces"
    )
    on_gpu = torch.cuda.is_available()

    def add(
        name: str, on_host: int, on_device: int, text: str, smallest: int = 1, multiple: int = 1
    ) -> None:
        kind = at_least(smallest, multiple=multiple)
        parser.add_argument(name, type=kind, default=on_device if on_gpu else on_host, help=text)

    add("--tokens", 48, 16384, "tokens per rank")
    add("--hidden", 64, 7168, "columns of a row", 8, 8)
    add("--intermediate", 32, 2048, "width of an expert")
    add("--experts", 16, 16, "experts of all ranks together")
    add("--topk", 4, 2, "experts per token")
    add("--leave-sms", 0, 0, "SMs that products beside communication leave free", 0)
    parser.add_argument("--mode", choices=("prefill", "decode"), default="prefill")
    add_ranks(parser, 2)
    parser.add_argument("--trace", metavar="FOLDER", help="write traces and pictures there")
    parsed = parser.parse_args(arguments)
    sizes = Sizes(parsed.hidden, parsed.intermediate, parsed.experts, parsed.topk)
    return on_ranks(
        rank_main, parsed.ranks, parsed.tokens, sizes, parsed.mode, parsed.trace, parsed.leave_sms
    )


if __name__ == "__main__":
    sys.exit(main())
