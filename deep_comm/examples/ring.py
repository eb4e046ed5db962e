"""A ring: any number of rows through a few slots, with credit, under many schedules.

The kernel is csrc/device/examples/ring.cuh; its block comment is the protocol. Then each of its two
promises is broken once: the tail is released, and the sender waits for a free slot.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from deep_comm.settings import command_line
from deep_comm.settings.command_line import at_least
from deep_comm.simulate import MachineError
from deep_comm.simulate.example import wrong_words

NUM_WORDS, NUM_ROWS = 40, 12
BREAKS = {"weaken_release": "no release", "skip_credit": "no wait for a free slot"}


def is_found(seed: int, fault: str, shape: dict[str, Any]) -> bool:
    """By a wrong word, or by the machine: a store that nothing orders behind an earlier load."""
    try:
        return wrong_words("ring", seed, faults=[fault], **shape) > 0
    except MachineError:
        return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line.parser(
        "examples ring", __doc__ or "", "deep_comm examples ring --seeds 60"
    )
    parser.add_argument(
        "--seeds", type=at_least(1), default=60, help="schedules to try for each size"
    )
    seeds = range(parser.parse_args(arguments).seeds)
    is_right, progress = True, command_line.Progress()
    for num_slots in (1, 2, 5):
        shape: dict[str, Any] = dict(num_words=NUM_WORDS, num_rows=NUM_ROWS, num_slots=num_slots)
        what = f"{num_slots} slots, {NUM_ROWS} rows"
        tried = progress.over(seeds, f"schedules with {what}")
        right = sum(wrong_words("ring", seed, **shape) == 0 for seed in tried)
        print(f"{what}: all rows right in {right} of {len(seeds)} schedules")
        is_right = is_right and right == len(seeds)
    for fault, meaning in BREAKS.items():
        shape = dict(num_words=NUM_WORDS, num_rows=NUM_ROWS, num_slots=2)
        tried = progress.over(seeds, f"schedules, {meaning}")
        broken = sum(is_found(seed, fault, shape) for seed in tried)
        print(f"{meaning}: found in {broken} of {len(seeds)}")
        is_right = is_right and broken > 0
    print("verdict: " + ("OK" if is_right else "FAILED"))
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
