"""Which Config to use on this machine: chosen from the lines of a bench run, never guessed.

The package does not read what is chosen here; pass the Config to the calls it was chosen for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

TOLERANCE = 0.02
"""SMs are worth more to the experts than this part of a call's time is to the caller."""

GROUP = ("routing", "num_tokens", "dtype", "mode", "name", "execution")

Line = Mapping[str, Any]


def choose(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """For every kind of call: the fewest SMs within the tolerance of the best time measured."""
    groups: dict[tuple[Any, ...], list[Line]] = defaultdict(list)
    for line in lines:
        # Lines without a Config say what the Buffer's own choice costs, and are no candidates.
        if line["num_sms"] is not None and line["config"] is not None and "wire_bytes" in line:
            groups[tuple(line[key] for key in GROUP)].append(line)
    choices = []
    for group, candidates in sorted(groups.items()):
        best_us = min(line["mean_us"] for line in candidates)
        good = [line for line in candidates if line["mean_us"] <= best_us * (1 + TOLERANCE)]
        chosen = min(good, key=lambda line: (line["num_sms"], line["mean_us"]))
        choices.append(
            {
                **dict(zip(GROUP, group, strict=True)),
                "num_sms": chosen["num_sms"],
                "config": chosen["config"],
                "mean_us": chosen["mean_us"],
                "best_us": best_us,
                "default_us": _default_us(lines, group),
            }
        )
    return choices


def _default_us(lines: Sequence[Line], group: tuple[Any, ...]) -> float | None:
    """What the same call took when it was left to the Buffer."""
    for line in lines:
        if line["config"] is None and tuple(line[key] for key in GROUP) == group:
            return float(line["mean_us"])
    return None


def describe(choices: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for choice in choices:
        send, slots = choice["config"]
        default = choice["default_us"]
        compared = "" if default is None else f"; without a Config {default:.1f}"
        lines.append(
            f"{choice['num_tokens']} tokens {choice['dtype']}, {choice['mode']} mode, "
            f"{choice['execution']}, {choice['name']}: "
            f"Config({choice['num_sms']}, {send}, {slots})  "
            f"{choice['mean_us']:.1f} us (best {choice['best_us']:.1f}{compared})"
        )
    return "\n".join(lines)
