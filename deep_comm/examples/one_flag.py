"""One flag: a payload and a word that says it is there, between two ranks, under many schedules.

The kernel is csrc/device/examples/one_flag.cuh; its block comment is the protocol. It runs under
the simulation, which permutes threads and delays stores by a seed. Then the release is taken away,
and the same schedules show what it was for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from deep_comm.settings import command_line
from deep_comm.settings.command_line import at_least
from deep_comm.simulate.example import wrong_words

NUM_WORDS, NUM_THREADS = 48, 64


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line.parser(
        "examples one_flag", __doc__ or "", "deep_comm examples one_flag --seeds 200"
    )
    parser.add_argument("--seeds", type=at_least(1), default=200, help="schedules to try")
    seeds = range(parser.parse_args(arguments).seeds)
    shape: dict[str, Any] = dict(num_words=NUM_WORDS, num_threads=NUM_THREADS)
    progress = command_line.Progress()
    tried = progress.over(seeds, "schedules")
    right = sum(wrong_words("one_flag", seed, **shape) == 0 for seed in tried)
    print(f"with the release: the payload was there in {right} of {len(seeds)} schedules")
    broken = [
        seed
        for seed in progress.over(seeds, "schedules without it")
        if wrong_words("one_flag", seed, faults=["weaken_release"], **shape) > 0
    ]
    first = f", first with seed {broken[0]}" if broken else ""
    print(f"without it: words were missing in {len(broken)} of {len(seeds)}{first}")
    is_right = right == len(seeds) and len(broken) > 0
    print("verdict: " + ("OK" if is_right else "FAILED"))
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
