"""python -m deep_comm.simulate: a random routing's dispatch and combine, seeded and checked.

The exit code is the verdict: 0 if every run gave the reference's results, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
import time

from deep_comm.errors import DeepCommError
from deep_comm.simulate import MachineError, run
from deep_comm.simulate.workload import Workload, WrongResult, make_case, rank_main


def _stall(text: str) -> tuple[int, int, int]:
    parts = text.split(":")
    try:
        rank, after, steps = (int(part) for part in parts)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not rank:after-step:steps (0 steps: for ever)"
        ) from None
    return rank, after, steps


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    defaults = Workload()
    parser = argparse.ArgumentParser(
        prog="python -m deep_comm.simulate",
        description="Replay dispatch and combine of a random routing under a seeded scheduler.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--runs", type=int, default=1, help="how many runs, with ascending seeds")
    parser.add_argument("--ranks", type=int, default=defaults.num_ranks)
    parser.add_argument("--tokens", type=int, default=defaults.num_tokens, help="of each rank")
    parser.add_argument("--hidden", type=int, default=defaults.hidden, help="bfloat16 elements")
    parser.add_argument("--experts", type=int, default=defaults.num_experts)
    parser.add_argument("--topk", type=int, default=defaults.num_topk)
    parser.add_argument("--sms", type=int, default=defaults.num_sms, help="a channel each")
    parser.add_argument("--slots", type=int, default=defaults.num_slots, help="of every ring")
    parser.add_argument(
        "--policy",
        default="any",
        choices=["any", "random", "fifo", "lifo", "starve", "priority"],
        help="order of the threads; any: the seed picks",
    )
    parser.add_argument(
        "--fault", action="append", default=[], help="break a part of the protocol on purpose"
    )
    parser.add_argument(
        "--stall",
        action="append",
        default=[],
        type=_stall,
        metavar="RANK:AFTER:STEPS",
        help="stop a rank after a step for so many steps, 0: for ever",
    )
    parser.add_argument(
        "--weaken",
        default="",
        metavar="FILE:LINE:OP:HOW",
        help="weaken one place in the kernels; HOW is relaxed, or narrow: a smaller scope",
    )
    parser.add_argument("--strong-memory", action="store_true", help="stores and loads act at once")
    parser.add_argument(
        "--ordered-collectives", action="store_true", help="shuffles and votes order memory"
    )
    parser.add_argument(
        "--races",
        action="store_true",
        help="accesses to shared memory that nothing orders are errors (DEEP_COMM_FIND_RACES=ON)",
    )
    parser.add_argument("--prompt-bulk", action="store_true", help="bulk copies complete at once")
    parser.add_argument("--on-stuck", default="report", choices=["report", "clock"])
    options = parser.parse_args(arguments)
    for name in ("runs", "ranks", "hidden", "experts", "topk", "sms", "slots"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.tokens < 0:
        parser.error("--tokens must be at least 0")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    workload = Workload(
        num_ranks=options.ranks,
        num_tokens=options.tokens,
        hidden=options.hidden,
        num_experts=options.experts,
        num_topk=options.topk,
        num_sms=options.sms,
        num_slots=options.slots,
    )
    num_steps, seconds = 0, 0.0
    for seed in range(options.seed, options.seed + options.runs):
        case = make_case(workload, seed)
        begin = time.perf_counter()
        try:
            results = run(
                rank_main(case),
                options.ranks,
                seed,
                options.policy,
                weak_memory=not options.strong_memory,
                delay_bulk=not options.prompt_bulk,
                faults=options.fault,
                stalls=options.stall,
                on_stuck=options.on_stuck,
                collectives_order_memory=options.ordered_collectives,
                find_races=options.races,
                weaken=options.weaken,
            )
        except (DeepCommError, MachineError, WrongResult) as error:
            rank = getattr(error, "failed_rank", None)
            where = "" if rank is None else f" on rank {rank}"
            print(f"seed {seed}: {type(error).__name__}{where}\n{error}")
            print(f"FAILED at seed {seed}, after {seed - options.seed} good runs")
            return 1
        seconds += time.perf_counter() - begin
        num_steps += results.num_steps
        if options.runs <= 20:
            print(
                f"seed {seed}: {results.num_steps} steps, {results.time_ns / 1e3:.1f} us simulated"
            )
    print(
        f"PASSED {options.runs} runs: bitwise equal to the reference; {num_steps} steps, "
        f"{options.runs / seconds:.1f} runs/s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
