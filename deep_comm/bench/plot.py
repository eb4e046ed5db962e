"""The picture of a run, made of the JSON that the bench writes: times and rates over sizes.

Needs no torch, so that figures of another machine can be drawn anywhere.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from deep_comm.settings import command_line

T = TypeVar("T")

MISSING = 'needs matplotlib, which is not installed; run: pip install "deep_comm[plot]"'
SUFFIXES = (".svg", ".png", ".pdf")

MOST_OPERATIONS = 4  # of a picture; the JSON has them all
FIRST = ("dispatch", "dispatch cached", "combine", "combine in place", "pair")
LAST = "layout"  # moves no rows
AUTO_TARGET = 1.05  # auto over the better mode

# On a light page, and on a dark one.
INK, DIM, GRID, PAGE = "#1f2328", "#59636e", "#d8dee4", "#ffffff"
BLUE, ORANGE, PURPLE, GREEN = "#0969da", "#bc4c00", "#8250df", "#1a7f37"
GREY, PINK = "#7d8590", "#bf3989"
DARK = {INK: "#f0f6fc", DIM: "#9198a1", GRID: "#30363d", PAGE: "#0d1117", BLUE: "#79c0ff",
        ORANGE: "#ffa657", PURPLE: "#d2a8ff", GREEN: "#56d364", GREY: "#8b949e",
        PINK: "#f778ba"}  # fmt: skip
COLOURS = {"direct": BLUE, "ring": ORANGE, "two-tier": PURPLE, "compact": BLUE, "packed": ORANGE,
           "packed-late": PURPLE, "decode": BLUE, "prefill": ORANGE, "auto": GREEN,
           "fused": BLUE, "decomposed": ORANGE, "unfused": PURPLE, "kernel": BLUE,
           "copy engines": ORANGE, "one_shot": BLUE, "two_shot": ORANGE,
           "cuBLAS + NCCL": GREY, "NCCL": GREY}  # fmt: skip
MARKERS = {"": "o", "bf16": "o", "fp8": "s", "nvfp4": "^", "bf16, logfmt": "D", "fp8, logfmt": "v",
           "nvfp4, logfmt": "X"}  # fmt: skip
DASHES = {"": "-", "eager": "-", "graph": "--", "eager, hooked": ":", "graph, hooked": "-."}


@dataclass(frozen=True)
class Series:
    """One line: who sends, in which format, called how."""

    who: str
    points: tuple[tuple[float, float], ...]
    payload: str = ""  # of MARKERS
    run_as: str = ""  # of DASHES


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    series: list[Series]
    is_log: bool = True
    level: tuple[str, float] | None = None  # a horizontal line
    edge: tuple[str, float] | None = None  # a vertical one


@dataclass(frozen=True)
class Picture:
    title: str
    origin: str  # machine, versions, date, commit
    x_name: str
    columns: list[list[Panel]]
    notes: str = ""


# ---- from JSON to a picture ----------------------------------------------------------------------


def picture_file(text: str) -> Path:
    """Of a kind that matplotlib draws. As a type of options, so that hours of work do not end
    here."""
    path = command_line.file_to_write(text)
    if path.suffix not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text} must end in {', '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(MISSING)
    return path


def read(text: str) -> Picture:
    return from_file(text, picture_of)


def from_file(text: str, make: Callable[[dict[str, Any]], T]) -> T:
    """What is made of a file that the bench has written, now or long ago."""
    path = command_line.file_to_read(text)
    try:
        return make(json.loads(path.read_text()))
    except KeyError as error:
        why = f"{error} is missing"
    except (AttributeError, IndexError, OSError, TypeError, ValueError) as error:
        why = str(error)
    raise argparse.ArgumentTypeError(f"{text} is not what `deep_comm bench --json` writes: {why}")


def picture_of(document: dict[str, Any]) -> Picture:
    if "decode_tokens" in document:
        return _layer(document)
    if "tensor_parallel" in document:
        return _tensor_parallel(document)
    return _calls(document, "low_latency" if "low_latency" in document else "normal")


def _origin(document: dict[str, Any]) -> str:
    facts = document["machine"]
    num_ranks, per_node = document["num_ranks"], document.get("ranks_per_node")
    where = f"{num_ranks} ranks of the host target, {facts['cores']} cores"
    if facts["device"] == "cuda":
        where = f"{num_ranks} × {facts['gpu']}, CUDA {facts['cuda']}"
    parts = [where, f"nodes of {per_node}" if per_node else "one node"]
    parts += [f"deep_comm {facts['deep_comm']}", f"torch {facts['torch']}", document["date"][:10]]
    commit = document.get("commit")  # files of 0.1 have none
    return " · ".join([*parts, f"commit {commit}" if commit else "commit not recorded"])


def _calls(document: dict[str, Any], key: str) -> Picture:
    every = document[key]
    own = [line for line in every if not line["is_rival"]]
    if not own:
        raise ValueError("it has no lines")
    routing = "uniform" if any(it["routing"] == "uniform" for it in own) else own[0]["routing"]
    # Beside fused calls, hooked ones would be too many lines to tell apart.
    phases = ("", "fused" if any(it["phases"] == "fused" for it in own) else "hooked")
    lines = [it for it in every if it["routing"] == routing and it["phases"] in phases]
    shape = re.search(r"hidden (\d+) \w+, (\d+) experts, top-(\d+)", own[0]["workload"])
    if shape is None:
        raise ValueError(f"its workload is {own[0]['workload']!r}")
    sizes, sms = ({line[it] for line in own} for it in ("num_tokens", "num_sms"))
    over, x_name = "num_tokens", "tokens per rank"
    title = f"hidden {shape[1]}, {shape[2]} experts, top-{shape[3]}, {routing} routing"
    if len(sizes) == 1 and len(sms) > 1:
        over, x_name = "num_sms", "SMs"
        title += f", {sizes.pop()} tokens per rank"
    names = list(dict.fromkeys(line["name"] for line in own))
    places = {name: place for place, name in enumerate(FIRST)} | {LAST: len(FIRST) + 1}
    names.sort(key=lambda name: places.get(name, len(FIRST)))
    limit = document["limit"] and ("link limit", document["limit"]["gb_per_s"])
    columns = []
    for name in names[:MOST_OPERATIONS]:
        meant = [it for it in lines if it["name"] == name or it["is_rival"] and _rivals(it, name)]
        rates = _series(meant, over, "wire_gb_per_s")
        columns.append([
            Panel(name, "µs per call", _series(meant, over, "mean_us")),
            Panel("", "busbw, GB/s", rates, is_log=False, level=limit),
        ])  # fmt: skip
    notes = "Mean of back-to-back calls at the slowest rank"
    takes_fastest = over != "num_sms" and len(sms) > 1
    notes += "; the fastest number of SMs at each size." if takes_fastest else "."
    left_out = names[MOST_OPERATIONS:]
    left_out += sorted({f"{it['phases']} calls" for it in own if it["phases"] not in phases})
    left_out += sorted({f"{it['routing']} routing" for it in own if it["routing"] != routing})
    if left_out:
        notes += f" Measured, not drawn: {', '.join(left_out)}."
    mode = key.replace("_", "-")
    return Picture(f"{mode} mode: {title}", _origin(document), x_name, columns, notes)


def _rivals(rival: dict[str, Any], name: str) -> bool:
    """It does the job of this operation."""
    collective = rival["name"].split(" ", 1)[1]
    if name == "pair" or " + " in name:
        return " + " in collective
    jobs = {"dispatch": ("all_to_all_single", "all_gather"),
            "combine": ("all_to_all_single", "reduce_scatter")}  # fmt: skip
    return collective in jobs.get(name.split()[0], ())


def _series(lines: Iterable[dict[str, Any]], over: str, value: str) -> list[Series]:
    """Of several lines at one place the fastest."""
    found: dict[tuple[str, str, str], dict[float, float]] = {}
    for line in sorted(lines, key=lambda line: -float(line["mean_us"])):  # the fastest comes last
        if line.get(value) is None or line[over] is None:
            continue
        who = line["mode"] or line["layout"]
        if line["is_rival"]:
            library, collective = line["name"].split(" ", 1)
            is_exchange = collective == "all_to_all_single"
            who = f"{library} {collective if is_exchange else 'all_gather, reduce_scatter'}"
        formats = (line["dtype"], line["combine_format"].replace("bf16", ""))
        run_as = line["execution"] + (", hooked" if line["phases"] == "hooked" else "")
        key = who, ", ".join(filter(None, formats)), run_as
        found.setdefault(key, {})[line[over]] = line[value]
    return [
        Series(who, tuple(sorted(points.items())), payload, run_as)
        for (who, payload, run_as), points in sorted(found.items())
    ]


def _layer(document: dict[str, Any]) -> Picture:
    lines = document["lines"]
    if not lines:
        raise ValueError("it has no lines")
    columns = []
    for execution, title in (("eager", "eager steps"), ("graph", "steps in CUDA graphs")):
        pairs = [(line["tokens"], line[execution]) for line in lines]
        times = []
        for who in ("prefill", "decode", "auto"):
            points = tuple((at, pair[who]["mean_us"]) for at, pair in pairs if pair[who])
            times += [Series(who, points)] if points else []
        ratios = tuple((at, pair["ratio"]) for at, pair in pairs if pair["ratio"] is not None)
        edge = "auto decodes up to", document["decode_tokens"]
        if times:
            columns.append([
                Panel(title, "µs per step", times, edge=edge),
                Panel("", "auto over the better mode", [Series("auto", ratios)] if ratios else [],
                      is_log=False, level=("target", AUTO_TARGET)),
            ])  # fmt: skip
    title = (f"layer: hidden {document['hidden']}, {document['experts']} experts, "
             f"top-{document['topk']}")  # fmt: skip
    notes = "Dispatch and combine at the slowest rank; experts return their rows."
    if document["left_out"]:
        notes += f" Time was up before {', '.join(map(str, document['left_out']))} tokens."
    return Picture(title, _origin(document), "tokens per rank", columns, notes)


def _tensor_parallel(document: dict[str, Any]) -> Picture:
    lines = document["tensor_parallel"]
    if not lines:
        raise ValueError("it has no lines")
    names = list(dict.fromkeys(line["name"] for line in lines))[:MOST_OPERATIONS]
    columns = []
    for name in names:
        of_name = [line for line in lines if line["name"] == name]
        times, rates = [], []
        for who in dict.fromkeys(line["who"] for line in of_name):
            own = [line for line in of_name if line["who"] == who]
            times.append(Series(who, tuple((line["rows"], line["mean_us"]) for line in own)))
            rates.append(
                Series(who, tuple((line["rows"], _rate_of(line) / line["mean_us"]) for line in own))
            )
        unit = "TFLOP/s" if of_name[0]["depth"] else "GB/s of the tensor"
        columns.append([Panel(name, "µs", times), Panel("", unit, rates, is_log=False)])
    firsts = {name: next(line for line in lines if line["name"] == name) for name in names}
    sizes = ", ".join(
        f"{name}: {line['columns']} columns" + (f", depth {line['depth']}" if line["depth"] else "")
        for name, line in firsts.items()
    )
    title = "tensor parallelism, bf16"
    return Picture(title, _origin(document), "rows of all ranks", columns, f"Per rank: {sizes}.")


def _rate_of(line: dict[str, Any]) -> float:
    """Of a microsecond."""
    if line["depth"]:
        return 2e-6 * line["rows"] * line["depth"] * line["columns"]
    return 2e-3 * line["rows"] * line["columns"]


# ---- from a picture to a file --------------------------------------------------------------------


def draw(picture: Picture, path: Path) -> None:
    """SVG follows the page's light or dark; other kinds have a light page of their own."""
    import matplotlib
    from matplotlib import figure as figures

    style: dict[str, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": "deep_comm", "text.color": INK,
        "axes.edgecolor": DIM, "axes.labelcolor": INK, "axes.facecolor": PAGE,
        "figure.facecolor": PAGE, "xtick.color": DIM, "ytick.color": DIM, "grid.color": GRID,
        "axes.titlecolor": INK, "legend.frameon": False, "font.size": 10,
        "axes.spines.top": False, "axes.spines.right": False, "xtick.labelcolor": INK,
        "ytick.labelcolor": INK, "savefig.facecolor": PAGE,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        num_columns = len(picture.columns)
        width = max(9.0, 4.2 * num_columns)
        made: Any = figures.Figure(figsize=(width, 8.6), layout="constrained")
        grid = made.subplots(2, num_columns, squeeze=False)
        for column, panels in enumerate(picture.columns):
            for row, panel in enumerate(panels):
                _draw_panel(grid[row][column], panel, picture.x_name)
        for axes in grid[:, 1:].flat:
            axes.set_ylabel("")
        origin, notes = (
            textwrap.fill(it, int(11 * width)) for it in (picture.origin, picture.notes)
        )
        made.suptitle(f"{picture.title}\n{origin}", fontsize=11)
        made.legend(handles=_keys(picture), loc="outside lower center", ncols=num_columns + 3,
                    title=notes, title_fontsize=9, fontsize=9)  # fmt: skip
        dated = {"metadata": {"Date": None}} if path.suffix == ".svg" else {}
        made.savefig(path, dpi=150, **dated)
    if path.suffix == ".svg":
        path.write_text(path.read_text().replace("</style>", f"{_dark_rules()}</style>", 1))


def _draw_panel(axes: Any, panel: Panel, x_name: str) -> None:
    from matplotlib import ticker

    if not panel.series:  # such as the rate of a call that moves no rows
        axes.set_axis_off()
        return
    for line in panel.series:
        axes.plot(
            *zip(*line.points, strict=True), color=_colour(line.who), markersize=5,
            marker=MARKERS.get(line.payload, "o"), linestyle=DASHES.get(line.run_as, "-"),
        )  # fmt: skip
    sizes = sorted({at for line in panel.series for at, _ in line.points})
    heights = [height for line in panel.series for _, height in line.points]
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes], rotation=45 if len(sizes) > 6 else 0)
    axes.set_xticks([], minor=True)
    axes.set_xlim(sizes[0] / 1.3, sizes[-1] * 1.3)
    if panel.is_log:
        axes.set_yscale("log")
        axes.set_ylim(min(heights) / 1.25, max(heights) * 1.25)
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    for mark, place, draw_line in (
        (panel.level, "y", axes.axhline), (panel.edge, "x", axes.axvline),
    ):  # fmt: skip
        if mark is not None and (place == "y" or sizes[0] <= mark[1] <= sizes[-1]):
            draw_line(mark[1], color=DIM, linestyle=(0, (1, 2)))
            at = (0.99, mark[1]) if place == "y" else (mark[1], 0.02)
            transform = axes.get_yaxis_transform() if place == "y" else axes.get_xaxis_transform()
            axes.text(*at, f"{mark[0]} {mark[1]:g}", transform=transform, ha="right", va="bottom",
                      fontsize=8, color=DIM, rotation=0 if place == "y" else 90)  # fmt: skip
    if not panel.is_log and panel.unit.endswith("GB/s"):
        most = max(heights) if panel.level is None else max(*heights, panel.level[1])
        axes.set_ylim(0, 1.1 * most)
    axes.grid(True)
    axes.set(xlabel=x_name, ylabel=panel.unit, title=panel.title)


def _colour(who: str) -> str:
    """Of others' collectives grey and pink."""
    return COLOURS.get(who) or (GREY if who.endswith("all_to_all_single") else PINK)


def _keys(picture: Picture) -> list[Any]:
    """What colours, markers and dashes mean."""
    from matplotlib.lines import Line2D

    every = [line for panels in picture.columns for panel in panels for line in panel.series]

    def values(name: str) -> Sequence[str]:
        return list(dict.fromkeys(filter(None, (getattr(line, name) for line in every))))

    made: list[Any] = [
        Line2D([], [], color=_colour(who), linewidth=4, label=who) for who in values("who")
    ]
    made += [
        Line2D([], [], color=INK, linestyle="none", marker=MARKERS.get(it, "o"), label=it)
        for it in values("payload")
    ]
    made += [
        Line2D([], [], color=INK, linestyle=DASHES.get(it, "-"), label=it)
        for it in values("run_as")
    ]
    return made


def _dark_rules() -> str:
    """matplotlib writes colours into every element; rules of a dark page override them."""
    rules = [
        f'[style*="{what}: {light}"]{{{what}:{dark} !important}}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    ]
    return f"@media (prefers-color-scheme:dark){{{''.join(rules)}}}"
