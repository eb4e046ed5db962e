"""The command line: what is measured, how hard, and where the figures go."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from deep_comm import Config
from deep_comm.bench import operations, two_tier
from deep_comm.bench.measure import Effort
from deep_comm.bench.workload import DTYPES, ROUTINGS, Workload

MODES = ("direct", "ring")
EXECUTIONS = ("eager", "graph")
TOKEN_SWEEP = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SM_SWEEP = (4, 8, 16, 24, 32, 48, 64, 132)
AUTO = "auto"

EPILOG = "operations: " + "; ".join(
    f"'{name}' ({meaning})" for name, meaning in operations.MEANINGS.items()
)


@dataclass(frozen=True)
class Scenario:
    """One Buffer's worth of measurements: a workload in a mode, with several Configs."""

    workload: Workload
    mode: str
    configs: tuple[Config | None, ...]  # None: the Buffer chooses
    executions: tuple[str, ...]
    names: tuple[str, ...]  # of operations
    with_rivals: bool = False
    ranks_per_node: int | None = None  # of logical nodes, in mode two_tier.MODE


@dataclass(frozen=True)
class Options:
    device: str
    num_ranks: int | None  # processes to start; None: as many as there are devices
    # by number of ranks, and by those of a node if the group has several
    scenarios_of: Callable[[int, int | None], list[Scenario]] = field(repr=False)
    effort: Effort
    num_slots: int | None  # rotating inputs; None: enough to leave the L2
    with_limit: bool
    simulation_runs: int
    deadline_s: float
    json: Path | None
    plot: Path | None
    command: str


def integers(sweep: Sequence[int]) -> Callable[[str], tuple[int, ...]]:
    def parse(text: str) -> tuple[int, ...]:
        values = tuple(sweep) if text == "sweep" else tuple(int(part) for part in text.split(","))
        if not values or min(values) < 1:
            raise ValueError(text)
        return values

    parse.__name__ = "list of positive integers"
    return parse


def sms(text: str) -> tuple[int | None, ...]:
    """Even numbers; AUTO: the Buffer's choice."""
    if text == "sweep":
        return (None, *SM_SWEEP)
    values = tuple(None if part == AUTO else int(part) for part in text.split(","))
    if any(value is not None and value < 1 for value in values):
        raise ValueError(text)
    return values


sms.__name__ = "list of positive integers or 'auto'"


def names(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        values = tuple(allowed) if text == "all" else tuple(text.split(","))
        unknown = [value for value in values if value not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"{unknown[0]!r} is none of {', '.join(allowed)} (or 'all')"
            )
        return values

    return parse


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deep_comm.bench",
        description="Dispatch and combine, checked bit for bit and then timed. Lists are separated "
        "by commas, and every combination of them is measured. Host times are means of the calling "
        "thread over rounds of 64 calls, cold first ones included, whose launches fit into the "
        "GPU's queue; on GPUs an empty kernel and an addition of torch are timed likewise beside "
        "them, because the same call takes twice as long on one machine as on another.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), help="default: cuda with 2 or more devices")
    add("--ranks", type=int, help="processes to start (not under torchrun)")
    add("--quick", action="store_true", help="what the table of targets needs, within a minute")
    shape = parser.add_argument_group("workload")
    add = shape.add_argument
    add("--tokens", type=integers(TOKEN_SWEEP), help="per rank, or 'sweep' (256; GPUs: 4096)")
    add("--hidden", type=int, help="default: 2048; on GPUs 7168")
    add("--experts", type=int, help="default: 32; on GPUs 256")
    add("--topk", type=int, default=8)
    add("--dtype", type=names(tuple(DTYPES)), help="default: bf16; on GPUs bf16,fp8")
    add("--routing", type=names(tuple(ROUTINGS)), default=("uniform",), help=", ".join(ROUTINGS))
    how = parser.add_argument_group("how it is called")
    add = how.add_argument
    add(
        "--mode",
        type=names(MODES),
        default=MODES,
        help="direct,ring; or low-latency or layer: see their --help",
    )
    add("--execution", type=names(EXECUTIONS), help="eager,graph (the host has eager alone)")
    add(
        "--sms",
        type=sms,
        help="SMs of the Config, 'auto' for none, or 'sweep' (auto; GPUs: auto,8,24)",
    )
    add("--send", type=integers((4, 8, 16)), default=(6,), help="rows between two publications")
    add("--slots", type=integers((64, 128, 256)), default=(256,), help="of a ring")
    add(
        "--ranks-per-node",
        type=int,
        help="also measure two tiers: nodes of so many consecutive ranks, beside the single tier",
    )
    add("--rail-send", type=integers((6, 12, 20)), help="rows of a put (the recommended config's)")
    add("--rail-slots", type=integers((32, 64, 128)), help="of a ring between nodes (likewise)")
    add(
        "--ops",
        type=names(operations.NAMES),
        default=operations.NAMES,
        help="operations to measure",
    )
    add("--no-rivals", action="store_true", help="leave out the collectives of torch.distributed")
    add("--no-limit", action="store_true", help="leave out the link limit")
    timing = parser.add_argument_group("timing")
    add = timing.add_argument
    add("--warmup", type=int, help="calls before; default: 2; on GPUs 5")
    add("--iterations", type=int, help="calls of a round; default: 5; on GPUs 20")
    add("--rounds", type=int, help="default: 3; on GPUs 5, with --quick 3")
    add("--rotate", type=int, help="inputs that take turns (default: enough to leave the L2 cache)")
    add("--flush-l2", action="store_true", help="single calls behind a flush, not back to back")
    add("--deadline-s", type=float, help="end everything after so long (900; --quick: 180)")
    results = parser.add_argument_group("results")
    add = results.add_argument
    add("--simulation-runs", type=int, help="0: leave the simulation out (10; on GPUs 0)")
    add("--json", type=Path, help="also write the figures to this file")
    add("--plot", type=Path, help="also draw them into this PNG file (needs matplotlib)")
    return parser


def parse(arguments: Sequence[str] | None, command: str) -> Options:
    parser = make_parser()
    parsed = parser.parse_args(arguments)
    if parsed.ranks_per_node is not None and parsed.ranks_per_node < 1:
        parser.error("--ranks-per-node: must be at least 1")
    if parsed.device is None:
        parsed.device = "cuda" if torch.cuda.device_count() >= 2 else "cpu"
    on_gpu = parsed.device == "cuda"
    if on_gpu and parsed.execution is None:
        parsed.execution = EXECUTIONS
    elif parsed.execution is None:
        parsed.execution = ("eager",)
    elif not on_gpu and parsed.execution != ("eager",):
        parser.error("--execution: the host target has no graphs")
    defaults: dict[str, Any] = {
        "tokens": (4096,) if on_gpu else (256,),
        "hidden": 7168 if on_gpu else 2048,
        "experts": 256 if on_gpu else 32,
        "dtype": ("bf16", "fp8") if on_gpu else ("bf16",),
        "sms": (None, 8, 24) if on_gpu else (None,),
        "warmup": 5 if on_gpu else 2,
        "iterations": 20 if on_gpu else 5,
        "rounds": 5 if on_gpu and not parsed.quick else 3,
        "simulation_runs": 0 if on_gpu else 10,
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
            num_single_calls=parsed.iterations * parsed.rounds,
            flush_l2=parsed.flush_l2,
            num_host_calls=64 if on_gpu and not parsed.flush_l2 else 0,
        ),
        num_slots=parsed.rotate,
        with_limit=on_gpu and not parsed.no_limit,
        simulation_runs=parsed.simulation_runs,
        deadline_s=parsed.deadline_s,
        json=parsed.json,
        plot=parsed.plot,
        command=command,
    )


class _Scenarios:
    """Not a closure: options travel to the processes of the ranks."""

    def __init__(self, parsed: argparse.Namespace) -> None:
        self._parsed = parsed

    def __call__(self, num_ranks: int, ranks_per_node: int | None = None) -> list[Scenario]:
        """``ranks_per_node``: the group has several nodes whatever was
        asked for, and no single tier.
        """
        parsed = argparse.Namespace(**vars(self._parsed))
        if ranks_per_node is not None:
            parsed.ranks_per_node = ranks_per_node
        scenarios = quick(num_ranks, parsed) if parsed.quick else product(num_ranks, parsed)
        if ranks_per_node is None:
            return scenarios
        return [
            replace(scenario, with_rivals=not parsed.no_rivals)
            for scenario in scenarios
            if scenario.ranks_per_node is not None
        ]


def configs_of(
    sms: Sequence[int | None], send: Sequence[int], slots: Sequence[int]
) -> tuple[Config | None, ...]:
    """One Config per combination; 'auto' stands for one call without a Config."""
    configs: list[Config | None] = [None] if None in sms else []
    chosen = [value for value in sms if value is not None]
    for num_sms, num_send, num_slots in itertools.product(chosen, send, slots):
        configs.append(Config(num_sms, min(num_send, num_slots), num_slots))
    return tuple(configs)


def product(num_ranks: int, parsed: argparse.Namespace) -> list[Scenario]:
    """Every combination that the lists name; rivals once per workload."""
    scenarios = []
    configs = configs_of(parsed.sms, parsed.send, parsed.slots)
    shapes = itertools.product(parsed.routing, parsed.tokens, parsed.dtype)
    for routing, num_tokens, dtype in shapes:
        workload = Workload(
            num_ranks, num_tokens, parsed.hidden, parsed.experts, parsed.topk, dtype, routing
        )
        for index, mode in enumerate(parsed.mode):
            with_rivals = index == 0 and not parsed.no_rivals
            scenarios.append(
                Scenario(workload, mode, configs, parsed.execution, parsed.ops, with_rivals)
            )
        if parsed.ranks_per_node is not None:
            scenarios.append(two_tier_scenario(workload, parsed, parsed.sms, parsed.ops))
    return scenarios


def two_tier_scenario(
    workload: Workload, parsed: argparse.Namespace, sms: Sequence[int | None], names: Sequence[str]
) -> Scenario:
    """Eager: whether a graph may hold calls that a NIC's thread serves is up to the rail."""
    configs = two_tier.configs_of(workload.num_ranks, sms, parsed.rail_send, parsed.rail_slots)
    per_node = parsed.ranks_per_node
    return Scenario(
        workload, two_tier.MODE, configs, ("eager",), tuple(names), ranks_per_node=per_node
    )


def quick(num_ranks: int, parsed: argparse.Namespace) -> list[Scenario]:
    """What the targets are about (deep_comm.bench.targets), each once.

    On the host target, whose figures are nobody's target, the same calls with small rows.
    """
    on_gpu = parsed.device == "cuda"
    scale = 1 if on_gpu else 32

    def scenario(
        num_tokens: int, dtype: str, mode: str, sms: Sequence[int | None], names: Sequence[str], *,
        with_rivals: bool = False,
    ) -> Scenario:  # fmt: skip
        workload = Workload(
            num_ranks, num_tokens // scale, parsed.hidden, parsed.experts, parsed.topk, dtype
        )
        configs = configs_of(sms if on_gpu else (None, 2), parsed.send, parsed.slots)
        return Scenario(workload, mode, configs, parsed.execution, tuple(names), with_rivals)

    op = operations
    moves = (op.DISPATCH_CACHED, op.COMBINE, op.COMBINE_IN_PLACE)
    whole = (op.LAYOUT, op.DISPATCH, op.DISPATCH_NO_WAIT, *moves, op.PAIR, op.PAIR_CACHED)
    wide = (None, 8, 16, 24, 48, 96)
    scenarios = [
        scenario(4096, "bf16", "direct", wide, whole, with_rivals=True),
        scenario(4096, "bf16", "ring", (16, 24), (op.DISPATCH, *moves[:2])),
        scenario(4096, "fp8", "direct", (None, 8, 24, 48, 96), moves[:1], with_rivals=True),
        scenario(
            1024, "bf16", "direct", (None, 24, 64, 128), (op.DISPATCH, *moves), with_rivals=True
        ),
        scenario(1024, "fp8", "direct", (None, 24, 64, 128), moves[:1]),
        scenario(128, "bf16", "direct", (None, 24), (op.DISPATCH, *moves, op.PAIR, op.PAIR_CACHED)),
    ]
    if parsed.ranks_per_node is not None:
        sms = (16, 24, 48) if on_gpu else (4,)
        names = (op.DISPATCH, *moves[:2])
        # Behind the scenarios that share its workload, and with it inputs and results.
        scenarios.insert(2, two_tier_scenario(scenarios[0].workload, parsed, sms, names))
    return scenarios
