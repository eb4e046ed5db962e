"""What dispatch and combine should reach on H200s, and whether the lines of this run do.

The targets are for 7168 columns, 256 experts, top-8, uniform routing, whole eager calls back to
back, mean of the slowest rank. They were set from the links' measured limit and from what other
libraries reach on the same machines; docs/performance.md has both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deep_comm.bench import operations, rivals
from deep_comm.bench.normal import Measured
from deep_comm.bench.report import align

Find = Callable[[Sequence[Any]], "float | None"]  # in the lines of a report

MANY_SMS = 1000


@dataclass(frozen=True)
class Target:
    name: str
    limits: dict[int, float]  # by number of ranks; "at most", in the unit
    find: Find
    unit: str = "us"


@dataclass(frozen=True)
class Verdict:
    target: Target
    limit: float | None  # None: there is none for so many ranks
    measured: float | None  # None: this run has no such line

    @property
    def is_met(self) -> bool | None:
        if self.limit is None or self.measured is None:
            return None
        return self.measured <= self.limit

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.target.name,
            "unit": self.target.unit,
            "at_most": self.limit,
            "measured": self.measured,
            "is_met": self.is_met,
        }


def _matches(
    line: Measured,
    names: Sequence[str],
    num_tokens: int,
    dtype: str,
    modes: Sequence[str],
    max_sms: int,
) -> bool:
    shape = line.workload
    return (
        (shape.num_tokens, shape.dtype, shape.routing) == (num_tokens, dtype, "uniform")
        and (shape.hidden, shape.num_experts, shape.num_topk) == (7168, 256, 8)
        and line.execution == "eager"
        and line.name in names
        and (line.mode in modes)
        and (line.num_sms or 0) <= max_sms
    )


def best(
    *names: str,
    num_tokens: int = 4096,
    dtype: str = "bf16",
    modes: Sequence[str] = ("direct", "ring"),
    max_sms: int = MANY_SMS,
) -> Find:
    """The quickest line with any of these names and at most so many SMs."""

    def find(lines: Sequence[Measured]) -> float | None:
        found = [
            line.timing.mean_us
            for line in lines
            if _matches(line, names, num_tokens, dtype, modes, max_sms)
        ]
        return min(found, default=None)

    return find


def _ratio_to_all_to_all(lines: Sequence[Measured]) -> float | None:
    ours = best(operations.DISPATCH_CACHED, max_sms=24)(lines)
    theirs = best(f"NCCL {rivals.ALL_TO_ALL}", modes=("",))(lines)
    return None if ours is None or theirs is None else ours / theirs


def _uncached_extra(lines: Sequence[Measured]) -> float | None:
    """Uncached minus cached, by the same Config; the smallest difference."""
    extras = []
    for line in lines:
        if not _matches(line, (operations.DISPATCH,), 4096, "bf16", ("direct",), 24):
            continue
        for other in lines:
            same = (other.sms, other.config) == (line.sms, line.config)
            if same and _matches(
                other, (operations.DISPATCH_CACHED,), 4096, "bf16", ("direct",), 24
            ):
                extras.append(line.timing.mean_us - other.timing.mean_us)
    return min(extras, default=None)


def host_lines(lines: Sequence[Measured]) -> list[Measured]:
    """Calls without a host wait, at the fewest tokens, where the queue is never full."""
    names = (operations.DISPATCH_CACHED, operations.COMBINE)
    eager = [line for line in lines if line.name in names and line.execution == "eager"]
    fewest = min((line.workload.num_tokens for line in eager), default=0)
    return [line for line in eager if line.workload.num_tokens == fewest]


def _host_time(lines: Sequence[Measured]) -> float | None:
    """The slowest of them."""
    times = [line.timing.host_us for line in host_lines(lines)]
    return max((time for time in times if time is not None), default=None)


_CACHED, _COMBINES = operations.DISPATCH_CACHED, (operations.COMBINE, operations.COMBINE_IN_PLACE)

TARGETS = (
    Target(
        "dispatch BF16 cached, 4096 tokens, <= 24 SMs", {8: 840, 4: 490}, best(_CACHED, max_sms=24)
    ),
    Target("the same / NCCL all_to_all_single", {8: 0.95, 4: 0.91}, _ratio_to_all_to_all, "x"),
    Target("the same, <= 8 SMs", {8: 900, 4: 545}, best(_CACHED, max_sms=8)),
    Target(
        "dispatch FP8 cached, <= 24 SMs", {8: 440, 4: 260}, best(_CACHED, dtype="fp8", max_sms=24)
    ),
    Target("combine BF16, <= 24 SMs", {8: 860, 4: 510}, best(*_COMBINES, max_sms=24)),
    Target("dispatch BF16 cached, any SMs", {8: 800, 4: 468}, best(_CACHED)),
    Target("dispatch FP8 cached, any SMs", {4: 240}, best(_CACHED, dtype="fp8")),
    Target("combine BF16, any SMs", {8: 800, 4: 470}, best(*_COMBINES)),
    Target(
        "uncached extra (layout, counts, host wait), <= 24 SMs", {8: 25, 4: 25}, _uncached_extra
    ),
    Target("get_dispatch_layout, 4096 tokens", {8: 8, 4: 8}, best(operations.LAYOUT)),
    Target(
        "ring mode: dispatch BF16 cached, <= 24 SMs",
        {4: 620},
        best(_CACHED, modes=("ring",), max_sms=24),
    ),
    Target("1024 tokens: dispatch BF16 cached", {4: 130}, best(_CACHED, num_tokens=1024)),
    Target(
        "1024 tokens: dispatch FP8 cached", {4: 70}, best(_CACHED, num_tokens=1024, dtype="fp8")
    ),
    Target("1024 tokens: combine BF16", {4: 125}, best(*_COMBINES, num_tokens=1024)),
    Target("host time of an eager call without host wait", {8: 20, 4: 20}, _host_time),
)


def judge(lines: Sequence[Measured], num_ranks: int) -> list[Verdict]:
    return [Verdict(target, target.limits.get(num_ranks), target.find(lines)) for target in TARGETS]


def table(verdicts: Sequence[Verdict]) -> str:
    rows = [["target", "at most", "measured", "verdict"]]
    for verdict in verdicts:
        limit, measured, unit = verdict.limit, verdict.measured, verdict.target.unit
        digits = 2 if unit == "x" else 1
        words = {
            True: "met",
            False: "missed",
            None: "no target" if limit is None else "not measured",
        }
        rows.append(
            [
                verdict.target.name,
                "-" if limit is None else f"{limit:g} {unit}",
                "-" if measured is None else f"{measured:.{digits}f} {unit}",
                words[verdict.is_met],
            ]
        )
    return align(rows, 1)
