"""Options of ``python -m deep_comm.bench --mode layer``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from deep_comm.bench.measure import Effort
from deep_comm.bench.options import integers

TOKEN_SWEEP = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Options:
    device: str
    num_ranks: int | None
    tokens: tuple[int, ...]
    hidden: int
    experts: int
    topk: int
    decode_tokens: int | None  # None: what is measured
    effort: Effort
    budget_s: float
    size_deadline_s: float
    deadline_s: float
    max_decode_bytes: float | None  # of a threshold that is chosen here
    store: bool
    json: Path | None
    command: str


def is_asked_for(arguments: Sequence[str]) -> bool:
    given = list(arguments)
    return "--mode=layer" in given or ("--mode", "layer") in zip(given, given[1:], strict=False)


BY_DEFAULT = -1
"""In the place of decode_tokens: what a layer takes that is told none."""
_MEASURED = 0


def _threshold(text: str) -> int:
    if text == "measured":
        return _MEASURED
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1, or 'measured'")
    return int(text)


def parse(arguments: Sequence[str], command: str, description: str | None) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m deep_comm.bench --mode layer", description=description
    )
    add = parser.add_argument
    add("--mode", choices=("layer",))
    add("--device", choices=("cpu", "cuda"), help="default: cuda with 2 or more devices")
    add("--ranks", type=int, help="processes to start (not under torchrun)")
    add("--quick", action="store_true", help="every second size up to 4096")
    add(
        "--tokens", type=integers(TOKEN_SWEEP), help="per rank (default: the sweep; host: up to 64)"
    )
    add("--hidden", type=int, help="default: 256; on GPUs 7168")
    add("--experts", type=int, help="default: 16; on GPUs 256")
    add("--topk", type=int, default=8)
    add(
        "--decode-tokens", type=_threshold,
        help="auto's threshold, or 'measured' (default: what layers take; host: 8)",
    )  # fmt: skip
    add(
        "--max-decode-gb", type=float,
        help="tensors of a decode call that 'measured' may ask for (default: an eighth of the "
        "GPU's memory; host: 4)",
    )  # fmt: skip
    add("--store", action="store_true", help="make the measured threshold the default here")
    add("--warmup", type=int, help="steps before; default: 2; on GPUs 10")
    add("--iterations", type=int, help="steps of a round; default: 3; on GPUs 30")
    add("--rounds", type=int, help="default: 3; on GPUs 5")
    add("--budget-s", type=float, help="begin no size later (default: 50; host: 300)")
    add("--size-deadline-s", type=float, help="of one size (default: 20; host: 120)")
    add("--deadline-s", type=float, default=600.0, help="end everything after so long")
    add("--json", type=Path, help="also write the figures to this file")
    parsed = parser.parse_args(arguments)
    device = parsed.device or ("cuda" if torch.cuda.device_count() >= 2 else "cpu")
    on_gpu = device == "cuda"

    def chosen(name: str, on_host: int, on_device: int) -> int:
        given = getattr(parsed, name)
        return (on_device if on_gpu else on_host) if given is None else int(given)

    tokens = parsed.tokens or tuple(TOKEN_SWEEP if on_gpu else TOKEN_SWEEP[:7])
    if parsed.quick and parsed.tokens is None:
        tokens = tuple(count for count in tokens[::2] if count <= 4096)
    threshold = parsed.decode_tokens
    if threshold is None:
        # tuning needs the number of ranks, which only they know: see Runner.
        threshold = BY_DEFAULT if on_gpu else 8
    num_calls, num_rounds = chosen("iterations", 3, 30), chosen("rounds", 3, 5)
    return Options(
        device=device,
        num_ranks=parsed.ranks,
        tokens=tokens,
        hidden=chosen("hidden", 256, 7168),
        experts=chosen("experts", 16, 256),
        topk=parsed.topk,
        decode_tokens=None if threshold == 0 else threshold,
        effort=Effort(
            num_warmup=chosen("warmup", 2, 10),
            num_calls=num_calls,
            num_rounds=num_rounds,
            num_single_calls=num_calls,
            num_host_calls=50 if on_gpu else 0,
        ),
        budget_s=parsed.budget_s or (50.0 if on_gpu else 300.0),
        size_deadline_s=parsed.size_deadline_s or (20.0 if on_gpu else 120.0),
        deadline_s=parsed.deadline_s,
        max_decode_bytes=None if parsed.max_decode_gb is None else parsed.max_decode_gb * 1e9,
        store=parsed.store,
        json=parsed.json,
        command=command,
    )
