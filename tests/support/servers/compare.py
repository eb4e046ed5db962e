"""Two runs token by token, each beside the dense model, or loss by loss; and the table of all.

Every row with tokens is judged beside the dense model. Rows whose sums are those of their base
(``Row.sums_as_its_base``) must also agree with it. A control must fail beside the dense model. All
other comparisons are shown, and decide nothing.

The dense model is given each prefix of a run's tokens and says which token is next. Few may differ
from its: other kernels round otherwise, and where that makes a router choose another expert,
everything behind differs. A run whose experts and sums are those of its base has to agree with it
prompt by prompt as well: its tokens are the base's, or first differ where the base's two best
log-probabilities are within the tolerance, and the log-probabilities before are within it too.

Losses of two dispatchers have the same bits where every kernel's sums have a fixed order: rows
come in the same order, and a token's two experts give a sum of two addends. Where a kernel adds in
any order, or a gradient is rounded more often, the first step may differ by that rounding, and
later steps by what training makes of it: a router chooses another expert.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servers.combinations import ROWS, Row
from servers.models import MODELS
from servers.runs import file_name

TOLERANCE = 0.4  # of log-probabilities
MOST_FLIPPED = 0.05  # of tokens beside the dense model
FP8_TOLERANCE = 1.0  # beside the dense model, which does not cast the experts' inputs
LOSS_TOLERANCE = 0.05  # of the mean loss of any tenth of a run
LEARNED = 0.9  # the last loss is below this share of the first
FIRST_TOLERANCE = 1e-3  # of the first step: loss, and share of the gradient's norm


@dataclass(frozen=True)
class Verdict:
    equal: int = 0
    near_ties: int = 0
    wrong: int = 0
    missing: int = 0  # prompts of the base without an answer of its length, or none compared
    worst: float = 0.0  # difference of log-probabilities

    def agrees(self, tolerance: float = TOLERANCE) -> bool:
        return not self.wrong and not self.missing and self.worst <= tolerance

    def resembles(self) -> bool:
        """Beside the dense model. A wrong token's log-probability may have any value but NaN."""
        is_whole = not self.missing and self.worst < float("inf")
        return is_whole and self.wrong <= MOST_FLIPPED * self._num_tokens

    def is_elsewhere(self) -> bool:
        """As a control must be beside the dense model: all is there, and too much is wrong."""
        return not self.missing and self.wrong > MOST_FLIPPED * self._num_tokens

    @property
    def _num_tokens(self) -> int:
        return self.equal + self.near_ties + self.wrong

    def __str__(self) -> str:
        text = f"{self.equal} equal, {self.near_ties} near ties, {self.wrong} wrong"
        return f"{text}, {self.missing} missing" if self.missing else text


def compare(
    base: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]], tolerance: float = TOLERANCE
) -> Verdict:
    """Rows of two runs, matched by prompt."""
    found = {row["prompt"]: row for row in other}
    equal = near_ties = wrong = missing = 0
    worst = 0.0
    for expected in base:
        got = found.get(expected["prompt"])
        if got is None or len(got["tokens"]) != len(expected["tokens"]):
            missing += 1
            continue
        pairs = list(zip(expected["tokens"], got["tokens"], strict=True))
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is None:
            equal += 1
        elif expected["margins"][first] <= tolerance:
            near_ties += 1
        else:
            wrong += 1
        both = list(zip(expected["logprobs"], got["logprobs"], strict=True))[:first]
        worst = max([worst, *(_distance(a, b) for a, b in both)])
    return Verdict(equal, near_ties, wrong, missing or int(not base), worst)


def _distance(a: float, b: float) -> float:
    """Infinite if one is no number: max() would lose it."""
    return abs(a - b) if a == a and b == b else float("inf")


def compare_with_reference(
    rows: Sequence[dict[str, Any]], dense: Sequence[dict[str, Any]], tolerance: float = TOLERANCE
) -> Verdict:
    """Token by token: the dense model was given each prefix of ``rows``."""
    equal = near_ties = wrong = missing = 0
    worst = 0.0
    found = {row["prompt"]: row for row in dense}
    for row in rows:
        said = found.get(row["prompt"])
        if said is None or len(said["tokens"]) != len(row["tokens"]):
            missing += 1
            continue
        for index, token in enumerate(row["tokens"]):
            if said["tokens"][index] == token:
                equal += 1
            elif said["margins"][index] <= tolerance:
                near_ties += 1
            else:
                wrong += 1
            worst = max(worst, _distance(row["logprobs"][index], said["logprobs"][index]))
    return Verdict(equal, near_ties, wrong, missing or int(not rows), worst)


def reference_tolerance(row: Row) -> float:
    return FP8_TOLERANCE if MODELS[row.model].fp8 else TOLERANCE


@dataclass(frozen=True)
class LossVerdict:
    """Of all ranks' steps: losses, and norms of gradients."""

    equal: int  # losses with the same bits
    total: int
    first: float  # difference in the first step: of losses, or the share of the norms
    worst: float  # difference of the mean losses of any tenth of the run

    def agrees(self) -> bool:
        return self.first <= FIRST_TOLERANCE and self.worst <= LOSS_TOLERANCE

    def __str__(self) -> str:
        return (
            f"{self.equal} of {self.total} losses equal bit for bit, the first step within "
            f"{self.first:.2g}, the mean of each tenth within {self.worst:.2g}"
        )


def compare_training(base: dict[str, Any], other: dict[str, Any]) -> LossVerdict:
    """Raises ValueError if ranks or steps are not as many."""
    ranks = list(zip(base["losses"], other["losses"], strict=True))
    equal = [one == two for a, b in ranks for one, two in zip(a, b, strict=True)]
    firsts = [_distance(a[0], b[0]) for a, b in ranks]
    norms = zip(base["norms"], other["norms"], strict=True)
    firsts += [_distance(a[0], b[0]) / a[0] for a, b in norms]
    tenths = [zip(_tenths(a), _tenths(b), strict=True) for a, b in ranks]
    worst = max(_distance(one, two) for pairs in tenths for one, two in pairs)
    return LossVerdict(sum(equal), len(equal), max(firsts), worst)


def _tenths(losses: Sequence[float]) -> list[float]:
    size = max(1, len(losses) // 10)
    return [statistics.fmean(losses[at : at + size]) for at in range(0, len(losses), size)]


def judge_training(
    row: Row, result: dict[str, Any], base: dict[str, Any] | None
) -> tuple[bool, str]:
    """Whether a model has learned, and as the base's has; a control must learn otherwise."""
    losses = result["losses"][0]
    learned = f"loss {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps"
    if not all(one[-1] < LEARNED * one[0] for one in result["losses"]):
        return False, f"has not learned: {learned}"
    if row == row.base:
        return True, f"the base; {learned}"
    if base is None or "losses" not in base:
        return False, "its base has no result"
    verdict = compare_training(base, result)
    if row.is_control:
        text = "NOT WRONG" if verdict.agrees() else "wrong as it must be"
        return not verdict.agrees(), f"control, {text}: {verdict}"
    return verdict.agrees(), f"{learned}; {verdict}"


# ---- the table -----------------------------------------------------------------------------------


def judge(row: Row, result: dict[str, Any], base: dict[str, Any] | None) -> tuple[bool, str]:
    """Whether a run is as it must be, and in words."""
    if result.get("failure"):
        return False, f"failed: {result['failure'].splitlines()[0]}"
    if "refused" in row.options:
        return True, f"ends after {result['facts']['ended_s']:.0f} s: {result['said'][:100]}"
    num_calling = sum(bool(one["counts"]) for one in result["calls"])
    was_called = result["built"] and num_calling >= row.num_gpus
    if row.is_over_deep_comm and not was_called:
        return False, "deep_comm was not called"
    if "eplb" in row.options and result["rearranged"] < 2:
        return False, "experts were not moved"
    if "prefix" in row.options and not result["cached"]:
        return False, "no prefix was found in the cache"
    if "dbo" in row.options and not result["steps"].get("split"):
        return False, "no step was split"
    if row.front == "figures":
        return True, "measured"
    if row.front == "training":
        return judge_training(row, result, base)
    if result.get("reference") is None:
        return False, "not compared with the dense model"
    beside = Verdict(**result["reference"])
    is_good, text = beside.resembles(), f"beside the dense model {beside}"
    if row.is_control:
        is_wrong = beside.is_elsewhere()
        return is_wrong, f"control, {'wrong as it must be' if is_wrong else 'NOT WRONG'}, {text}"
    if row == row.base:
        return is_good, f"the base; {text}"
    if base is None or "rows" not in base:
        return False, f"its base has no result; {text}"
    verdict = compare(base["rows"], result["rows"])
    if row.sums_as_its_base:
        is_good = is_good and verdict.agrees()
    known = f"prompts {verdict}; log-probabilities within {verdict.worst:.2g}"
    if "dbo" in row.options:
        known += f"; steps {result['steps']}"
    return is_good, f"{known}; {text}"


@dataclass(frozen=True)
class Line:
    row: Row
    is_good: bool | None  # None: did not run
    text: str
    figures: dict[str, Any]


def lines(out: Path, rows: Iterable[Row] = ROWS) -> list[Line]:
    """What became of each row in a folder of runs."""
    results = {}
    for row in ROWS:
        path = out / f"{file_name(row)}.json"
        if path.exists():
            results[row.name] = json.loads(path.read_text())
    found = []
    for row in rows:
        result = results.get(row.name)
        if result is None:
            text = f"not run: needs {row.lacks}" if row.lacks else "not run"
            found.append(Line(row, None, text, {}))
        elif result.get("skipped"):
            found.append(Line(row, None, f"not run: needs {result['skipped']}", {}))
        else:
            is_good, text = judge(row, result, results.get(row.base.name))
            found.append(Line(row, is_good, text, result.get("figures", {})))
    return found


def table(found: Sequence[Line]) -> str:
    """Markdown."""
    words = {True: "good", False: "BAD", None: "–"}
    text = ["| combination | verdict | |", "|---|---|---|"]
    text += [f"| `{one.row.name}` | {words[one.is_good]} | {one.text} |" for one in found]
    timed = [one for one in found if one.figures]
    if timed:
        text += ["", "| combination | clients | tokens/s | gain | first, ms | each, ms |"]
        text += ["|---|---|---|---|---|---|"]
        for one in timed:
            for clients, measured in one.figures.items():
                for row, values in zip((one.row.base, one.row), measured, strict=True):
                    cells = [
                        f"{values[name]['mean']:.4g} ± {values[name]['half_width']:.2g}"
                        for name in ("tokens_s", "gain", "first_ms", "each_ms")
                    ]
                    text.append(f"| `{row.name}` | {clients} | {' | '.join(cells)} |")
    return "\n".join(text) + "\n"
