"""Calls over two tiers beside those of one: every target of two tiers is such a ratio,
of one run on one machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deep_comm.bench.normal import Measured
from deep_comm.bench.report import align
from deep_comm.bench.two_tier import MAX_SMS, MODE, RailCount

MAX_RATIO = 1.35  # both with at most MAX_SMS


@dataclass(frozen=True)
class Ratio:
    """The quickest call over two tiers beside the quickest of one tier, both within MAX_SMS."""

    workload: str
    operation: str
    two_tier_us: float
    two_tier_sms: int | None
    single_us: float
    single_mode: str
    single_sms: int | None

    @property
    def value(self) -> float:
        return self.two_tier_us / self.single_us

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.value, "at_most": MAX_RATIO}


def ratios(lines: Sequence[Measured]) -> list[Ratio]:
    """By workload and operation, where both were measured; eager calls,
    combine of ordinary tensors.
    """
    own = [
        line
        for line in lines
        if line.volume is not None
        and not line.is_rival
        and line.execution == "eager"
        and (line.num_sms or 0) <= MAX_SMS
    ]
    found = []
    for workload, name in dict.fromkeys((line.workload, line.name) for line in own):
        same = [line for line in own if (line.workload, line.name) == (workload, name)]
        two = [line for line in same if line.mode == MODE]
        one = [line for line in same if line.mode != MODE]
        if not two or not one:
            continue
        slow, quick = (min(part, key=lambda line: line.timing.mean_us) for part in (two, one))
        found.append(
            Ratio(
                workload.describe(), name, slow.timing.mean_us, slow.num_sms,
                quick.timing.mean_us, quick.mode, quick.num_sms,
            )
        )  # fmt: skip
    return found


def table(found: Sequence[Ratio], counts: Sequence[RailCount]) -> str:
    """What a run says of two tiers; the ratio's verdict is about GPUs alone."""
    rows = [["operation", "two tiers us", "SMs", "one tier us", "mode", "SMs", "ratio", "of"]]
    for each in found:
        rows.append(
            [
                each.operation,
                f"{each.two_tier_us:.1f}",
                str(each.two_tier_sms),
                f"{each.single_us:.1f}",
                each.single_mode,
                str(each.single_sms),
                f"{each.value:.2f}",
                each.workload,
            ]
        )
    text = f"two tiers beside one, at most {MAX_SMS} SMs (target on GPUs: at most {MAX_RATIO})\n"
    text += align(rows, 1)
    total = sum(each.put_bytes for each in counts)
    num_rows = sum(each.rows for each in counts)
    right = (
        "exactly one row a (token, remote node)"
        if all(each.is_exact for each in counts)
        else "WRONG"
    )
    return f"{text}\nrail: {num_rows} rows, {total} bytes in {len(counts)} calls counted: {right}"
