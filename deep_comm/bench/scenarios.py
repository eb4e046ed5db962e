"""What a run measures: workloads, the Buffers they run on, and the calls to time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deep_comm import Buffer, Config
from deep_comm.bench.expected import ALIGNMENT
from deep_comm.bench.names import LOW_LATENCY_NAMES, PHASES, TWO_TIER
from deep_comm.bench.options import NO_NODES, NO_RAIL, Options, nodes_problem
from deep_comm.bench.workload import Workload
from deep_comm.config import recommended_dispatch_config

MAX_TWO_TIER_SMS = 24
_BLOCKS_IN_FLIGHT = 8  # outputs of dispatch that live at once, those that graphs keep included

Call = tuple[str, str, str]
"""Operation, phases ("" in normal mode), execution."""
SMs = Sequence[int | None]


@dataclass(frozen=True)
class Scenario:
    """One workload with one Config, in one mode or low-latency layout.

    Attributes:
        mode: "direct", "ring", "two-tier", or a layout.
        buffer: arguments of the Buffer; scenarios with equal ones share it.
        config: None: the Buffer chooses.
        max_tokens: of low-latency mode.
    """

    workload: Workload
    mode: str
    buffer: dict[str, Any]
    calls: tuple[Call, ...]
    config: Config | None = None
    max_tokens: int | None = None
    with_rivals: bool = False

    @property
    def ranks_per_node(self) -> int | None:
        per_node: int | None = self.buffer["ranks_per_node"]
        return per_node


def scenarios_of(options: Options, num_ranks: int, found: int | None = None) -> list[Scenario]:
    """``found``: ranks of a node, if the group has several whatever was asked for, so that one
    tier cannot be measured."""
    per_node = options.ranks_per_node or found
    if per_node is not None and (problem := nodes_problem(num_ranks, per_node)):
        raise SystemExit(problem)
    if per_node is None and options.rail is not None:
        raise SystemExit(NO_RAIL)
    if options.family == "low-latency":
        return _low_latency(options, num_ranks, per_node)
    if options.family == "nodes" and per_node is None:
        raise SystemExit(NO_NODES)
    modes = [mode for mode in options.mode if mode != "nodes"] + [TWO_TIER]
    shapes = itertools.product(options.routing, options.tokens, options.dtype, modes)
    every = [(*shape, options.sms, options.ops) for shape in shapes]
    made: list[Scenario] = []
    for routing, num_tokens, dtype, mode, sms, names in _quick(options) if options.quick else every:
        is_possible = per_node is not None if mode == TWO_TIER else found is None
        if is_possible:
            workload = _workload(options, num_ranks, num_tokens, dtype, routing)
            made += _normal(options, workload, mode, sms, names, per_node)
    if options.family == "nodes" or options.no_rivals:
        return made
    first = {scenario.workload: index for index, scenario in reversed([*enumerate(made)])}
    return [replace(it, with_rivals=first[it.workload] == index) for index, it in enumerate(made)]


def _workload(
    options: Options, num_ranks: int, num_tokens: int, dtype: str, routing: str = "uniform"
) -> Workload:
    return Workload(
        num_ranks, num_tokens, options.hidden, options.experts, options.topk, dtype, routing
    )


# ---- normal mode and nodes -----------------------------------------------------------------------


def configs_of(
    options: Options, num_ranks: int, sms: SMs, *, two_tier: bool = False
) -> list[Config | None]:
    """One Config per combination; "auto" stands for one call without a Config.

    Between nodes the recommended ones, but for the rows of a put. There a channel is two SMs, so
    that an odd number is rounded up.
    """
    configs: list[Config | None] = [None] if None in sms else []
    chosen = [value for value in sms if value is not None]
    if not two_tier:
        for num_sms, send, slots in itertools.product(chosen, options.send, options.slots):
            configs.append(Config(num_sms, min(send, slots), slots))
        return configs
    for num_sms in dict.fromkeys(value + value % 2 for value in chosen):
        base = recommended_dispatch_config(num_ranks, num_sms)
        for send in options.rail_send or (base.num_max_rdma_chunked_send_tokens,):
            slots = max(base.num_max_rdma_chunked_recv_tokens, 4 * send)
            inside = base.num_max_nvl_chunked_send_tokens, base.num_max_nvl_chunked_recv_tokens
            configs.append(Config(num_sms, *inside, send, slots))
    return configs


def _normal(
    options: Options, workload: Workload, mode: str, sms: SMs, names: Sequence[str],
    ranks_per_node: int | None,
) -> Iterator[Scenario]:  # fmt: skip
    """Rings that every Config fits into. Unless only they are to be used, also a receive region
    for all that lives, and between nodes a slot for each row on either side of the rail."""
    is_two_tier = mode == TWO_TIER
    configs = configs_of(options, workload.num_ranks, sms, two_tier=is_two_tier)
    row_bytes, num_rows = max(workload.row_bytes, workload.combine_row_bytes), workload.total_tokens
    smallest, num_direct_bytes, num_rdma_bytes = (64 if options.on_gpu else 16) << 20, 0, 0
    hinted, sizes = [config for config in configs if config is not None], [workload.num_ranks]
    if is_two_tier and ranks_per_node is not None:
        hinted.append(recommended_dispatch_config(workload.num_ranks, MAX_TWO_TIER_SMS))
        sizes.append(ranks_per_node)
        hints = [config.get_rdma_buffer_size_hint(row_bytes, *sizes) for config in hinted]
        slot_bytes = 0 if options.rings else row_bytes + 384 + 8 * workload.num_topk
        num_rdma_bytes = max(*hints, 2 * num_rows * slot_bytes)
    hints = [config.ring_bytes(row_bytes, *sizes) for config in hinted]
    num_nvl_bytes = max([smallest, *hints])
    if mode == "direct" or (is_two_tier and not options.rings):
        if any("expanded" in name for name in names):
            # Twice what even routing brings, and the padding.
            num_local = len(workload.experts_of(0))
            even = -(-num_rows * workload.num_topk * num_local // workload.num_experts)
            num_rows = max(num_rows, 2 * even + num_local * (ALIGNMENT - 1))
        beside_bytes = 16 * workload.num_topk + 64
        region_bytes = _BLOCKS_IN_FLIGHT * (num_rows * (row_bytes + beside_bytes) + (1 << 16))
        num_direct_bytes = region_bytes + (0 if is_two_tier else num_nvl_bytes - smallest)
        num_nvl_bytes += region_bytes
    buffer = {
        "num_nvl_bytes": num_nvl_bytes, "num_rdma_bytes": num_rdma_bytes,
        "num_direct_bytes": num_direct_bytes, "timeout_s": options.timeout_s,
        "ranks_per_node": ranks_per_node if is_two_tier else None,
        "rail": options.rail if is_two_tier else None,
    }  # fmt: skip
    # Eager between nodes: whether a graph may hold calls that a NIC's thread serves is the rail's.
    executions = ("eager",) if is_two_tier else options.execution
    calls = tuple((name, "", execution) for name in names for execution in executions)
    for config in configs:
        yield Scenario(workload, mode, buffer, calls, config)


_MOVES = ("dispatch cached", "combine", "combine in place")
_PAIRS = ("dispatch + combine", "dispatch cached + combine")
_FEW_MOVES = ("dispatch", "dispatch cached", "combine")
_ALL_MOVES = ("layout", "dispatch", "dispatch no-wait", *_MOVES, *_PAIRS)
Shape = tuple[str, int, str, str, SMs, Sequence[str]]
"""Routing, tokens, dtype, mode, SMs, operations."""
QUICK: tuple[Shape, ...] = (
    ("uniform", 4096, "bf16", "direct", (None, 8, 16, 24, 48, 96), _ALL_MOVES),
    ("uniform", 4096, "bf16", "ring", (16, 24), _FEW_MOVES),
    ("uniform", 4096, "bf16", TWO_TIER, (16, 24, 48), _FEW_MOVES),
    ("uniform", 4096, "fp8", "direct", (None, 8, 24, 48, 96), ("dispatch cached",)),
    ("uniform", 1024, "bf16", "direct", (None, 24, 64, 128), ("dispatch", *_MOVES)),
    ("uniform", 1024, "fp8", "direct", (None, 24, 64, 128), ("dispatch cached",)),
    ("uniform", 128, "bf16", "direct", (None, 24), ("dispatch", *_MOVES, *_PAIRS)),
)


def _quick(options: Options) -> Iterator[Shape]:
    """What the targets are about (deep_comm.bench.targets), each once.

    On the host target, whose figures are nobody's target, the same calls with small rows.
    """
    for routing, num_tokens, dtype, mode, sms, names in QUICK:
        if not options.on_gpu:
            num_tokens, sms = num_tokens // 32, (4,) if mode == TWO_TIER else (None, 2)
        yield routing, num_tokens, dtype, mode, sms, names


# ---- low latency ---------------------------------------------------------------------------------


def _low_latency(options: Options, num_ranks: int, ranks_per_node: int | None) -> list[Scenario]:
    most = max(options.max_tokens or 0, *options.tokens)
    num_rdma_bytes = Buffer.get_low_latency_rdma_size_hint(
        most, options.hidden, num_ranks, options.experts, ranks_per_node=ranks_per_node
    )
    buffer = {"num_rdma_bytes": num_rdma_bytes, "low_latency_mode": True, "rail": options.rail,
              "ranks_per_node": ranks_per_node}  # fmt: skip
    calls = tuple(itertools.product(options.ops, PHASES, options.execution))
    shapes = [*itertools.product(options.tokens, options.dtype, options.combine, options.layout)]
    if options.quick:
        shapes = [*itertools.product(options.tokens, ("fp8",), ("bf16",), options.layout)]
        shapes += itertools.product((max(options.tokens),), ("bf16",), ("bf16",), options.layout)
    scenarios = []
    for num_tokens, dtype, combine, layout in shapes:
        if options.quick:
            calls = _calls_of_a_quick_run(
                num_tokens if dtype == "fp8" else 0, options.execution[-1]
            )
        is_first = layout == options.layout[0] and combine == "bf16"
        is_first &= not options.quick or dtype == "fp8"
        workload = replace(_workload(options, num_ranks, num_tokens, dtype), combine_format=combine)
        scenarios.append(
            Scenario(
                workload, layout, buffer, calls, max_tokens=options.max_tokens or num_tokens,
                with_rivals=is_first and not options.no_rivals,
            )
        )  # fmt: skip
    return scenarios


def _calls_of_a_quick_run(num_tokens: int, fastest: str) -> tuple[Call, ...]:
    """What the targets are about: FP8 pairs in graphs, and host time at 16 tokens. Also hooks and
    single kernels where they say most."""
    calls = [("pair", "fused", fastest)]
    if num_tokens in (16, 128):
        calls += [(name, "fused", fastest) for name in ("dispatch", "combine")]
        calls += [("pair", "hooked", fastest)]
    if num_tokens == 16:
        calls += [(name, "fused", "eager") for name in LOW_LATENCY_NAMES]
    return tuple(dict.fromkeys(calls))
