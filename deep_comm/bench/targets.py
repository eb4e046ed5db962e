"""What calls should reach on H200s, and whether the lines of a run do.

The targets are for 7168 columns, 256 experts, top-8, uniform routing, mean of the slowest rank:
normal mode with whole eager calls, low-latency mode with FP8 cast in the kernel, BF16 combine and
chained pairs. They were set from the links' measured limit and from what other libraries reach on
the same machines; docs/performance.md has both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from deep_comm.bench import rivals
from deep_comm.bench.line import Line
from deep_comm.bench.tables import align

Lines = Sequence[Line]

HOST_TOKENS = 16  # of low-latency calls whose host time is judged


@dataclass(frozen=True)
class Target:
    name: str
    limits: dict[int, float]  # by number of ranks; "at most", in the unit
    find: Callable[[Lines], float | None]
    unit: str = "us"


def _find(
    lines: Lines, *names: str, tokens: int = 4096, dtype: str = "bf16", execution: str = "eager",
    modes: Sequence[str] = ("direct", "ring"), max_sms: int = 1000, layout: str = "",
) -> list[Line]:  # fmt: skip
    """Lines of the shape that targets are about, with any of these names."""
    found = []
    for line in lines:
        shape = line.workload
        facts = (shape.hidden, shape.num_experts, shape.num_topk, shape.routing,
                 shape.num_tokens, shape.dtype, line.execution, line.layout)  # fmt: skip
        is_meant = line.name in names and line.mode in modes and line.phases != "hooked"
        is_meant &= facts == (7168, 256, 8, "uniform", tokens, dtype, execution, layout)
        if is_meant and (line.num_sms or 0) <= max_sms:
            found.append(line)
    return found


def _best(lines: Lines, *names: str, **wanted: Any) -> float | None:
    return min((line.timing.mean_us for line in _find(lines, *names, **wanted)), default=None)


def best(*names: str, **wanted: Any) -> Callable[[Lines], float | None]:
    """The time of the fastest line."""
    return lambda lines: _best(lines, *names, **wanted)


def _ratio_to_all_to_all(lines: Lines) -> float | None:
    ours = _best(lines, "dispatch cached", max_sms=24)
    theirs = _best(lines, f"NCCL {rivals.ALL_TO_ALL}", modes=("",))
    return None if ours is None or theirs is None else ours / theirs


def _uncached_extra(lines: Lines) -> float | None:
    """Uncached minus cached, with the same Config; the smallest difference."""
    find = partial(_find, lines, modes=("direct",), max_sms=24)
    extras = [
        line.timing.mean_us - other.timing.mean_us
        for line in find("dispatch")
        for other in find("dispatch cached")
        if (other.sms, other.config) == (line.sms, line.config)
    ]
    return min(extras, default=None)


def host_lines(lines: Lines, family: str = "normal") -> list[Line]:
    """Calls without a host wait, at few tokens, where the GPU's queue is never full."""
    if family == "low-latency":
        find = partial(_find, lines, "dispatch", "combine", tokens=HOST_TOKENS, dtype="fp8")
        return [line for layout in PAIRS_US for line in find(modes=("",), layout=layout)]
    names = ("dispatch cached", "combine")
    eager = [line for line in lines if line.name in names and line.execution == "eager"]
    fewest = min((line.workload.num_tokens for line in eager), default=0)
    return [line for line in eager if line.workload.num_tokens == fewest]


def _host_time(lines: Lines, family: str) -> float | None:
    """Of the slowest form."""
    times = (line.timing.host_us for line in host_lines(lines, family))
    return max((time for time in times if time is not None), default=None)


_COMBINES = ("combine", "combine in place")
_COMPACT_US = {4: {1: 14, 16: 17, 64: 22, 128: 33}, 8: {1: 16, 16: 20, 64: 32, 128: 50}}
_PACKED_US = {4: {1: 16, 16: 19, 64: 26, 128: 38}, 8: {1: 18, 16: 23, 64: 38, 128: 58}}
PAIRS_US = {"compact": _COMPACT_US, "packed": _PACKED_US, "packed-late": _PACKED_US}

NORMAL = (
    Target("dispatch BF16 cached, 4096 tokens, <= 24 SMs", {8: 840, 4: 490},
           best("dispatch cached", max_sms=24)),
    Target("the same / NCCL all_to_all_single", {8: 0.95, 4: 0.91}, _ratio_to_all_to_all, "x"),
    Target("the same, <= 8 SMs", {8: 900, 4: 545}, best("dispatch cached", max_sms=8)),
    Target("dispatch FP8 cached, <= 24 SMs", {8: 440, 4: 260},
           best("dispatch cached", dtype="fp8", max_sms=24)),
    Target("combine BF16, <= 24 SMs", {8: 860, 4: 510}, best(*_COMBINES, max_sms=24)),
    Target("dispatch BF16 cached, any SMs", {8: 800, 4: 468}, best("dispatch cached")),
    Target("dispatch FP8 cached, any SMs", {4: 240}, best("dispatch cached", dtype="fp8")),
    Target("combine BF16, any SMs", {8: 800, 4: 470}, best(*_COMBINES)),
    Target("uncached extra (layout, counts, host wait), <= 24 SMs", {8: 25, 4: 25},
           _uncached_extra),
    Target("get_dispatch_layout, 4096 tokens", {8: 8, 4: 8}, best("layout")),
    Target("ring mode: dispatch BF16 cached, <= 24 SMs", {4: 620},
           best("dispatch cached", modes=("ring",), max_sms=24)),
    Target("1024 tokens: dispatch BF16 cached", {4: 130}, best("dispatch cached", tokens=1024)),
    Target("1024 tokens: dispatch FP8 cached", {4: 70},
           best("dispatch cached", tokens=1024, dtype="fp8")),
    Target("1024 tokens: combine BF16", {4: 125}, best(*_COMBINES, tokens=1024)),
    Target("host time of an eager call without host wait", {8: 20, 4: 20},
           partial(_host_time, family="normal")),
)  # fmt: skip


def _pair(layout: str, tokens: int, execution: str) -> Callable[[Lines], float | None]:
    return best("pair", tokens=tokens, dtype="fp8", execution=execution, modes=("",), layout=layout)


LOW_LATENCY = (
    *(Target(f"pair in a graph, {layout}, {tokens} tokens",
             {num_ranks: of[tokens] for num_ranks, of in limits.items()},
             _pair(layout, tokens, "graph"))
      for layout, limits in PAIRS_US.items() for tokens in (1, 16, 64, 128)),
    *(Target(f"eager pair, {layout}, {HOST_TOKENS} tokens", {4: 45.0, 8: 45.0},
             _pair(layout, HOST_TOKENS, "eager")) for layout in PAIRS_US),
    Target(f"host time of a call, {HOST_TOKENS} tokens", {4: 15.0, 8: 15.0},
           partial(_host_time, family="low-latency")),
)  # fmt: skip


def judge(lines: Lines, num_ranks: int, family: str = "normal") -> list[dict[str, Any]]:
    """``at_most``: None where there is no target for so many ranks; ``measured``: None where this
    run has no such line; ``is_met``: None where one of them is."""
    verdicts = []
    for it in LOW_LATENCY if family == "low-latency" else NORMAL:
        limit, measured = it.limits.get(num_ranks), it.find(lines)
        is_met = None if limit is None or measured is None else measured <= limit
        verdicts.append({"name": it.name, "unit": it.unit, "at_most": limit,
                         "measured": measured, "is_met": is_met})  # fmt: skip
    return verdicts


def table(verdicts: Sequence[dict[str, Any]]) -> str:
    rows = [["target", "at most", "measured", "verdict"]]
    for it in verdicts:
        limit, measured, unit = it["at_most"], it["measured"], it["unit"]
        digits, missing = 2 if unit == "x" else 1, "no target" if limit is None else "not measured"
        rows.append([
            it["name"],
            "-" if limit is None else f"{limit:g} {unit}",
            "-" if measured is None else f"{measured:.{digits}f} {unit}",
            {True: "met", False: "missed", None: missing}[it["is_met"]],
        ])  # fmt: skip
    return align(rows, 1)
