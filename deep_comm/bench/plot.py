"""Two figures in one PNG: wire rate over SMs, and time over tokens, of the operations that move
rows."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deep_comm.bench import rivals
from deep_comm.bench.line import Line
from deep_comm.bench.link import LinkLimit

Points = list[tuple[float, float]]

# More lines than these cannot be told apart; the JSON file has them all.
PLOTTED = ("dispatch", "dispatch cached", "combine", "combine in place", rivals.ALL_TO_ALL)


def series(
    lines: Sequence[Line], point: Callable[[Line], tuple[float, float] | None]
) -> dict[str, Points]:
    """Points by label, sorted; of several lines at one abscissa the fastest."""
    found: dict[str, dict[float, float]] = defaultdict(dict)
    for line in sorted(lines, key=lambda line: -line.timing.mean_us):  # the fastest comes last
        is_known = line.name in PLOTTED or line.name.split()[-1] in PLOTTED
        at = point(line) if is_known and line.workload.routing == "uniform" else None
        if at is not None:
            parts = (line.name, line.workload.dtype, line.mode, line.execution)
            found[" ".join(filter(None, parts))][at[0]] = at[1]
    return {label: sorted(points.items()) for label, points in found.items()}


def rate_over_sms(lines: Sequence[Line]) -> tuple[int, dict[str, Points]]:
    """At the largest number of tokens that several SM counts were measured with, else the
    largest."""
    by_tokens: dict[int, set[int]] = defaultdict(set)
    for line in lines:
        if line.num_sms is not None and line.volume is not None:
            by_tokens[line.workload.num_tokens].add(line.num_sms)
    if not by_tokens:
        return 0, {}
    num_tokens = max(by_tokens, key=lambda tokens: (len(by_tokens[tokens]) > 1, tokens))

    def point(line: Line) -> tuple[float, float] | None:
        if line.num_sms is None or line.volume is None or line.workload.num_tokens != num_tokens:
            return None
        return line.num_sms, line.rate(line.volume.wire_bytes)

    return num_tokens, series(lines, point)


def time_over_tokens(lines: Sequence[Line]) -> dict[str, Points]:
    """With the Config that was fastest at each size."""
    return series(lines, lambda line: (line.workload.num_tokens, line.timing.mean_us))


def draw(lines: Sequence[Line], limit: LinkLimit | None, title: str, path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print("matplotlib is not installed: no plot was written (pip install matplotlib)")
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(17, 7))
    num_tokens, rates = rate_over_sms(lines)
    _plot(left, rates)
    if limit is not None:
        left.axhline(limit.gb_per_s, color="black", linestyle="--", label="link limit")
    left.set(xlabel="SMs", ylabel="wire GB/s", title=f"{num_tokens} tokens per rank")
    _plot(right, time_over_tokens(lines))
    right.set(
        xlabel="tokens per rank", ylabel="us", xscale="log", yscale="log", title="time of a call"
    )
    for axes in (left, right):
        axes.grid(True, alpha=0.3)
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _plot(axes: Any, lines: dict[str, Points]) -> None:
    for index, (label, points) in enumerate(sorted(lines.items())):
        style = {
            "color": f"C{index % 10}",
            "linestyle": "--" if label.endswith("graph") else "-",
            "marker": "os^vD"[index // 10 % 5],
            "markersize": 4,
        }
        axes.plot(*zip(*points, strict=True), label=label, **style)
