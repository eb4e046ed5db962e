"""What the bench of ExpertParallel says: its table, the crossover, the
verdict, the stored threshold.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deep_comm.bench.measure import Timing

TARGET = 1.05  # auto over the better mode


@dataclass(frozen=True)
class Quartiles:
    """Of a number that every turn has."""

    low: float
    median: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Quartiles:
        if len(values) < 2:
            return Quartiles(values[0], values[0], values[0])
        return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Judged:
    """auto between two rounds of its rival, in every turn: what both are for a machine whose speed
    drifts, and what the same program differs from itself by.

    Attributes:
        ratio: auto's round over the mean of the two around it.
        noise: the rival's second round over its first.
    """

    ratio: Quartiles
    noise: Quartiles

    @staticmethod
    def of(rival: Sequence[float], auto: Sequence[float], again: Sequence[float]) -> Judged:
        turns = list(zip(rival, auto, again, strict=True))
        return Judged(
            Quartiles.of([2 * of_auto / (before + behind) for before, of_auto, behind in turns]),
            Quartiles.of([behind / before for before, _, behind in turns]),
        )


@dataclass(frozen=True)
class Pair:
    """A step of so many tokens a rank by each mode, and by auto; None: not measured.

    Attributes:
        decode_fits: the layer whose auto is measured takes so many tokens with mode="decode", too;
            if not, ``decode`` is of a layer that was built for more, with its memory.
        rival: the better mode that this layer takes, named in its calls, timed in turn with auto.
        judged: of the turns.
    """

    prefill: Timing | None
    decode: Timing | None
    auto: Timing | None = None
    decode_fits: bool = True
    rival: Timing | None = None
    judged: Judged | None = None

    @property
    def ratio(self) -> float | None:
        """Of auto to the better mode of the same layer that was measured."""
        if self.judged is not None:
            return self.judged.ratio.median
        if self.rival is not None:
            return self._ratio_to(self.rival)
        return self._ratio_to(self.prefill, self.decode if self.decode_fits else None)

    @property
    def better(self) -> str:
        """Mode of the same layer."""
        if self.decode is None or not self.decode_fits:
            return "prefill"
        is_slower = self.prefill is not None and self.prefill.mean_us < self.decode.mean_us
        return "prefill" if is_slower else "decode"

    @property
    def ratio_to_any(self) -> float | None:
        """To the better mode of any layer."""
        return self._ratio_to(self.prefill, self.decode)

    def _ratio_to(self, *fixed: Timing | None) -> float | None:
        means = [timing.mean_us for timing in fixed if timing is not None]
        return None if self.auto is None or not means else self.auto.mean_us / min(means)

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return "-"
        return "ok" if self.ratio <= TARGET else "MISSED"

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "ratio": self.ratio,
            "ratio_to_any": self.ratio_to_any,
            "verdict": self.verdict,
        }


@dataclass(frozen=True)
class Line:
    """One number of tokens.

    Attributes:
        graph: the same steps in CUDA graphs; a captured auto step is a decode step.
        one_rank: auto where one rank has the tokens and the others few; None: not measured.
    """

    tokens: int
    eager: Pair
    graph: Pair
    one_rank: Timing | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "eager": self.eager.to_json(),
            "graph": self.graph.to_json(),
            "one_rank": None if self.one_rank is None else self.one_rank.to_json(),
        }


_PAIR = ("prefill", "decode", "rival", "auto", "ratio", "verdict", "noise")
COLUMNS = ("tokens", *_PAIR, *(f"graph:{name}" if name == "prefill" else name for name in _PAIR),
           "one rank", "host auto", "host rival")  # fmt: skip
_WIDTH = 8


def header() -> str:
    return " ".join(name.rjust(max(_WIDTH, len(name))) for name in COLUMNS)


def row(line: Line) -> str:
    def number(value: float | None, digits: int = 1) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    def mean(timing: Timing | None) -> str:
        return number(None if timing is None else timing.mean_us)

    def of(pair: Pair) -> tuple[str, ...]:
        parts = mean(pair.prefill), mean(pair.decode), mean(pair.rival), mean(pair.auto)
        noise = None if pair.judged is None else pair.judged.noise.median
        return (*parts, number(pair.ratio, 3), pair.verdict, number(noise, 3))

    hosts = (
        number(None if timing is None else timing.host_us)
        for timing in (line.eager.auto, line.eager.rival)
    )
    cells = (str(line.tokens), *of(line.eager), *of(line.graph), mean(line.one_rank), *hosts)
    return " ".join(
        cell.rjust(max(_WIDTH, len(name))) for cell, name in zip(cells, COLUMNS, strict=True)
    )


def crossover(pairs: Sequence[tuple[int, Pair]]) -> int:
    """Tokens up to which decode is not the slower mode; 0: it is from the start.

    Between the last measured size at which it is not and the first at which it is, both times are
    taken for straight lines.
    """
    best = 0
    gained_us = 0.0  # by decode, at ``best``
    for tokens, pair in sorted(pairs, key=lambda entry: entry[0]):
        if pair.decode is None or pair.prefill is None:
            break
        lost_us = pair.decode.mean_us - pair.prefill.mean_us
        if lost_us > 0:
            if best > 0:
                best += math.floor((tokens - best) * gained_us / (gained_us + lost_us))
            break
        best, gained_us = tokens, -lost_us
    return best


def verdict(lines: Sequence[Line], left_out: Sequence[int], decode_tokens: int) -> str:
    """In words; the last word on whether the target is met."""
    eager = crossover([(line.tokens, line.eager) for line in lines])
    captured = crossover([(line.tokens, line.graph) for line in lines])
    texts = [f"decode is not the slower mode up to {eager} tokens a rank"]
    if captured:
        texts[0] += f", captured up to {captured} or more"
    texts[0] += f"; auto's decode_tokens: {decode_tokens}"
    judged = [
        (name, line.tokens, pair.ratio)
        for line in lines
        for name, pair in (("eager", line.eager), ("graph", line.graph))
        if pair.ratio is not None
    ]
    over = [entry for entry in judged if entry[2] > TARGET]
    if over:
        worst = max(over, key=lambda entry: entry[2])
        where = ", ".join(f"{tokens} ({name} {ratio:.3f})" for name, tokens, ratio in over)
        texts.append(
            f"auto MISSED {TARGET:.2f} of the better mode at {where}; worst {worst[2]:.3f}"
        )
    elif judged:
        texts.append(f"auto is within {TARGET:.2f} of the better mode at every size measured")
    texts += [
        f"{line.tokens} tokens, {name}: auto over its rival {pair.judged.ratio}, the rival over "
        f"itself {pair.judged.noise}"
        for line in lines
        for name, pair in (("eager", line.eager), ("graph", line.graph))
        if pair.judged is not None
    ]
    larger = [
        f"{line.tokens} ({line.eager.ratio_to_any:.2f})"
        for line in lines
        if not line.eager.decode_fits and (line.eager.ratio_to_any or 0) > TARGET
    ]
    if larger:
        texts.append(
            "a layer with a larger decode_tokens, and its memory, would be faster by decode at "
            f"{', '.join(larger)}"
        )
    if left_out or not judged:
        sizes = ", ".join(map(str, left_out))
        texts.append(f"NOT COMPLETE: time was up before {sizes or 'anything was measured'}")
    return "\n".join(texts)
