"""What low-latency calls should reach on H200s, and whether the lines of this run do.

For 7168 columns, 256 experts, top-8, uniform routing, FP8 cast in the kernel, BF16 combine, chained
pairs, mean of the slowest rank; set from the links' limit and from what other libraries reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from deep_comm.bench.low_latency.options import COMPACT, PACKED, PACKED_LATE, PAIR
from deep_comm.bench.low_latency.report import Line
from deep_comm.bench.targets import Target, Verdict

PAIRS = {
    COMPACT: {4: {1: 14, 16: 17, 64: 22, 128: 33}, 8: {1: 16, 16: 20, 64: 32, 128: 50}},
    PACKED: {4: {1: 16, 16: 19, 64: 26, 128: 38}, 8: {1: 18, 16: 23, 64: 38, 128: 58}},
}
EAGER_PAIR_US = 45.0
HOST_US = 15.0
HOST_TOKENS = 16


def _lines(
    lines: Sequence[Line], *, num_tokens: int, execution: str, layout: str | None = None
) -> Iterator[Line]:
    for line in lines:
        shape = line.workload
        if (
            not line.is_rival
            and (shape.hidden, shape.num_experts, shape.num_topk) == (7168, 256, 8)
            and (shape.dtype, shape.routing, shape.num_tokens) == ("fp8", "uniform", num_tokens)
            and (line.execution, line.phases) == (execution, "fused")
            and layout in (None, line.layout)
        ):
            yield line


def _best_pair(
    lines: Sequence[Line], *, num_tokens: int, execution: str, layout: str
) -> float | None:
    found = _lines(lines, num_tokens=num_tokens, execution=execution, layout=layout)
    return min((line.timing.mean_us for line in found if line.name == PAIR), default=None)


def host_lines(lines: Sequence[Line]) -> list[Line]:
    """Single calls at few tokens, where the queue is never full."""
    found = _lines(lines, num_tokens=HOST_TOKENS, execution="eager")
    return [line for line in found if line.name != PAIR]


def _host_time(lines: Sequence[Line]) -> float | None:
    """The slowest of them."""
    times = [line.timing.host_us for line in host_lines(lines)]
    return max((time for time in times if time is not None), default=None)


def targets() -> Iterator[Target]:
    for layout in (COMPACT, PACKED, PACKED_LATE):
        limits = PAIRS[COMPACT if layout == COMPACT else PACKED]
        for num_tokens in (1, 16, 64, 128):
            yield Target(
                f"pair in a graph, {layout}, {num_tokens} tokens",
                {num_ranks: of[num_tokens] for num_ranks, of in limits.items()},
                partial(_best_pair, num_tokens=num_tokens, execution="graph", layout=layout),
            )
    for layout in (COMPACT, PACKED, PACKED_LATE):
        yield Target(
            f"eager pair, {layout}, {HOST_TOKENS} tokens",
            {4: EAGER_PAIR_US, 8: EAGER_PAIR_US},
            partial(_best_pair, num_tokens=HOST_TOKENS, execution="eager", layout=layout),
        )
    yield Target(f"host time of a call, {HOST_TOKENS} tokens", {4: HOST_US, 8: HOST_US}, _host_time)


def judge(lines: Sequence[Line], num_ranks: int) -> list[Verdict]:
    return [
        Verdict(target, target.limits.get(num_ranks), target.find(lines)) for target in targets()
    ]
