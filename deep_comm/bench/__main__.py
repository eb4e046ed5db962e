"""``python -m deep_comm.bench``: dispatch and combine, timed after they have been checked.

Under torchrun every process is a rank; else the ranks are started here. deep_comm.bench.options
says what can be chosen, deep_comm.bench.measure how calls are timed.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any

from deep_comm.bench import plot
from deep_comm.bench.options import Options, check_ranks, parse


def publish(options: Options, figures: Any, num_ranks: int) -> str:
    """The end of the report; what the last line says of it."""
    from deep_comm.bench import layer, report

    publisher: Any = layer if options.family == "layer" else report
    if options.family == "tp":
        from deep_comm.bench import tensor_parallel

        publisher = tensor_parallel
    said: str = publisher.publish(options, figures, num_ranks)
    return said


def _run(options: Options) -> str | None:
    """What the last line says; None on ranks of torchrun that do not report."""
    import torch

    from deep_comm import launch, tuning
    from deep_comm.bench.rank import run_rank
    from deep_comm.processes import FAILURE_GRACE_S

    if launch.is_rank():
        num_ranks = int(os.environ["WORLD_SIZE"])
    else:
        num_ranks = options.ranks or (torch.cuda.device_count() if options.on_gpu else 4)
        check_ranks(options, num_ranks)
    timeout_s = options.deadline_s + FAILURE_GRACE_S
    stores = vars(options).get("store")
    with tuning.without_an_absent_file() if stores else contextlib.nullcontext():
        figures = launch.results(run_rank, num_ranks, options, timeout_s=timeout_s)[0]
    reports = not launch.is_rank() or os.environ["RANK"] == "0"
    return publish(options, figures, num_ranks) if reports else None


def _passed(options: Options, error: Exception, elapsed_s: float) -> str:
    """Of a rank that was ended: which deadlines had passed."""
    flags = ("--deadline-s", "--size-deadline-s")
    limits = {flag: vars(options).get(flag[2:].replace("-", "_")) for flag in flags}
    passed = [f"{flag} {it:g}" for flag, it in limits.items() if it and it <= elapsed_s]
    # Exceptions of a rank come here as they are: with this code only faulthandler ends a process.
    is_late = getattr(error, "reason", "") == "exited with 1"
    told = f", a deadline has passed ({', '.join(passed)}); where it was stands above"
    return told if passed and is_late else ""


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(given, shlex.join(["deep_comm", "bench", *given]))
    if (picture := vars(options).get("from")) is not None:
        plot.draw(picture, options.plot)
        print(f"# deep_comm bench OK: drawn into {options.plot}")
        return 0
    started = time.monotonic()
    try:
        said = _run(options)
    except Exception as error:
        if os.environ.get("RANK", "0") == "0":
            reason = (str(error).splitlines() or [""])[0]
            reason += _passed(options, error, time.monotonic() - started)
            print(f"# deep_comm bench FAILED: {type(error).__name__}: {reason}", flush=True)
        raise
    if said is not None:
        print(f"# deep_comm bench OK: {said}, {time.monotonic() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
