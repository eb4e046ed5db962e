"""``deep_comm demo``: a text through a Mixture-of-Experts layer over several ranks.

Under torchrun every process is a rank; else the ranks are started here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from deep_comm.ranks.topology import MAX_RANKS_PER_NODE
from deep_comm.settings import command_line

OWN_TEXT = Path(command_line.__file__)
"""What is sent without a file."""
TIMEOUT_S = 300.0
"""Far longer than any step takes; a rank that is stuck ends the demo then."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.parser(
        "demo",
        "Every byte of the text is a token: embedded, routed by a fixed gate to 4 of 32 experts, "
        "dispatched to the ranks that hold them and combined again. The result is compared bit by "
        "bit with the same layer in one process; the exit code is the verdict. Also under torchrun "
        "(-m deep_comm.demo FILE).",
        "deep_comm demo README.md --ranks 4",
        "deep_comm demo --tokens 100 --json",
    )
    add = parser.add_argument
    add("file", nargs="?", type=command_line.file_to_read,
        help="the text (default: a file of deep_comm)")  # fmt: skip
    add("--ranks", type=command_line.at_least(1, MAX_RANKS_PER_NODE), metavar="N",
        help="processes to start (default: 4; on GPUs one each, at most 4)")  # fmt: skip
    add("--tokens", type=command_line.at_least(1), default=1024, metavar="N",
        help="use at most so many bytes of the text")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), help="default: cuda with two or more GPUs, else cpu")
    add("--json", action="store_true", help="print one JSON object, nothing else")
    parsed = parser.parse_args(arguments)
    parsed.file = parsed.file or OWN_TEXT
    if parsed.file.stat().st_size == 0:
        parser.error(f"{parsed.file} is empty: nothing to send")
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = parse(arguments)
    import torch

    from deep_comm.demo.rank import has_gpus, run
    from deep_comm.launch import on_ranks

    num_ranks = parsed.ranks or 4
    if parsed.device == "cuda" and torch.cuda.device_count() == 0:
        command_line.refuse("demo", "--device cuda: torch finds no GPU here")
    if parsed.ranks is None and (parsed.device == "cuda" or (parsed.device is None and has_gpus())):
        num_ranks = min(4, torch.cuda.device_count())
    return on_ranks(run, num_ranks, parsed, timeout_s=TIMEOUT_S)


if __name__ == "__main__":
    sys.exit(main())
