"""The command line: one table of options, with defaults by mode and device.

The options are those of "normal" mode (``--mode direct,ring``, the default), "nodes" (``--mode
nodes``), "low-latency", "layer" or "tp". One that a mode does not have is refused, and so is a
value that cannot work, before torch is imported or a process started.
"""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deep_comm.bench import names as words
from deep_comm.bench import plot
from deep_comm.bench.names import Effort
from deep_comm.errors import ArgumentError
from deep_comm.ranks import rail
from deep_comm.ranks.topology import MAX_RANKS_PER_NODE
from deep_comm.settings import command_line, env
from deep_comm.settings.command_line import above_zero, at_least, file_to_write

Options = argparse.Namespace
"""The options of a mode, None for those of others; also ``family`` (the mode that decides which
options there are), ``on_gpu``, ``effort`` and ``command``."""

AUTO = "auto"  # of --sms: the Buffer's choice, None
SM_SWEEP = (4, 8, 16, 24, 32, 48, 64, 132)
TOKEN_SWEEP = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
THRESHOLDS = {"default": -1, "measured": 0}
"""Words of --decode-tokens: what a layer takes that is given none; what is measured here."""

MOST_TOPK = 64  # deep_comm._core.max_topk
MOST_SMS = 256  # deep_comm._core.max_channels
positive = at_least(1)


def numbers(
    *sweep: int | None, most: int | None = None, **special: int | None
) -> Callable[[str], tuple[int | None, ...]]:
    """Integers, "sweep" for all of it, and words that stand for a value."""
    number = at_least(1, most)

    def parse(text: str) -> tuple[int | None, ...]:
        if text == "sweep":
            return sweep
        return tuple(special[it] if it in special else number(it) for it in text.split(","))

    return parse


def listed(*allowed: str, alone: Sequence[str] = ()) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        values = allowed if text == "all" else tuple(text.split(","))
        for value in values:
            if value not in allowed:
                known = f"{', '.join(allowed)} (or 'all')"
                if alone:
                    known += f" and none of {', '.join(alone)}"
                raise argparse.ArgumentTypeError(f"{value!r} is none of {known}")
        return values

    return parse


def sizes(text: str) -> tuple[float, ...]:
    return tuple(above_zero(it) for it in text.split(","))


def threshold(text: str) -> int:
    return THRESHOLDS[text] if text in THRESHOLDS else positive(text)


N, B, L, E, T = "normal", "nodes", "low-latency", "layer", "tp"
_CALLS, _EXPERTS, _ALL = (N, B, L), (N, B, L, E), (N, B, L, E, T)

# Flag, modes that have it, type (a tuple: choices; bool: a switch), help.
_TABLE: tuple[tuple[str, tuple[str, ...], Any, str], ...] = (
    ("--mode", (N,), listed("direct", "ring", alone=(B, L, E, T)), "direct, ring; or one of "
     "nodes, low-latency, layer, tp (`--mode layer --help`)"),
    ("--mode", (B,), listed("nodes", "direct", "ring"), "nodes; direct, ring: one tier too"),
    ("--mode", (L,), listed(L), "low-latency"),
    ("--mode", (E,), listed(E), "layer"),
    ("--mode", (T,), listed(T), "tp: tensor parallelism"),
    ("--device", _ALL, ("cpu", "cuda"), "default: cuda with two or more GPUs, else cpu"),
    ("--ranks", _ALL, positive, "processes to start, without torchrun (default: 4, or one "
     "per GPU)"),
    ("--quick", (N, L, E), bool, "only what the table of targets needs; layer: fewer sizes"),
    ("--tokens", (N, B), numbers(*TOKEN_SWEEP[7:]), "per rank, or 'sweep'"),
    ("--tokens", (L,), numbers(*TOKEN_SWEEP[:10]), "per rank, or 'sweep'"),
    ("--tokens", (E,), numbers(*TOKEN_SWEEP), "per rank, or 'sweep'"),
    ("--tokens", (T,), numbers(1024, 2048, 4096, 8192, 16384), "rows of a product, of all ranks "
     "together, or 'sweep'"),
    ("--mb", (T,), sizes, "MB (10^6 bytes) of what a collective gathers or adds"),
    ("--divide", (T,), positive, "divides the extents of all weights and rows' columns"),
    ("--max-tokens", (L,), positive, "the most that a rank may have (default: --tokens)"),
    ("--hidden", _EXPERTS, positive, "columns of a row (elements)"),
    ("--experts", _EXPERTS, positive, "experts of all ranks together"),
    ("--topk", _EXPERTS, positive, "experts per token"),
    ("--dtype", (N, B), listed("bf16", "fp8"), "dispatched rows: bf16, fp8"),
    ("--dtype", (L,), listed("fp8", "bf16", "nvfp4"), "what dispatch sends: fp8, bf16, nvfp4"),
    ("--combine", (L,), listed("bf16", "logfmt"), "what combine sends: bf16, logfmt"),
    ("--routing", (N, B), listed(*words.ROUTINGS), ", ".join(words.ROUTINGS)),
    ("--layout", (L,), listed(*words.LAYOUTS), ", ".join(words.LAYOUTS)),
    ("--execution", _CALLS, listed("eager", "graph"), "eager, graph; without GPUs only eager"),
    ("--sms", (T,), numbers(None, 8, 16, 32, most=MOST_SMS, auto=None), "of a collective; 'auto': "
     "the default"),
    ("--sms", (N, B), numbers(None, *SM_SWEEP, most=MOST_SMS, auto=None), "of a call; 'auto': the "
     "default"),
    ("--send", (N, B), numbers(4, 8, 16), "rows that a ring publishes together; all its slots, if "
     "it has fewer"),
    ("--slots", (N, B), numbers(64, 128, 256), "slots of a ring"),
    ("--ranks-per-node", _CALLS, positive, "makes logical nodes; normal: also one tier"),
    ("--rail", _CALLS, rail.RAILS, "what joins the nodes"),
    ("--rail-send", (N, B), numbers(6, 12, 20), "rows of a put (default: as recommended)"),
    ("--rings", (N, B), bool, "two tiers in bounded memory: no receive region, no staging"),
    ("--gb-per-s", (N, B), above_zero, "GB/s of a rail, which the software NIC keeps to"),
    ("--ops", (N, B), listed(*words.MEANINGS), "operations to measure"),
    ("--ops", (L,), listed(*words.LOW_LATENCY_NAMES), "operations to measure"),
    ("--ops", (T,), listed(*words.PRODUCTS, *words.TP_COLLECTIVES), "what to measure"),
    ("--no-rivals", (N, L, T), bool, "omit the collectives of torch.distributed"),
    ("--decode-tokens", (E,), threshold, "where auto ends decode: a number, 'default' (as layers), "
                                         "'measured' (now)"),
    ("--max-decode-gb", (E,), above_zero, "GB of a decode call that 'measured' may ask for "
                                     "(default: an eighth of the GPU's; host: 4)"),
    ("--store", (E,), bool, "make the measured threshold the default of layers on this machine"),
    ("--store", (T,), bool, "let method=\"auto\" take what was the fastest on this machine"),
    ("--trace", (T,), Path, "a folder, for products on GPUs: Chrome traces of rank 0, and pictures "
                            "of what its GPU did when, way by way (needs matplotlib)"),
    ("--warmup", (*_CALLS, T), at_least(0), "calls before timing"),
    ("--iterations", _ALL, positive, "calls, or graphs, per round"),
    ("--rounds", _ALL, positive, "rounds; the median counts"),
    ("--flush-l2", (N, B), bool, "time single calls with a cold L2 cache"),
    ("--timeout-s", (N, B), above_zero, "seconds that a call waits for a silent rank"),
    ("--budget-s", (E,), above_zero, "seconds after which no further size is started"),
    ("--size-deadline-s", (E,), above_zero, "seconds after which a size ends the run"),
    ("--deadline-s", _ALL, above_zero, "seconds after which the run ends"),
    ("--simulation-runs", (N,), at_least(0), "simulated runs to time"),
    ("--json", _ALL, file_to_write, "also write the figures to this file"),
    ("--plot", _ALL, plot.picture_file, "draw times and rates over sizes: a file .svg, .png or "
                                        ".pdf (needs matplotlib: the extra plot)"),
    ("--from", _ALL, plot.read, "draw this file of an earlier --json; measures nothing, and goes "
                                "with --plot alone"),
)  # fmt: skip

# Of all modes, then of each: on the host target and, where that differs, on GPUs.
_COMMON = {"topk": "8", "warmup": "2|5", "iterations": "5|20", "rounds": "3|5",
           "deadline_s": "900", "execution": "eager|eager,graph", "routing": "uniform",
           "send": "6", "slots": "256"}  # fmt: skip
DEFAULTS = {
    N: {"mode": "direct,ring", "tokens": "256|4096", "hidden": "2048|7168", "experts": "32|256",
        "dtype": "bf16|bf16,fp8", "sms": "auto|auto,8,24", "ops": "all",
        "simulation_runs": "10|0"},
    B: {"mode": "nodes", "tokens": "64|4096", "hidden": "256|7168", "experts": "256",
        "dtype": "bf16", "execution": "eager", "sms": "4|24", "iterations": "2|20",
        "rounds": "1|3", "ops": "dispatch cached,combine,dispatch cast cached"},
    L: {"tokens": "1,16|sweep", "hidden": "1024|7168", "experts": "32|256", "dtype": "fp8,bf16",
        "combine": "bf16", "layout": "all", "ops": "all"},
    E: {"tokens": "1,2,4,8,16,32,64|sweep", "hidden": "256|7168", "experts": "16|256",
        "decode_tokens": "8|default", "iterations": "3|30", "budget_s": "300|50",
        "size_deadline_s": "120|20", "deadline_s": "600"},
    T: {"tokens": "64|1024,4096,8192", "mb": "0.1|1,16,256", "divide": "128|1", "ops": "all",
        "sms": "auto", "iterations": "3|10"},
}  # fmt: skip
QUICK = {
    N: {"rounds": "3", "deadline_s": "180"},
    L: {"rounds": "3", "deadline_s": "180", "tokens": "1,16,64,128"},
    E: {"tokens": "1,4,16,64|1,4,16,64,256,1024,4096"},
}


def _family(mode: str) -> str:
    return next((it for it in (B, L, E, T) if it in mode.split(",")), N)


def _parser(family: str, defaults: dict[str, str]) -> command_line.Parser:
    products = {name: f"{op}, {text}" for name, (op, _, _, text) in words.PRODUCTS.items()}
    about = {L: words.LAYOUTS, E: {}, T: products}.get(family, words.MEANINGS)
    more = "; ".join(f"{name}: {meaning}" for name, meaning in about.items())
    parser = command_line.parser(
        "bench",
        f"Mode {family}. Every result is checked bit by bit, then timed. Times are microseconds, "
        "rates GB/s (10^9 bytes). Separate the values of a list by commas: every combination is "
        "measured. Without --ranks-per-node, each host is a node. Also under torchrun (-m "
        "deep_comm.bench). The last line is for grep: OK or FAILED, lines, wrong results, rate.",
        "deep_comm bench --quick",
        "deep_comm bench --mode direct --tokens 128,4096 --sms 8,24 --json bench.json",
        "deep_comm bench --mode low-latency --tokens 1,16 --hidden 1024",
        "deep_comm bench --from bench.json --plot bench.svg",
        more=textwrap.fill(more, 88),
    )
    for flag, families, kind, text in _TABLE:
        if family not in families:
            continue
        name = flag[2:].replace("-", "_")
        how: dict[str, Any] = {"action": "store_true"} if kind is bool else {"type": kind}
        if isinstance(kind, tuple):
            how = {"choices": kind}
        if name in defaults:
            on_host, on_gpu = defaults[name].split("|")[0], defaults[name].split("|")[-1]
            both = on_host if on_host == on_gpu else f"{on_host}; on GPUs {on_gpu}"
            text = f"{text} (default: {both})"
        parser.add_argument(flag, help=text, default=argparse.SUPPRESS, **how)
    return parser


def _default_device() -> str:
    import torch  # not before everything else was read

    # Ranks of other hosts have GPUs of their own.
    several = min(2, int(os.environ.get("LOCAL_WORLD_SIZE", "2")))
    return "cuda" if torch.cuda.device_count() >= several else "cpu"


def parse(arguments: Sequence[str], command: str = "", name: str = "bench") -> Options:
    """Ends the process, as the command ``name`` does, if an argument is refused."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--mode", default="")
    first.add_argument("--quick", action="store_true")
    known = first.parse_known_args(list(arguments))[0]
    family = _family(known.mode)
    defaults = _COMMON | DEFAULTS[family] | (QUICK.get(family, {}) if known.quick else {})
    parser = _parser(family, defaults)
    parser.prog = f"deep_comm {name}"
    if known.mode and name == "bench":
        parser.chosen = f" --mode {known.mode}"
    given = vars(parser.parse_args(arguments))
    if "from" in given:
        others = ", ".join(
            f"--{name.replace('_', '-')}" for name in given.keys() - {"from", "plot"}
        )
        if others or "plot" not in given:
            parser.error(f"--from: goes with --plot alone; got {others or 'no --plot'}")
        return Options(family=family, on_gpu=False, **given)
    try:  # what the ranks would refuse
        env.require_valid()
    except ArgumentError as error:
        parser.error(str(error))
    named = given.get("device")
    candidates = {
        device: _filled(family, device, given, defaults, command)
        for device in ([named] if named else ["cpu", "cuda"])
    }
    problems = {device: _problem(options) for device, options in candidates.items()}
    if all(problems.values()):
        parser.error(next(iter(problems.values())))
    device = named or _default_device()
    if problems[device]:
        parser.error(problems[device])
    options = candidates[device]
    num_calls, num_rounds = options.iterations, options.rounds
    num_singles = num_calls * (1 if family == E else 5 * num_rounds if family == L else num_rounds)
    num_host_calls = (
        {L: 200, E: 50, T: 0}.get(family, 64) if options.on_gpu and not options.flush_l2 else 0
    )
    options.effort = Effort(
        2 if options.warmup is None else options.warmup, num_calls, num_rounds, num_singles,
        bool(options.flush_l2), num_host_calls,
    )  # fmt: skip
    return options


def _filled(
    family: str, device: str, given: dict[str, Any], defaults: dict[str, str], command: str
) -> Options:
    """What was given, and else the defaults of a device."""
    on_gpu = device == "cuda"
    options = Options(family=family, command=command, on_gpu=on_gpu)
    for flag, families, kind, _ in _TABLE:
        name = flag[2:].replace("-", "_")
        if family not in families:
            options.__dict__.setdefault(name, None)
        elif name in given or name not in defaults:
            options.__dict__[name] = given.get(name)
        else:
            options.__dict__[name] = kind(defaults[name].split("|")[-1 if on_gpu else 0])
    options.device = device
    return options


def _problem(options: Options) -> str:
    """What no machine can do; "" if there is nothing."""
    if options.ranks is not None and (problem := ranks_problem(options, options.ranks)):
        return problem
    if options.store and (problem := store_problem(options.on_gpu)):
        return f"--store: {problem}"
    if options.family == T:
        if options.trace and not options.on_gpu:
            return "--trace: only GPUs compute and communicate at the same time"
        if options.trace and not set(options.ops) & set(words.PRODUCTS):
            return "--trace: --ops names no product"
        return ""
    most = max(options.tokens)
    if not options.on_gpu and options.execution not in (None, ("eager",)):
        return "--execution: the host target has no graphs"
    if options.max_tokens is not None and options.max_tokens < most:
        return f"--max-tokens: must be at least {most}, which --tokens has"
    rails = rail.OF_DEVICE[options.device]
    if options.rail is not None and options.rail not in rails:
        return f"--rail: must be {' or '.join(rails)} with --device {options.device}"
    if options.send is not None and max(options.send) > max(options.slots):
        return f"--send: must be at most {max(options.slots)}, the most that --slots has"
    most = min(options.experts, MOST_TOPK)
    if options.topk > most:
        return f"--topk: must be at most {most} with {options.experts} experts"
    multiple = 8
    for dtype in options.dtype or ():
        of_dtype = {"fp8": 128, "nvfp4": 64} if options.family == L else {"fp8": 16}
        multiple = max(multiple, of_dtype.get(dtype, 8))
    if options.hidden % multiple != 0:
        return f"--hidden: must be a multiple of {multiple} here"
    return ""


def ranks_problem(options: Options, num_ranks: int) -> str:
    """Why this machine cannot start that many ranks, whatever GPUs it has; "" if it can."""
    per_node, named = options.ranks_per_node, "--ranks-per-node"
    if per_node is None:
        named = env.RANKS_PER_NODE.name
        # More than there are: one node.
        per_node = min(env.RANKS_PER_NODE.get() or num_ranks, num_ranks)
        if per_node == num_ranks > MAX_RANKS_PER_NODE:
            return f"--ranks: a node has at most {MAX_RANKS_PER_NODE}; give --ranks-per-node"
        if per_node == num_ranks:
            return NO_NODES if options.family == B else NO_RAIL if options.rail else ""
    if per_node > MAX_RANKS_PER_NODE:
        return f"{named}: must be at most {MAX_RANKS_PER_NODE}"
    return nodes_problem(num_ranks, per_node, named)


def store_problem(on_gpu: bool) -> str:
    """Why what is measured could not be stored, or would be read by nobody; "" if it is."""
    name, path = env.TUNE_FILE.name, env.TUNE_FILE.get()
    if path is None:
        return "" if on_gpu else f"the host target reads only a file that {name} names: set it"
    try:
        file_to_write(path)
    except argparse.ArgumentTypeError as error:
        return f"{name}: {error}"
    return ""


def check_ranks(options: Options, num_ranks: int) -> None:
    """That many ranks, started on this machine. Raises SystemExit."""
    problem = ranks_problem(options, num_ranks)
    if options.on_gpu:
        import torch

        if torch.cuda.device_count() == 0:
            problem = "--device cuda: torch finds no GPU here; `deep_comm doctor` shows why"
    if problem:
        command_line.refuse("bench", problem)


NO_NODES = "--mode nodes: all ranks are on one host; give --ranks-per-node"
NO_RAIL = "--rail: all ranks are one node; give --ranks-per-node"


def nodes_problem(num_ranks: int, per_node: int, named: str = "--ranks-per-node") -> str:
    """Why the ranks cannot be nodes of so many; "" if they can."""
    if per_node < num_ranks and num_ranks % per_node == 0:
        return ""
    return f"{named}: {num_ranks} ranks are no nodes of {per_node}"
