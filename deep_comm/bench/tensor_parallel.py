"""``--mode tp``: collectives and products of deep_comm.tp beside their rivals.

Everything is checked first, with small integers whose sums are exact in any order; then timed with
normal random values, since a multiplier's power, and so its clock, depends on them. The ways to do
one thing take turns. ``--store`` makes the fastest method of each product the choice of
``method="auto"`` on machines like this one (deep_comm.tuning). ``--trace`` draws what overlaps.

Column "floor": the product alone on this GPU, or the received bytes at the copy engines' rate,
whichever is longer. "rival": the fastest rival's time over this one.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deep_comm import tp, tuning
from deep_comm.bench import link
from deep_comm.bench.measure import Timing, Work, nccl_group, require_on_all_ranks, time_in_turns
from deep_comm.bench.names import PRODUCTS, TP_COLLECTIVES
from deep_comm.bench.options import Options
from deep_comm.bench.report import heading, write
from deep_comm.settings.command_line import Progress
from deep_comm.symmetric import SymmetricMemory
from deep_comm.tp.operands import METHODS
from deep_comm.tp.torch_ops import enable_torch_memory
from deep_comm.trace import picture

OWN = METHODS[1:]
_COLUMNS = 8192  # of a collective's rows
_NUM_TRACED = 3  # calls; the last one is drawn: ranks begin the first one at different times
Ways = dict[str, Callable[[], Any]]
"""By name; rivals' names begin with a library's."""


@dataclass(frozen=True)
class Case:
    """rows: of a product's x on all ranks, or of a collective's whole tensor."""

    name: str  # of PRODUCTS or TP_COLLECTIVES
    op: str
    rows: int
    depth: int
    columns: int

    @property
    def num_bytes(self) -> int:
        """Of the tensor that a collective moves, bf16."""
        depth = self.depth if self.op == "all_gather_matmul" else self.columns
        return 2 * self.rows * depth

    def staged(self, num_ranks: int) -> int:
        """``staging_bytes`` that it needs. In one shot every rank pushes all of x."""
        times = 2 if "all_reduce" in self.op else 1
        return self.num_bytes * (max(times, num_ranks) if self.op == "all_reduce" else times)

    def received(self, num_ranks: int) -> float:
        """Bytes that a rank receives, at least."""
        times = 2 if "all_reduce" in self.op else 1
        return times * self.num_bytes * (num_ranks - 1) / num_ranks


@dataclass(frozen=True)
class Line:
    case: Case
    who: str
    timing: Timing
    is_rival: bool
    floor_us: float | None = None
    rival: float | None = None  # the fastest rival's time over this one

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self.case), "who": self.who, "is_rival": self.is_rival,
                "floor_us": self.floor_us, "rival": self.rival, **asdict(self.timing)}  # fmt: skip


@dataclass(frozen=True)
class Figures:
    lines: list[Line]
    notes: list[str]
    gb_per_s: float | None  # of the copy engines


def cases(options: Options, num_ranks: int) -> Iterator[Case]:
    for name in options.ops:
        if name in TP_COLLECTIVES:
            for megabytes in options.mb:
                columns = max(8, _COLUMNS // options.divide)
                rows = int(megabytes * 1e6) // (2 * columns) // num_ranks * num_ranks
                yield Case(name, TP_COLLECTIVES[name], max(rows, num_ranks), 0, columns)
        else:
            op, depth, columns, _ = PRODUCTS[name]
            of_rank = (depth, columns // num_ranks) if op == "all_gather_matmul" else (
                depth // num_ranks, columns
            )  # fmt: skip
            for tokens in options.tokens:
                rows = max(1, tokens // num_ranks) * num_ranks
                # Multiples of 8, which a fused product needs.
                extents = [max(8, it // options.divide // 8 * 8) for it in of_rank]
                yield Case(name, op, rows, *extents)


# ---- what is compared ----------------------------------------------------------------------------


class Inputs:
    """Of one case: x, a weight, and what gathers and sums are."""

    def __init__(self, case: Case, device: torch.device, *, is_exact: bool) -> None:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        generator = torch.Generator(device).manual_seed(1000 + rank)
        is_gathered = case.op.startswith("all_gather")
        rows = case.rows // num_ranks if is_gathered else case.rows
        depth = case.depth or case.columns

        def tensor(*shape: int) -> Tensor:
            if not is_exact:
                return torch.randn(shape, generator=generator, device=device).bfloat16()
            return torch.randint(-1, 2, shape, generator=generator, device=device).bfloat16()

        self.x = tensor(rows, depth)
        self.weight = tensor(depth, case.columns).div_(depth**0.5 if not is_exact else 1)
        if is_exact:
            keep = torch.rand(self.weight.shape, generator=generator, device=device) < 8 / depth
            self.weight *= keep


def own_ways(case: Case, inputs: Inputs, memory: SymmetricMemory, options: Options) -> Ways:
    x, weight = inputs.x, inputs.weight
    found: Ways = {}
    if case.depth:
        call: Any = getattr(tp, case.op)
        for method in OWN:
            if method == "fused" and not options.on_gpu:
                continue

            def product(method: str = method) -> Any:
                out = call(x, weight, memory, method=method)
                return out[1][0] if isinstance(out, tuple) else out

            found[method] = product
        return found
    collective: Any = getattr(tp, case.op)
    for sms in options.sms:
        name = "" if sms is None else f" {sms} SMs"
        if case.op == "all_reduce":
            for method in ("one_shot", "two_shot"):
                found[method + name] = functools.partial(
                    collective, x, memory, method=method, num_sms=sms
                )
        else:
            found["kernel" + name] = functools.partial(collective, x, memory, num_sms=sms)
    if case.op == "all_gather":
        place = memory.empty((case.rows, case.columns), x.dtype)
        in_place = place.local.chunk(memory.group_size)[memory.rank].copy_(x)
        found["copy engines"] = lambda: tp.all_gather(in_place, memory, out=place)
    return found


def rival_ways(case: Case, inputs: Inputs) -> Ways:
    """NCCL with cuBLAS, and torch's fused ops where torch has memory for them."""
    x, weight, group = inputs.x, inputs.weight, nccl_group()
    num_ranks = dist.get_world_size()
    gathered = x.new_empty((case.rows, x.shape[1]))
    part = x.new_empty((case.rows // num_ranks, case.columns))

    def gather() -> Tensor:
        dist.all_gather_into_tensor(gathered, x, group=group)
        return gathered

    def scatter(whole: Tensor) -> Tensor:
        dist.reduce_scatter_tensor(part, whole, group=group)
        return part

    def reduce(whole: Tensor) -> Tensor:
        dist.all_reduce(whole, group=group)
        return whole

    if case.op == "all_gather":
        own = gathered.chunk(num_ranks)[dist.get_rank()].copy_(x)

        def gather_in_place() -> Tensor:
            dist.all_gather_into_tensor(gathered, own, group=group)
            return gathered

        return {"NCCL": gather, "NCCL in place": gather_in_place}
    if not case.depth:
        return {"NCCL": lambda: scatter(x) if case.op == "reduce_scatter" else reduce(x.clone())}
    ops, name_of_group = torch.ops.symm_mem, group.group_name
    if case.op == "all_gather_matmul":
        return {
            "cuBLAS + NCCL": lambda: gather() @ weight,
            "torch fused": lambda: ops.fused_all_gather_matmul(
                x, [weight], 0, name_of_group, return_A=False
            )[1][0],
        }
    if case.op == "matmul_reduce_scatter":
        return {
            "cuBLAS + NCCL": lambda: scatter(x @ weight),
            "torch fused": lambda: ops.fused_matmul_reduce_scatter(
                x, weight, "sum", 0, name_of_group
            ),
        }
    return {"cuBLAS + NCCL": lambda: reduce(x @ weight)}


def expected(case: Case, inputs: Inputs) -> Tensor:
    """By torch.distributed over gloo; sums of these inputs are exact in any order."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    x = inputs.x.cpu()
    if case.op.startswith("all_gather"):
        parts = [torch.empty_like(x) for _ in range(num_ranks)]
        dist.all_gather(parts, x)
        whole = torch.cat(parts).to(inputs.x.device)
        return whole @ inputs.weight if case.depth else whole
    summed = (inputs.x @ inputs.weight if case.depth else inputs.x).float().cpu()
    dist.all_reduce(summed)
    total = summed.to(inputs.x.device).bfloat16()
    return total if "all_reduce" in case.op else total.chunk(num_ranks)[rank]


# ---- a run ---------------------------------------------------------------------------------------


class Runner:
    """One rank."""

    def __init__(self, options: Options, device: torch.device, say: Callable[[str], None]) -> None:
        self._options, self._device, self._say = options, device, say
        self._num_ranks = dist.get_world_size()
        self._progress = Progress(dist.get_rank() == 0)
        self._notes: list[str] = []

    def run(self) -> Figures:
        options, found = self._options, []
        wanted = list(cases(options, self._num_ranks))
        if options.on_gpu and not options.no_rivals:
            enable_torch_memory(nccl_group().group_name)
        self._say(
            f"{self._num_ranks} ranks on {options.device}, bf16; microseconds, slowest rank\n"
            + row(None, ())
        )
        gb_per_s = None
        if options.on_gpu and self._num_ranks > 1:
            short = replace(options.effort, num_rounds=2, num_single_calls=1, num_host_calls=0)
            gb_per_s = link.measure(self._device, 14336, short).copy_ring_gb_per_s
        staging = max(case.staged(self._num_ranks) for case in wanted) + (1 << 16)
        # Of all-gathers by copy engines, checked and timed: each takes a tensor.
        places = sum(2 * case.num_bytes + 256 for case in wanted if case.op == "all_gather")
        with (
            torch.inference_mode(),
            SymmetricMemory(
                dist.group.WORLD, places, staging_bytes=staging, device=self._device,
                timeout_s=max(5.0, options.deadline_s / 4),
            ) as memory,
        ):  # fmt: skip
            for case in wanted:
                self._progress.step(f"{case.name}, {case.rows} rows")
                lines = self._case(case, memory, gb_per_s)
                for line in lines:
                    self._say(row(line, lines))
                found += lines
            # The profiler makes later calls slower, also when it has ended.
            for case in wanted if options.trace else ():
                if case.depth:
                    self._progress.step(f"trace of {case.name}, {case.rows} rows")
                    self._trace(case, memory)
            memory.check()
        return Figures(found, self._notes, gb_per_s)

    def _ways(self, case: Case, memory: SymmetricMemory, *, is_exact: bool) -> tuple[Ways, Ways]:
        inputs = Inputs(case, self._device, is_exact=is_exact)
        has_rivals = self._options.on_gpu and not self._options.no_rivals
        rivals = rival_ways(case, inputs) if has_rivals else {}
        own = own_ways(case, inputs, memory, self._options)
        if is_exact:
            want = expected(case, inputs)
            for name, way in list(own.items()) + list(rivals.items()):
                for _ in range(2):
                    is_right = torch.equal(way(), want)
                    require_on_all_ranks(is_right, f"{case.name}, {case.rows} rows, {name}")
        elif case.depth:
            own["product alone"] = self._alone(case, inputs)
        return own, rivals

    def _alone(self, case: Case, inputs: Inputs) -> Callable[[], Any]:
        rows = torch.randn(case.rows, case.depth, device=self._device).bfloat16()
        return lambda: rows @ inputs.weight

    def _case(self, case: Case, memory: SymmetricMemory, gb_per_s: float | None) -> list[Line]:
        self._ways(case, memory, is_exact=True)
        own, rivals = self._ways(case, memory, is_exact=False)
        works = [_as_work(way) for way in (own | rivals).values()]
        timings, _ = time_in_turns(works, self._options.effort, self._device)
        times = dict(zip((*own, *rivals), timings, strict=True))
        moved_us = None if gb_per_s is None else case.received(self._num_ranks) / gb_per_s / 1e3
        alone = times.pop("product alone", None)
        floor = max((it for it in (moved_us, alone and alone.mean_us) if it), default=None)
        best = min((times[name].mean_us for name in rivals), default=None)
        if self._options.on_gpu and dist.get_rank() == 0:
            self._notes.append(f"{case.name}, {case.rows} rows: clocks, power {clocks()}")
        return [
            Line(case, name, timing, name in rivals, floor, best and best / timing.mean_us)
            for name, timing in times.items()
        ]

    def _trace(self, case: Case, memory: SymmetricMemory) -> None:
        folder = self._options.trace
        own, rivals = self._ways(case, memory, is_exact=False)
        spans: dict[str, Sequence[picture.Span]] = {}
        for name, way in (own | rivals).items():

            def calls(way: Callable[[], Any] = way) -> None:
                for _ in range(_NUM_TRACED):
                    way()

            dist.barrier()
            if dist.get_rank() != 0:
                calls()
                continue
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"{case.name} {case.rows} {name}.json".replace(" ", "-")
            try:
                spans[name] = picture.last_of(picture.record(file, calls, True), _NUM_TRACED)
            except ValueError as error:
                self._notes.append(f"{file.name}: {error}")
        drawn = folder / f"{case.name} {case.rows}.png".replace(" ", "-")
        if spans and not picture.write(drawn, spans, False) and picture.MISSING not in self._notes:
            self._notes.append(picture.MISSING)


def _as_work(way: Callable[[], Any]) -> Work:
    return lambda _call: way()


def clocks() -> str:
    """Right after the work; what the driver says of every GPU."""
    command = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return "clocks unknown"
    return "; ".join(said.split("\n")).strip("; ")


COLUMNS = ("operation", "M", "N", "K", "MB", "by", "time us", "p50", "floor us", "rival", "")


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def row(line: Line | None, others: Sequence[Line]) -> str:
    """None: the heading. The last cell marks the fastest of a case."""
    cells: Sequence[str] = COLUMNS
    if line is not None:
        case, timing = line.case, line.timing
        is_best = timing.mean_us == min(it.timing.mean_us for it in others)
        cells = (case.name, str(case.rows), str(case.columns), str(case.depth or "-"),
                 f"{case.num_bytes / 1e6:.1f}", line.who, _number(timing.mean_us),
                 _number(timing.p50_us), _number(line.floor_us), _number(line.rival, 3),
                 "*" if is_best else "")  # fmt: skip
    widths = (16, 6, 6, 6, 7, 16, 9, 9, 9, 6, 1)
    return " ".join(
        cell.ljust(width) if place in (0, 5) else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ).rstrip()


def choices(lines: Sequence[Line], num_ranks: int) -> list[dict[str, Any]]:
    """The fastest method of each product."""
    best: dict[Case, Line] = {}
    for line in lines:
        if line.case.depth and not line.is_rival:
            before = best.get(line.case)
            if before is None or line.timing.mean_us < before.timing.mean_us:
                best[line.case] = line
    return [
        {"op": case.op, "rows": case.rows // num_ranks, "depth": case.depth,
         "columns": case.columns, "dtype": "bfloat16", "method": line.who,
         "mean_us": line.timing.mean_us}
        for case, line in best.items()
    ]  # fmt: skip


def publish(options: Options, figures: Figures, num_ranks: int) -> str:
    """The end of the report; returns its gist."""
    for note in figures.notes:
        print(f"note: {note}")
    if figures.gb_per_s is not None:
        print(f"copy engines around the ring: {figures.gb_per_s:.0f} GB/s")
    document = {
        **heading(options, num_ranks),
        "gb_per_s": figures.gb_per_s,
        "notes": figures.notes,
        "tensor_parallel": [line.to_json() for line in figures.lines],
    }
    if options.store:
        path, stored = tuning.tune_file(), choices(figures.lines, num_ranks)
        key = tuning.machine_key(torch.device(options.device), num_ranks)
        tuning.store_products(path, key, stored)
        print(f"{len(stored)} choices stored in {path}")
    write(options, document)
    return f"{len(figures.lines)} lines, 0 wrong"
