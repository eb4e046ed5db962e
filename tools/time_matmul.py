"""Which configuration of the Triton product of deep_comm.tp is the fastest, on one GPU?

    python tools/time_matmul.py [--ranks 2] [--shapes qkv,up] [--seconds 150] [--sms 0]

Needs a Hopper GPU, torch and Triton 3.6; the package need not be built. Checks first: every
configuration against torch.matmul, rows that arrive while the product runs (copied by copy engines,
a chunk and then its word), a chunk that never comes, and ranks beside each other on this GPU that
scatter their products. Then, for each shape: median µs of every configuration, by its number, and
of the best one if each tile also waits for its rows, whose words are all set. `bench --mode tp` has
the fused products beside cuBLAS.

`--ranks`: of tensor parallelism, which divides N of the all-gather shapes and K of the others.
`--sms`: SMs of the product; 0: all. The exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import triton
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

ROOT = Path(__file__).resolve().parents[1]
CHUNKS = 8
TIMEOUT_NS = 2_000_000_000


def load(name: str) -> ModuleType:
    """A module of the package by its file: the package itself would need a build."""
    path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


load("deep_comm.triton")
tp = load("deep_comm.tp.product")


@dataclass(frozen=True)
class Shape:
    name: str
    m: int
    n: int
    k: int


def shapes(ranks: int) -> list[Shape]:
    """Of the targets: all-gather + product, product + reduce-scatter, product + all-reduce."""
    return [
        *(Shape("70B up", m, 28672 // ranks, 8192) for m in (4096, 8192, 16384)),
        Shape("70B qkv", 4096, 10240 // ranks, 8192),
        *(Shape("DSV3 o_proj", m, 7168, 16384 // ranks) for m in (4096, 8192)),
        *(Shape("70B down", m, 8192, 28672 // ranks) for m in (1024, 2048, 4096, 8192)),
    ]


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5
    return x, weight, torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)


def waits(sequence: int) -> tp.Waits:
    return tp.Waits(
        sequence=torch.full((1,), sequence, device="cuda", dtype=torch.int64),
        fault=torch.zeros(1, device="cuda", dtype=torch.int64),
        timeout_ns=TIMEOUT_NS,
    )


def gathering(x: torch.Tensor, num_ranks: int, rank: int, sequence: int) -> tp.Gathered:
    """x [R * S, K], whose words say 7 and not yet ``sequence`` if that is greater."""
    shard = x.shape[0] // num_ranks
    return tp.Gathered(
        rows=x,
        words=torch.full((num_ranks, CHUNKS), 7, device="cuda", dtype=torch.int64),
        chunk_rows=-(-shard // CHUNKS // 128) * 128,
        rank=rank,
        waits=waits(sequence),
    )


def own_rows(x: torch.Tensor, gathered: tp.Gathered) -> torch.Tensor:
    shard = x.shape[0] // gathered.words.shape[0]
    return x[gathered.rank * shard : (gathered.rank + 1) * shard].clone()


def differs(out: torch.Tensor, expected: torch.Tensor) -> str:
    """ "" if equal but for the order of sums: one last place of bfloat16."""
    worst = (out.float() - expected.float()).abs() - expected.float().abs() / 64
    where = worst.nan_to_num(float("inf")).argmax().item()
    if worst.flatten()[where] <= 2**-7:
        return ""
    row, column = divmod(where, out.shape[1])
    got, wanted = out[row, column].item(), expected[row, column].item()
    return f"out[{row}, {column}] is {got}, torch.matmul has {wanted}"


def check_late_rows(config: tp.ProductConfig, num_programs: int) -> str:
    """Rows of three other ranks come from the host, the nearest rank last."""
    m, n, k, rank = 4096, 1024, 1024, 2
    x, weight, out = operands(m, n, k)
    expected = x @ weight.t()
    source = x.cpu().pin_memory()
    eight = torch.full((1,), 8, dtype=torch.int64).pin_memory()
    gathered = gathering(x, 4, rank, sequence=8)
    own = own_rows(x, gathered)
    x.fill_(float("nan"))
    copies = torch.cuda.Stream()
    torch.cuda.synchronize()
    tp.product(own, weight.t(), config, out=out, num_programs=num_programs, gathered=gathered)
    with torch.cuda.stream(copies):
        for peer in (3, 0, 1):
            for chunk in reversed(range(1024 // gathered.chunk_rows)):
                first = 1024 * peer + chunk * gathered.chunk_rows
                part = slice(first, first + gathered.chunk_rows)
                x[part].copy_(source[part], non_blocking=True)
                gathered.words[peer, chunk : chunk + 1].copy_(eight, non_blocking=True)
    torch.cuda.synchronize()
    if gathered.waits.fault.item() != 0:
        return f"rank {gathered.waits.fault.item() - 1} was not seen in time"
    return differs(out, expected)


def check_absent_chunk(config: tp.ProductConfig, num_programs: int) -> str:
    """A chunk that never comes: the product ends, and says whose it was."""
    x, weight, out = operands(2048, 1024, 1024)
    gathered = gathering(x, 2, 0, sequence=7)
    gathered.words[1, 3] = 6
    torch.cuda.synchronize()
    begin = time.perf_counter()
    tp.product(
        own_rows(x, gathered),
        weight.t(),
        config,
        out=out,
        num_programs=num_programs,
        gathered=gathered,
    )
    torch.cuda.synchronize()
    took = time.perf_counter() - begin
    if gathered.waits.fault.item() != 2:
        return f"fault is {gathered.waits.fault.item()}, should be 2"
    return "" if took < 2 * TIMEOUT_NS / 1e9 else f"it took {took:.1f} s"


def scattering(rank: int, segments: list[torch.Tensor], shard: int, columns: int) -> tp.Scattered:
    """segments: bytes of each rank, on this GPU: words [R, 64], then slots [R, shard, columns]."""
    num_ranks, own = len(segments), segments[rank]
    num_words = 64 * num_ranks
    words = own[: 8 * num_words].view(torch.int64).view(num_ranks, 64)
    return tp.Scattered(
        bases=torch.tensor([segment.data_ptr() for segment in segments], device="cuda"),
        slot_offset=8 * num_words + 2 * rank * shard * columns,
        own_slots=own[8 * num_words :].view(torch.bfloat16).view(num_ranks, shard, columns),
        words_offset=8 * 64 * rank,
        own_words=words,
        counters=torch.zeros_like(words, dtype=torch.int32),
        rank=rank,
        waits=waits(0),
    )


def check_scattered(config: tp.ProductConfig, num_programs: int) -> str:
    """Ranks beside each other on this GPU, twice; bits of the sum in float32 of rounded parts."""
    for num_ranks, shard, n, k in ((1, 256, 320, 512), (2, 1280, 1040, 520), (3, 384, 1536, 1024)):
        inputs = [operands(num_ranks * shard, n, k)[:2] for _ in range(num_ranks)]
        like = inputs[0][0].new_empty
        num_bytes = num_ranks * (8 * 64 + 2 * shard * n)
        segments = [torch.zeros(num_bytes, dtype=torch.uint8, device="cuda") for _ in inputs]
        places = [scattering(rank, segments, shard, n) for rank in range(num_ranks)]
        for place in places:
            place.own_slots.fill_(float("nan"))
        streams = [torch.cuda.Stream() for _ in inputs]
        parts = []
        for x, weight in inputs:
            parts.append(like(num_ranks * shard, n))
            tp.product(x, weight.t(), config, out=parts[-1], num_programs=num_programs)
        for number in range(1, 4):
            outs = [like(shard, n).fill_(float("nan")) for _ in inputs]
            for place in places:
                place.waits.sequence.fill_(number)
            torch.cuda.synchronize()
            # The first time one after the other, which loads the kernel; it waits for nobody then.
            for rank, (x, weight) in enumerate(inputs):
                if number == 1:
                    places[rank].waits.fault.fill_(-1)
                with torch.cuda.stream(streams[rank]):
                    tp.scattered_product(
                        x,
                        weight.t(),
                        config,
                        out=outs[rank],
                        num_programs=num_programs // num_ranks,
                        scattered=places[rank],
                    )
                if number == 1:
                    torch.cuda.synchronize()
                    places[rank].waits.fault.zero_()
            torch.cuda.synchronize()
            if number == 1:
                continue
            total = torch.zeros(num_ranks * shard, n, device="cuda")
            for part in parts:
                total += part.float()
            for rank, out in enumerate(outs):
                fault = places[rank].waits.fault.item()
                if fault != 0:
                    return f"rank {rank} of {num_ranks}: rank {fault - 1} was not seen in time"
                if places[rank].counters.any():
                    return "counters are left"
                wanted = total[rank * shard : (rank + 1) * shard].to(out.dtype)
                if not torch.equal(out.view(torch.int16), wanted.view(torch.int16)):
                    where = (out != wanted).nonzero()[0].tolist()
                    return (
                        f"scattered, rank {rank} of {num_ranks}, run {number}: differs at {where}"
                    )
    return ""


def check(config: tp.ProductConfig, num_programs: int) -> str:
    for m, n, k in ((1024, 1536, 2048), (1000, 1040, 520)):
        x, weight, out = operands(m, n, k)
        for matrix in (weight.t(), weight.t().contiguous()):
            out.fill_(float("nan"))
            tp.product(x, matrix, config, out=out, num_programs=num_programs)
            wrong = differs(out, x @ weight.t())
            if wrong:
                return f"{wrong} ({m} x {n} x {k})"
    return (
        check_late_rows(config, num_programs)
        or check_absent_chunk(config, num_programs)
        or check_scattered(config, num_programs)
    )


def usable(num_programs: int, skipped: set[int]) -> tuple[dict[int, tp.ProductConfig], bool]:
    """The configurations that this GPU and this Triton take, and whether all of them are right."""
    found, is_right = {}, True
    for number, config in enumerate(tp.CONFIGS):
        if number in skipped:
            continue
        begin = time.perf_counter()
        try:
            wrong = check(config, num_programs)
        except torch.AcceleratorError:
            print(f"the context is lost: leave it out by --skip {number}: {label(config)}")
            raise
        except (OutOfResources, CompilationError, RuntimeError) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            print(f"not here: {number}, {label(config)}: {why[:100]}", flush=True)
            continue
        took = time.perf_counter() - begin
        print(
            f"{'WRONG' if wrong else 'right'}: {number}, {label(config)}, {took:.1f} s", flush=True
        )
        if wrong:
            is_right = False
            print(f"    {wrong}")
        else:
            found[number] = config
    return found, is_right


def label(config: tp.ProductConfig) -> str:
    marks = [
        f"{config.block_m}x{config.block_n}x{config.block_k}",
        f"stages {config.num_stages}",
        f"group {config.group_m}",
        *(["flat"] if config.flatten else []),
    ]
    return " ".join(marks)


def microseconds(call: Callable[[], object]) -> float:
    """Of a call, the median of seven rounds of four."""
    call()
    rounds = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(4):
            call()
        end.record()
        end.synchronize()
        rounds.append(begin.elapsed_time(end) / 4 * 1e3)
    return statistics.median(rounds)


def time_shape(
    shape: Shape, configs: dict[int, tp.ProductConfig], num_programs: int, num_ranks: int
) -> str:
    x, weight, out = operands(shape.m, shape.n, shape.k)
    gathered = gathering(x, num_ranks, 0, sequence=7)

    def took(
        config: tp.ProductConfig, rows: torch.Tensor, gathered: tp.Gathered | None = None
    ) -> float:
        return microseconds(
            lambda: tp.product(
                rows, weight.t(), config, out=out, num_programs=num_programs, gathered=gathered
            )
        )

    times = {number: took(config, x) for number, config in configs.items()}
    best = min(times, key=times.__getitem__)
    waiting = took(configs[best], own_rows(x, gathered), gathered)
    cells = " ".join(f"{number}: {us:.1f}" for number, us in times.items())
    return (
        f"{shape.name:12} {shape.m:6} {shape.n:6} {shape.k:6}  {cells}  best {best},"
        f" waiting {waiting:.1f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shapes", default="", help="parts of names; all if empty")
    parser.add_argument("--seconds", type=float, default=150, help="no new shape after this time")
    parser.add_argument("--sms", type=int, default=0)
    parser.add_argument("--skip", default="", help="numbers of configurations to leave out")
    options = parser.parse_args()
    begin = time.perf_counter()
    torch.manual_seed(0)
    properties = torch.cuda.get_device_properties(0)
    num_programs = options.sms or properties.multi_processor_count
    print(
        f"{properties.name}, {num_programs} SMs, torch {torch.__version__},"
        f" CUDA {torch.version.cuda}, Triton {triton.__version__}"
    )
    configs, is_right = usable(
        num_programs, {int(number) for number in options.skip.split(",") if number}
    )
    print(f"{len(configs)} of {len(tp.CONFIGS)} configurations are right", flush=True)
    if not configs:
        return 1
    print(f"{'':12} {'M':>6} {'N':>6} {'K':>6}  µs by number of the configuration")
    wanted = [part for part in options.shapes.split(",") if part]
    for shape in shapes(options.ranks):
        if wanted and not any(part in shape.name for part in wanted):
            continue
        if time.perf_counter() - begin > options.seconds:
            print(f"out of time before {shape}")
            break
        print(time_shape(shape, configs, num_programs, options.ranks), flush=True)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
