"""One flag: a payload and a word that says it is there, between two ranks, under many schedules.

The kernel is csrc/device/examples/one_flag.cuh; its block comment is the protocol. It runs under
the simulation, which permutes threads and delays stores by a seed. Then the release is taken away,
and the same schedules show what it was for.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from deep_comm.examples.simulated import wrong_words

NUM_WORDS, NUM_THREADS = 48, 64


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="schedules to try")
    seeds = range(parser.parse_args(arguments).seeds)
    shape: dict[str, Any] = dict(num_words=NUM_WORDS, num_threads=NUM_THREADS)
    right = sum(wrong_words("one_flag", seed, **shape) == 0 for seed in seeds)
    print(f"with the release: the payload was there in {right} of {len(seeds)} schedules")
    broken = [
        seed
        for seed in seeds
        if wrong_words("one_flag", seed, faults=["weaken_release"], **shape) > 0
    ]
    first = f", first with seed {broken[0]}" if broken else ""
    print(f"without it: words were missing in {len(broken)} of {len(seeds)}{first}")
    is_right = right == len(seeds) and len(broken) > 0
    print("verdict: " + ("OK" if is_right else "FAILED"))
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
