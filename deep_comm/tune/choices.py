"""Which Config to use on this machine, chosen from the lines of a bench run."""

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
Choice = Mapping[str, Any]


def choose(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """For every kind of call: the fewest SMs within the tolerance of the best time measured."""
    groups: dict[tuple[Any, ...], list[Line]] = defaultdict(list)
    defaults: dict[tuple[Any, ...], float] = {}  # of calls that are left to the Buffer
    for line in lines:
        group = tuple(line[key] for key in GROUP)
        if line["config"] is None:
            defaults.setdefault(group, line["mean_us"])
        elif "wire_bytes" in line:
            groups[group].append(line)
    choices = []
    for group, candidates in sorted(groups.items()):
        best_us = min(line["mean_us"] for line in candidates)
        good = [line for line in candidates if line["mean_us"] <= best_us * (1 + TOLERANCE)]
        chosen = min(good, key=lambda line: (line["num_sms"], line["mean_us"]))
        taken = (*GROUP, "row_bytes", "combine_row_bytes", "num_sms", "config", "mean_us")
        found = {key: chosen.get(key) for key in taken}
        choices.append({**found, "best_us": best_us, "default_us": defaults.get(group)})
    return choices


def entries(choices: Sequence[Choice]) -> list[dict[str, Any]]:
    """What Buffers read (deep_comm.tuning) for calls without a Config: of every size of row the
    choice at the most tokens, where time is bandwidth.

    Uniform routing, eager calls. Direct mode's where it was measured: rings serve what has no
    room there. A combine runs on the channels of its dispatch, so that only chunks and slots
    of its own choice matter.
    """
    best: dict[tuple[str, int], tuple[tuple[bool, bool, int], Choice]] = {}
    for choice in choices:
        operation = choice["name"].removesuffix(" cached")
        if operation not in ("dispatch", "combine") or choice["execution"] != "eager":
            continue
        is_cached = choice["name"] != "dispatch"
        weight = (choice["mode"] == "direct", choice["routing"] == "uniform",
                  choice["num_tokens"] * 2 + is_cached)  # fmt: skip
        key = (operation, choice["row_bytes" if operation == "dispatch" else "combine_row_bytes"])
        if key not in best or weight > best[key][0]:
            best[key] = (weight, choice)
    return [
        {
            "operation": operation, "row_bytes": row_bytes, "send": choice["config"][0],
            "recv": choice["config"][1],
            **{key: choice[key] for key in ("num_sms", "mean_us", "num_tokens", "mode")},
        }
        for (operation, row_bytes), (_, choice) in sorted(best.items(), key=lambda item: item[0])
    ]  # fmt: skip


def store(choices: Sequence[Choice], measured: Mapping[str, Any]) -> Path:
    """Into the file that Buffers on machines of this kind read."""
    path, name = tuning.tune_file(), measured["machine"].get("gpu", "host target")
    key = f"{name} x {measured['num_ranks']}"
    tuning.store(path, key, measured["date"], entries(choices))
    return path


def describe(choices: Sequence[Choice]) -> str:
    lines = []
    for it in choices:
        send, slots = it["config"]
        default = it["default_us"]
        compared = "" if default is None else f"; without a Config {default:.1f}"
        lines.append(
            f"{it['num_tokens']} tokens {it['dtype']}, {it['mode']} mode, {it['execution']}, "
            f"{it['name']}: Config({it['num_sms']}, {send}, {slots})  {it['mean_us']:.1f} us "
            f"(best {it['best_us']:.1f}{compared})"
        )
    return "\n".join(lines)
