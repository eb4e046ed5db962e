"""Which Config to use on this machine: chosen from the lines of a bench run, never guessed.

``entries`` are what Buffers read (deep_comm.tuning) for calls without a Config.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deep_comm import tuning

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
                "row_bytes": chosen.get("row_bytes"),
                "combine_row_bytes": chosen.get("combine_row_bytes"),
                "num_sms": chosen["num_sms"],
                "config": chosen["config"],
                "mean_us": chosen["mean_us"],
                "best_us": best_us,
                "default_us": _default_us(lines, group),
            }
        )
    return choices


def entries(choices: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What Buffers are told: of every size of row the choice at the most
    tokens, where time is bandwidth.

    Uniform routing, eager calls. Direct mode's where it was measured: rings serve what has no
    room there. A combine runs on the channels of its dispatch, so that only chunks and slots
    of its own choice matter.
    """
    best: dict[tuple[str, int], tuple[tuple[bool, bool, int], Mapping[str, Any]]] = {}
    for choice in choices:
        operation = {"dispatch cached": "dispatch"}.get(choice["name"], choice["name"])
        if operation not in ("dispatch", "combine") or choice["execution"] != "eager":
            continue
        row_bytes = choice["row_bytes" if operation == "dispatch" else "combine_row_bytes"]
        weight = (
            choice["mode"] == "direct",
            choice["routing"] == "uniform",
            choice["num_tokens"] * 2 + (choice["name"] != "dispatch"),
        )
        key = (operation, row_bytes)
        if key not in best or weight > best[key][0]:
            best[key] = (weight, choice)
    return [
        {
            "operation": operation,
            "row_bytes": row_bytes,
            "num_sms": choice["num_sms"],
            "send": choice["config"][0],
            "recv": choice["config"][1],
            "mean_us": choice["mean_us"],
            "num_tokens": choice["num_tokens"],
            "mode": choice["mode"],
        }
        for (operation, row_bytes), (_, choice) in sorted(best.items(), key=lambda item: item[0])
    ]


def store(choices: Sequence[Mapping[str, Any]], measured: Mapping[str, Any]) -> Path:
    """Into the file that Buffers on machines of this kind read."""
    path = tuning.tune_file()
    machine = measured["machine"]
    name = machine["gpu"] if machine["device"] == "cuda" else "host target"
    key = f"{name} x {measured['num_ranks']}"
    tuning.store(path, key, measured["date"], entries(choices))
    return path


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
