"""The command line: one table of options, with defaults by mode and device.

The options are those of "normal" mode (``--mode direct,ring``, the default), "nodes" (``--mode
nodes``), "low-latency" or "layer". One that a mode does not have is refused.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from deep_comm.bench import operations as ops
from deep_comm.bench.measure import Effort
from deep_comm.bench.workload import ROUTINGS

Options = argparse.Namespace
"""The options of a mode, None for those of others; also ``family`` (the mode that decides which
options there are), ``on_gpu``, ``effort`` and ``command``."""

AUTO = "auto"  # of --sms: the Buffer's choice, None
SM_SWEEP = (4, 8, 16, 24, 32, 48, 64, 132)
TOKEN_SWEEP = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
THRESHOLDS = {"default": -1, "measured": 0}
"""Words of --decode-tokens: what a layer takes that is given none; what is measured here."""


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def numbers(*sweep: int | None, **words: int | None) -> Callable[[str], tuple[int | None, ...]]:
    """Integers, "sweep" for all of it, and words that stand for a value."""

    def parse(text: str) -> tuple[int | None, ...]:
        if text == "sweep":
            return sweep
        return tuple(words[it] if it in words else positive(it) for it in text.split(","))

    return parse


def names(*allowed: str) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        values = allowed if text == "all" else tuple(text.split(","))
        for value in values:
            if value not in allowed:
                known = ", ".join(allowed)
                raise argparse.ArgumentTypeError(f"{value!r} is none of {known} (or 'all')")
        return values

    return parse


def threshold(text: str) -> int:
    return THRESHOLDS[text] if text in THRESHOLDS else positive(text)


N, B, L, E = "normal", "nodes", "low-latency", "layer"
_CALLS, _ALL = (N, B, L), (N, B, L, E)

# Flag, modes that have it, type (a tuple: choices; bool: a switch), help.
_TABLE: tuple[tuple[str, tuple[str, ...], Any, str], ...] = (
    ("--mode", (N,), names("direct", "ring"), "direct, ring; or one of nodes, "
     "low-latency, layer (`--mode layer --help`)"),
    ("--mode", (B,), names("nodes", "direct", "ring"), "nodes; direct, ring: one tier too"),
    ("--mode", (L,), names(L), "low-latency"),
    ("--mode", (E,), names(E), "layer"),
    ("--device", _ALL, ("cpu", "cuda"), "default: cuda with two or more GPUs"),
    ("--ranks", _ALL, positive, "processes to start, without torchrun"),
    ("--quick", (N, L, E), bool, "only what the table of targets needs; layer: fewer sizes"),
    ("--tokens", (N, B), numbers(*TOKEN_SWEEP[7:]), "per rank, or 'sweep'"),
    ("--tokens", (L,), numbers(*TOKEN_SWEEP[:10]), "per rank, or 'sweep'"),
    ("--tokens", (E,), numbers(*TOKEN_SWEEP), "per rank, or 'sweep'"),
    ("--max-tokens", (L,), positive, "the most that a rank may have (default: --tokens)"),
    ("--hidden", _ALL, positive, "columns of a row"),
    ("--experts", _ALL, positive, "experts of all ranks together"),
    ("--topk", _ALL, positive, "experts per token"),
    ("--dtype", (N, B), names("bf16", "fp8"), "dispatched rows: bf16, fp8"),
    ("--dtype", (L,), names("fp8", "bf16", "nvfp4"), "what dispatch sends: fp8, bf16, nvfp4"),
    ("--combine", (L,), names("bf16", "logfmt"), "what combine sends: bf16, logfmt"),
    ("--routing", (N, B), names(*ROUTINGS), ", ".join(ROUTINGS)),
    ("--layout", (L,), names(*ops.LAYOUTS), ", ".join(ops.LAYOUTS)),
    ("--execution", _CALLS, names("eager", "graph"), "eager, graph; without GPUs only eager"),
    ("--sms", (N, B), numbers(None, *SM_SWEEP, auto=None), "of a call; 'auto': as the Buffer does"),
    ("--send", (N, B), numbers(4, 8, 16), "rows that a ring publishes together"),
    ("--slots", (N, B), numbers(64, 128, 256), "slots of a ring"),
    ("--ranks-per-node", _CALLS, positive, "makes logical nodes; normal: also one tier"),
    ("--rail", _CALLS, ("nvshmem", "software", "simulated"), "what joins the nodes"),
    ("--rail-send", (N, B), numbers(6, 12, 20), "rows of a put (default: as recommended)"),
    ("--rings", (N, B), bool, "two tiers in bounded memory: no receive region, no staging"),
    ("--gb-per-s", (N, B), float, "speed of a rail, which the software NIC keeps to"),
    ("--ops", (N, B), names(*ops.MEANINGS), "operations to measure"),
    ("--ops", (L,), names(*ops.LOW_LATENCY_NAMES), "operations to measure"),
    ("--no-rivals", (N, L), bool, "omit the collectives of torch.distributed"),
    ("--decode-tokens", (E,), threshold, "where auto ends decode: a number, 'default' (as layers), "
                                         "'measured' (now)"),
    ("--max-decode-gb", (E,), float, "memory of a decode call that 'measured' may ask for "
                                     "(default: an eighth of the GPU's; host: 4)"),
    ("--store", (E,), bool, "make the measured threshold the default of layers on this machine"),
    ("--warmup", _CALLS, int, "calls before timing"),
    ("--iterations", _ALL, positive, "calls, or graphs, per round"),
    ("--rounds", _ALL, positive, "rounds; the median counts"),
    ("--flush-l2", (N, B), bool, "time single calls with a cold L2 cache"),
    ("--timeout-s", (N, B), float, "how long a call waits for a silent rank"),
    ("--budget-s", (E,), float, "start no further size after this time"),
    ("--size-deadline-s", (E,), float, "end the run if one size takes longer"),
    ("--deadline-s", _ALL, float, "end the run if it takes longer"),
    ("--simulation-runs", (N,), int, "simulated runs to time"),
    ("--json", _ALL, Path, "also write the figures to this file"),
    ("--plot", (N,), Path, "also draw them into this PNG file (needs matplotlib)"),
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
}  # fmt: skip
QUICK = {
    N: {"rounds": "3", "deadline_s": "180"},
    L: {"rounds": "3", "deadline_s": "180", "tokens": "1,16,64,128"},
    E: {"tokens": "1,4,16,64|1,4,16,64,256,1024,4096"},
}


def parse(arguments: Sequence[str], command: str = "") -> Options:
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--mode", default="")
    first.add_argument("--device")
    first.add_argument("--quick", action="store_true")
    given = first.parse_known_args(list(arguments))[0]
    family = next((it for it in (B, L, E) if it in given.mode.split(",")), N)
    # Ranks of other hosts have GPUs of their own.
    several = min(2, int(os.environ.get("LOCAL_WORLD_SIZE", "2")))
    device = given.device or ("cuda" if torch.cuda.device_count() >= several else "cpu")
    on_gpu = device == "cuda"

    listed = ops.LAYOUTS if family == L else {} if family == E else ops.MEANINGS
    parser = argparse.ArgumentParser(
        prog="python -m deep_comm.bench",
        description=f"Mode {family}. Every result is checked bit by bit, then timed. Separate the "
        "values of a list by commas: every combination is measured. Without --ranks-per-node, each "
        "host is a node.",
        epilog="; ".join(f"{name}: {meaning}" for name, meaning in listed.items()),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    defaults = _COMMON | DEFAULTS[family] | (QUICK.get(family, {}) if given.quick else {})
    options = Options(family=family, command=command, on_gpu=on_gpu)
    for flag, families, kind, text in _TABLE:
        name = flag[2:].replace("-", "_")
        options.__dict__.setdefault(name, None)
        if family not in families:
            continue
        how: dict[str, Any] = {"action": "store_true"} if kind is bool else {"type": kind}
        if isinstance(kind, tuple):
            how = {"choices": kind}
        if name in defaults:
            how["default"] = defaults[name].split("|")[-1 if on_gpu else 0]
        parser.add_argument(flag, help=text or name, **how)
    options.__dict__.update(vars(parser.parse_args(arguments)))
    options.device = device
    if not on_gpu and options.execution not in (None, ("eager",)):
        parser.error("--execution: the host target has no graphs")
    if options.max_tokens is not None and options.max_tokens < max(options.tokens):
        parser.error(f"--max-tokens: must be at least {max(options.tokens)}")
    num_calls, num_rounds = options.iterations, options.rounds
    num_singles = num_calls * (1 if family == E else 5 * num_rounds if family == L else num_rounds)
    num_host_calls = {L: 200, E: 50}.get(family, 64) if on_gpu and not options.flush_l2 else 0
    options.effort = Effort(
        2 if options.warmup is None else options.warmup, num_calls, num_rounds, num_singles,
        bool(options.flush_l2), num_host_calls,
    )  # fmt: skip
    return options
