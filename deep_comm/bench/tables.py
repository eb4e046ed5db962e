"""``python -m deep_comm.bench.tables FILE...``: Markdown tables of what the bench wrote in JSON.

A row is an operation, a column one of the values that were swept (tokens, routings or SMs), a cell
the microseconds of eager calls and, in brackets, of calls in a CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

SWEEPS = {"tokens": "num_tokens", "routing": "routing", "sms": "sms", "dtype": "dtype"}
VALUES: dict[str, tuple[str, Callable[[float], str]]] = {
    "us": ("mean_us", lambda us: f"{us:.1f}" if us < 100 else f"{us:.0f}"),
    "p50": ("p50_us", lambda us: f"{us:.1f}"),
    "p99": ("p99_us", lambda us: f"{us:.1f}"),
    "host": ("host_us", lambda us: f"{us:.1f}"),
    "rate": ("wire_gb_per_s", lambda rate: f"{rate:.0f}"),
    "limit": ("fraction_of_limit", lambda share: f"{100 * share:.0f}"),
}
_DTYPES = {"bf16": "BF16", "fp8": "FP8", "nvfp4": "NVFP4", "logfmt": "LogFMT"}

Line = dict[str, Any]


def lines_of(document: dict[str, Any]) -> list[Line]:
    lines: list[Line] = document.get("normal") or document.get("low_latency") or []
    return lines


def swept(lines: Sequence[Line]) -> str:
    """The first of SWEEPS of which the library's own lines have several values."""
    own = [line for line in lines if not line["is_rival"]]
    for name, field in SWEEPS.items():
        if len({line.get(field) for line in own}) > 1:
            return name
    return "tokens"


def label(line: Line, over: str) -> str:
    """What a row is about: everything but the swept value and how calls are made."""
    parts = [str(line["name"])]
    if over != "dtype":
        parts.append(_DTYPES[line["dtype"]])
    parts += [str(line[name]) for name in ("layout", "phases", "mode") if line.get(name)]
    if line.get("combine_format", "bf16") != "bf16":
        parts.append(f"back in {_DTYPES[line['combine_format']]}")
    if over != "sms" and line.get("sms"):
        parts.append("auto" if line["sms"].startswith("auto") else f"{line['sms']} SMs")
    if over != "tokens":
        parts.append(f"{line['num_tokens']} tokens")
    if over != "routing" and line.get("routing", "uniform") != "uniform":
        parts.append(f"{line['routing']}")
    return ", ".join(parts)


def cell(lines: Iterable[Line], value: str) -> str:
    field, text = VALUES[value]
    found = {line["execution"]: text(line[field]) for line in lines if line.get(field) is not None}
    eager, graph = found.get("eager"), found.get("graph")
    if eager is None or graph is None:
        return eager or (f"({graph})" if graph else "–")
    return f"{eager} ({graph})"


def _column(line: Line, over: str) -> Any:
    value = line.get(SWEEPS[over])
    return "auto" if over == "sms" and str(value).startswith("auto") else value


def table(lines: Sequence[Line], over: str, value: str) -> str:
    """What has no value of the swept kind (SMs of others' collectives) stands in the first
    column."""
    columns = list(dict.fromkeys(_column(line, over) for line in lines if line.get(SWEEPS[over])))
    rows: dict[str, dict[Any, list[Line]]] = {}
    for line in lines:
        row = rows.setdefault(label(line, over), {})
        row.setdefault(_column(line, over) or columns[0], []).append(line)
    text = [f"| {value}, by {over} | " + " | ".join(map(str, columns)) + " |"]
    text.append("|---" * (len(columns) + 1) + "|")
    # What all rows have in common says nothing.
    counts = {line["num_tokens"] for line in lines}
    common = f", {counts.pop()} tokens" if len(counts) == 1 else None
    for name, found in rows.items():
        cells = [cell(found.get(column, ()), value) for column in columns]
        shown = name if common is None else name.replace(common, "")
        text.append(f"| {shown} | " + " | ".join(cells) + " |")
    return "\n".join(text)


def heading(document: dict[str, Any]) -> str:
    machine = document["machine"]
    name = machine.get("gpu", "host target")
    limit = document.get("limit")
    found = f"{document['num_ranks']} × {name}, {document['date'][:10]}, `{document['command']}`"
    return found if limit is None else f"{found}; link limit {limit['gb_per_s']:.0f} GB/s"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m deep_comm.bench.tables", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument("file", type=Path, nargs="+")
    parser.add_argument("--over", choices=SWEEPS, help="default: what was swept")
    parser.add_argument("--value", choices=VALUES, default="us")
    parsed = parser.parse_args(arguments)
    for file in parsed.file:
        try:
            document = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            parser.error(f"{file}: {error}")
        lines = lines_of(document)
        if not lines:
            parser.error(f"{file}: no lines of normal or low-latency mode")
        print(heading(document) + "\n")
        print(table(lines, parsed.over or swept(lines), parsed.value) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
