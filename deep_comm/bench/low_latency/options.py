"""The command line of the low-latency bench."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from deep_comm.bench import options as shared
from deep_comm.bench.measure import Effort
from deep_comm.bench.workload import COMBINE_FORMATS, LOW_LATENCY_DTYPES, Workload

MODE = "low-latency"
TOKEN_SWEEP = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
QUICK_TOKENS = (1, 16, 64, 128)
EXECUTIONS = ("eager", "graph")
PHASES = ("fused", "hooked")

COMPACT, PACKED, PACKED_LATE = "compact", "packed", "packed-late"
LAYOUTS = {
    COMPACT: "each received token once; combine takes rows that their rank has reduced",
    PACKED: "expert-major, the weights travel with dispatch",
    PACKED_LATE: "expert-major, the weights come with combine: DeepEP's calls",
}

DISPATCH, COMBINE, PAIR = "dispatch", "combine", "pair"
NAMES = (DISPATCH, COMBINE, PAIR)


@dataclass(frozen=True)
class Scenario:
    """One workload in one layout; ``calls`` are the (operation, phases, execution) to time."""

    workload: Workload
    layout: str
    calls: tuple[tuple[str, str, str], ...]
    sms: tuple[int | None, ...]  # None: the Buffer chooses
    with_rivals: bool = False


@dataclass(frozen=True)
class Options:
    device: str
    num_ranks: int | None  # processes to start; None: as many as there are devices
    scenarios_of: Callable[[int], list[Scenario]] = field(repr=False)  # by number of ranks
    effort: Effort
    calls_per_graph: int
    num_slots: int
    max_tokens: int | None  # that a rank may have; None: as many as it has
    ranks_per_node: int | None  # of logical nodes; None: what host names say
    rail: str | None  # between nodes; None: the Buffer's choice
    with_limit: bool
    with_kernel_times: bool
    deadline_s: float
    json: Path | None
    command: str


def is_asked_for(arguments: Sequence[str]) -> bool:
    """Do the arguments of deep_comm.bench choose this mode?"""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--mode", default="")
    return str(parser.parse_known_args(list(arguments))[0].mode) == MODE


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m deep_comm.bench --mode {MODE}",
        description="Low-latency dispatch and combine, checked bit for bit and then timed, alone "
        "and as a chained pair. Lists are separated by commas; every combination is measured. Host "
        "times are as of the other modes, over rounds of 200 calls.",
        epilog="layouts: " + "; ".join(f"'{name}' ({text})" for name, text in LAYOUTS.items()),
    )
    add = parser.add_argument
    add("--mode", choices=(MODE,), required=True)
    add("--device", choices=("cpu", "cuda"), help="default: cuda with 2 or more devices")
    add("--ranks", type=int, help="processes to start (not under torchrun)")
    add("--quick", action="store_true", help="what the table of targets needs")
    shape = parser.add_argument_group("workload")
    add = shape.add_argument
    add("--tokens", type=shared.integers(TOKEN_SWEEP), help="per rank, or 'sweep' (the default)")
    add("--max-tokens", type=int, help="that a rank may have (default: as many as it has)")
    add("--hidden", type=int, help="default: 1024; on GPUs 7168")
    add("--experts", type=int, help="default: 32; on GPUs 256")
    add("--topk", type=int, default=8)
    dtypes = shared.names(tuple(LOW_LATENCY_DTYPES))
    add("--dtype", type=dtypes, default=("fp8", "bf16"), help="of dispatch: fp8,bf16,nvfp4")
    formats = shared.names(COMBINE_FORMATS)
    add("--combine", type=formats, default=("bf16",), help="rows of combine travel as bf16,logfmt")
    add("--ranks-per-node", type=int, help="logical nodes of so many consecutive ranks")
    add("--rail", choices=("nvshmem", "software", "simulated"), help="what joins nodes")
    how = parser.add_argument_group("how it is called")
    add = how.add_argument
    add("--layout", type=shared.names(tuple(LAYOUTS)), default=tuple(LAYOUTS))
    add("--phases", type=shared.names(PHASES), default=PHASES, help="in one kernel, or with hooks")
    add("--execution", type=shared.names(EXECUTIONS), help="the host has eager alone")
    add("--ops", type=shared.names(NAMES), default=NAMES)
    add("--sms", type=shared.sms, default=(None,), help="blocks at most, or 'auto'")
    add("--no-rivals", action="store_true", help="leave out all_gather + reduce_scatter")
    add("--no-limit", action="store_true", help="leave out the link limit")
    add("--no-kernel-times", action="store_true", help="leave out the profiler's kernel times")
    timing = parser.add_argument_group("timing")
    add = timing.add_argument
    add("--warmup", type=int, help="before; default: 2; on GPUs 5")
    add("--iterations", type=int, help="calls, or graphs, of a round; default: 5; on GPUs 20")
    add("--rounds", type=int, help="default: 3; on GPUs 5, with --quick 3")
    add("--calls-per-graph", type=int, default=20)
    add("--rotate", type=int, default=2, help="inputs and routings that take turns")
    add("--deadline-s", type=float, help="end everything after so long (900; --quick: 180)")
    results = parser.add_argument_group("results")
    results.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


def parse(arguments: Sequence[str], command: str) -> Options:
    parser = make_parser()
    parsed = parser.parse_args(arguments)
    if parsed.device is None:
        parsed.device = "cuda" if torch.cuda.device_count() >= 2 else "cpu"
    on_gpu = parsed.device == "cuda"
    if parsed.execution is None:
        parsed.execution = EXECUTIONS if on_gpu else ("eager",)
    elif not on_gpu and parsed.execution != ("eager",):
        parser.error("--execution: the host target has no graphs")
    for name in ("rotate", "calls_per_graph"):
        if getattr(parsed, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: must be at least 1")
    if parsed.tokens is None:
        parsed.tokens = QUICK_TOKENS if parsed.quick else TOKEN_SWEEP if on_gpu else (1, 16)
    if parsed.ranks_per_node is not None and parsed.ranks_per_node < 1:
        parser.error("--ranks-per-node: must be at least 1")
    if parsed.max_tokens is not None and parsed.max_tokens < max(parsed.tokens):
        parser.error(f"--max-tokens: must be at least {max(parsed.tokens)}")
    defaults: dict[str, int | float] = {
        "hidden": 7168 if on_gpu else 1024,
        "experts": 256 if on_gpu else 32,
        "warmup": 5 if on_gpu else 2,
        "iterations": 20 if on_gpu else 5,
        "rounds": 5 if on_gpu and not parsed.quick else 3,
        "deadline_s": 180.0 if parsed.quick else 900.0,
    }
    for name, default in defaults.items():
        if getattr(parsed, name) is None:
            setattr(parsed, name, default)
    return Options(
        device=parsed.device,
        num_ranks=parsed.ranks,
        scenarios_of=_Scenarios(parsed),
        effort=Effort(
            num_warmup=parsed.warmup,
            num_calls=parsed.iterations,
            num_rounds=parsed.rounds,
            num_single_calls=5 * parsed.iterations * parsed.rounds,
            num_host_calls=200 if on_gpu else 0,
        ),
        calls_per_graph=parsed.calls_per_graph,
        num_slots=parsed.rotate,
        max_tokens=parsed.max_tokens,
        ranks_per_node=parsed.ranks_per_node,
        rail=parsed.rail,
        with_limit=on_gpu and not parsed.no_limit,
        with_kernel_times=on_gpu and not parsed.no_kernel_times,
        deadline_s=parsed.deadline_s,
        json=parsed.json,
        command=command,
    )


class _Scenarios:
    """Not a closure: options travel to the processes of the ranks."""

    def __init__(self, parsed: argparse.Namespace) -> None:
        self._parsed = parsed

    def __call__(self, num_ranks: int) -> list[Scenario]:
        parsed = self._parsed
        make = quick if parsed.quick else product
        return make(num_ranks, parsed)


def _workload(
    num_ranks: int, num_tokens: int, dtype: str, parsed: argparse.Namespace, combine: str = "bf16"
) -> Workload:
    return Workload(
        num_ranks, num_tokens, parsed.hidden, parsed.experts, parsed.topk, dtype,
        combine_format=combine,
    )  # fmt: skip


def product(num_ranks: int, parsed: argparse.Namespace) -> list[Scenario]:
    """Every combination that the lists name; rivals once per workload."""
    calls = tuple(itertools.product(parsed.ops, parsed.phases, parsed.execution))
    scenarios = []
    shapes = itertools.product(parsed.tokens, parsed.dtype, parsed.combine)
    for num_tokens, dtype, combine in shapes:
        workload = _workload(num_ranks, num_tokens, dtype, parsed, combine)
        for index, layout in enumerate(parsed.layout):
            with_rivals = index == 0 and combine == "bf16" and not parsed.no_rivals
            scenarios.append(Scenario(workload, layout, calls, parsed.sms, with_rivals))
    return scenarios


def quick(num_ranks: int, parsed: argparse.Namespace) -> list[Scenario]:
    """What the targets are about (deep_comm.bench.low_latency.targets): FP8 pairs in graphs, and
    host time at 16 tokens. Also BF16, hooks and single kernels where they say most."""
    scenarios = []
    for num_tokens in parsed.tokens:
        workload = _workload(num_ranks, num_tokens, "fp8", parsed)
        for layout in parsed.layout:
            fastest = parsed.execution[-1]
            calls = [(PAIR, "fused", fastest)]
            if num_tokens in (16, 128):
                calls += [(DISPATCH, "fused", fastest), (COMBINE, "fused", fastest)]
                calls += [(PAIR, "hooked", fastest)]
            if num_tokens == 16:
                calls += [(name, "fused", "eager") for name in NAMES]
            with_rivals = layout == parsed.layout[0] and not parsed.no_rivals
            unique = tuple(dict.fromkeys(calls))
            scenarios.append(Scenario(workload, layout, unique, parsed.sms, with_rivals))
    bf16 = _workload(num_ranks, max(parsed.tokens), "bf16", parsed)
    calls = [(PAIR, "fused", parsed.execution[-1])]
    return [*scenarios, *(Scenario(bf16, name, tuple(calls), parsed.sms) for name in parsed.layout)]
