"""``deep_comm simulate``: a random routing's dispatch and combine, seeded and checked.

The exit code is the verdict: 0 if every run gave the reference's results, bit for bit.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from deep_comm.errors import DeepCommError
from deep_comm.ranks.topology import MAX_RANKS_PER_NODE
from deep_comm.settings import command_line
from deep_comm.settings.command_line import at_least
from deep_comm.simulate import LARGEST_SEED, MachineError, Simulation, run
from deep_comm.simulate.shape import Workload


def _stall(text: str) -> tuple[int, int, int]:
    parts = text.split(":")
    try:
        rank, after, steps = (int(part) for part in parts)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not rank:after-step:steps (0 steps: for ever)"
        ) from None
    return rank, after, steps


def _machine(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of the simulation."""
    return dict(
        policy=options.policy, weak_memory=not options.strong_memory,
        delay_bulk=not options.prompt_bulk, faults=options.fault, stalls=options.stall,
        on_stuck=options.on_stuck, collectives_order_memory=options.ordered_collectives,
        find_races=options.races, weaken=options.weaken,
    )  # fmt: skip


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    defaults = Workload()
    parser = command_line.parser(
        "simulate",
        "Replay dispatch and combine of a random routing under a seeded scheduler, in one process. "
        "Equal seeds give equal runs. Every result is compared with the reference bit by bit.",
        "deep_comm simulate --seed 17 --ranks 4",
        "deep_comm simulate --runs 100 --fault weaken_release",
        "deep_comm simulate --stall 1:50:0 --on-stuck clock",
    )
    add = parser.add_argument
    add("--seed", type=at_least(0, LARGEST_SEED), default=0, help="of the first run")
    add("--runs", type=at_least(1), default=1, help="how many runs, with ascending seeds")
    add("--ranks", type=at_least(1, MAX_RANKS_PER_NODE), default=defaults.num_ranks,
        help="ranks, all of one node")  # fmt: skip
    add("--tokens", type=at_least(0), default=defaults.num_tokens, help="tokens per rank")
    add("--hidden", type=at_least(8, multiple=8), default=defaults.hidden,
        help="bfloat16 elements of a token, a multiple of 8")  # fmt: skip
    add("--experts", type=at_least(1), default=defaults.num_experts, help="of all ranks together")
    add("--topk", type=at_least(1), default=defaults.num_topk, help="experts per token")
    add("--sms", type=at_least(1), default=defaults.num_sms, help="blocks of a kernel")
    add("--slots", type=at_least(1), default=defaults.num_slots, help="of every ring")
    add("--policy", default="any",
        choices=["any", "random", "fifo", "lifo", "starve", "priority"],
        help="order of the threads; any: the seed picks")  # fmt: skip
    add("--fault", action="append", default=[], metavar="NAME",
        help="break a part of the protocol on purpose; a wrong name lists them")  # fmt: skip
    add("--stall", action="append", default=[], type=_stall, metavar="RANK:AFTER:STEPS",
        help="stop a rank after a step for so many steps, 0: for ever")  # fmt: skip
    add("--weaken", default="", metavar="FILE:LINE:OP:HOW",
        help="weaken one place in the kernels; HOW is relaxed, or narrow: a smaller scope",
        )  # fmt: skip
    add("--strong-memory", action="store_true", help="stores and loads act at once")
    add("--ordered-collectives", action="store_true", help="shuffles and votes order memory")
    add("--races", action="store_true",
        help="accesses to shared memory that nothing orders are errors (DEEP_COMM_FIND_RACES=ON)",
        )  # fmt: skip
    add("--prompt-bulk", action="store_true", help="bulk copies complete at once")
    add("--on-stuck", default="report", choices=["report", "clock"],
        help="a run without progress: report who waits, or jump to the next deadline",
        )  # fmt: skip
    add("--json", action="store_true", help="print one JSON object instead of lines")
    options = parser.parse_args(arguments)
    if options.runs > (most := LARGEST_SEED - options.seed + 1):
        parser.error(f"--runs: must be at most {most} with --seed {options.seed}")
    try:  # the machine knows its faults, policies and places
        Simulation(num_ranks=options.ranks, seed=options.seed, **_machine(options))
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    from deep_comm.simulate.workload import WrongResult, make_case, rank_main

    workload = Workload(
        num_ranks=options.ranks,
        num_tokens=options.tokens,
        hidden=options.hidden,
        num_experts=options.experts,
        num_topk=options.topk,
        num_sms=options.sms,
        num_slots=options.slots,
    )
    found: list[dict[str, Any]] = []
    visited: set[str] = set()
    seconds, failure, shows_each = 0.0, "", options.runs <= 20 and not options.json
    progress = command_line.Progress()
    for seed in range(options.seed, options.seed + options.runs):
        case = make_case(workload, seed)
        begin = time.perf_counter()
        try:
            results = run(rank_main(case), options.ranks, seed, **_machine(options))
        except (DeepCommError, MachineError, WrongResult) as error:
            rank = getattr(error, "failed_rank", None)
            where = "" if rank is None else f" on rank {rank}"
            failure = f"{type(error).__name__}{where}\n{error}"
            break
        seconds += time.perf_counter() - begin
        visited.update(results.visited_sites)
        found.append({"seed": seed, "steps": results.num_steps, "us": results.time_ns / 1e3})
        if shows_each:
            print(f"seed {seed}: {results.num_steps} steps, {found[-1]['us']:.1f} us simulated")
        else:
            progress.step(f"{len(found)} of {options.runs} runs")
    place = options.weaken.rpartition(":")[0]
    if place and not failure and place not in visited:  # nothing was weakened
        like = ", ".join(difflib.get_close_matches(place, visited, cutoff=0)) or "no place at all"
        command_line.refuse("simulate", f"--weaken: no run came to {place}; they came to {like}")
    if options.json:
        seed_failed = options.seed + len(found) if failure else None
        print(json.dumps({"runs": found, "failed_seed": seed_failed, "failure": failure}, indent=2))
    elif failure:
        seed = options.seed + len(found)
        print(f"seed {seed}: {failure}\nFAILED at seed {seed}, after {len(found)} good runs")
    else:
        num_steps = sum(each["steps"] for each in found)
        print(
            f"PASSED {options.runs} runs: bitwise equal to the reference; {num_steps} steps, "
            f"{options.runs / seconds:.1f} runs/s"
        )
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
