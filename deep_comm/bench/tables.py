"""``python -m deep_comm.bench.tables FILE...``: Markdown tables of what the bench wrote in JSON.

A row is an operation, a column one of the values that were swept (tokens, routings or SMs), a cell
the microseconds of eager calls and, in brackets, of calls in a CUDA graph.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from deep_comm.bench import plot
from deep_comm.settings import command_line

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


def align(rows: Sequence[Sequence[str]], num_text_columns: int) -> str:
    """Columns of equal width, as the bench prints them: text to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        texts, numbers = row[:num_text_columns], row[num_text_columns:]
        cells = [cell.ljust(width) for cell, width in zip(texts, widths, strict=False)]
        cells += map(str.rjust, numbers, widths[num_text_columns:])
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def swept(lines: Sequence[Line]) -> str:
    """The first of SWEEPS of which the library's own lines have several values."""
    own = [line for line in lines if not line["is_rival"]]
    several = (name for name, key in SWEEPS.items() if len({line.get(key) for line in own}) > 1)
    return next(several, "tokens")


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
    key, text = VALUES[value]
    found = {line["execution"]: text(line[key]) for line in lines if line.get(key) is not None}
    graph = f"({found['graph']})" if "graph" in found else ""
    return " ".join(filter(None, (found.get("eager"), graph))) or "–"


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
    common = f", {counts.pop()} tokens" if len(counts) == 1 else "\n"
    for name, found in rows.items():
        cells = [name.replace(common, ""), *(cell(found.get(it, ()), value) for it in columns)]
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def heading(document: dict[str, Any]) -> str:
    name, limit = document["machine"].get("gpu", "host target"), document.get("limit")
    found = f"{document['num_ranks']} × {name}, {document['date'][:10]}, `{document['command']}`"
    return found if limit is None else f"{found}; link limit {limit['gb_per_s']:.0f} GB/s"


def page(document: dict[str, Any], value: str) -> str:
    lines = document.get("normal") or document.get("low_latency")
    if not lines:
        raise ValueError("no lines of normal or low-latency mode")
    return f"{heading(document)}\n\n{table(lines, swept(lines), value)}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line.Parser(
        prog="python -m deep_comm.bench.tables", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument("file", nargs="+")
    parser.add_argument("--value", choices=VALUES, default="us")
    parsed = parser.parse_args(arguments)
    for file in parsed.file:
        try:
            print(plot.from_file(file, lambda document: page(document, parsed.value)))
        except argparse.ArgumentTypeError as error:
            parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
