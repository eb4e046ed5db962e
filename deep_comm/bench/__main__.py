"""``python -m deep_comm.bench``: dispatch and combine, timed after they have been checked.

Under torchrun every process is a rank; else the ranks are started here. deep_comm.bench.options
says what can be chosen, deep_comm.bench.measure how calls are timed.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
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


def _start(options: Options) -> str:
    import torch

    from deep_comm import processes
    from deep_comm.bench.rank import run_rank

    num_ranks = options.ranks or (torch.cuda.device_count() if options.on_gpu else 4)
    check_ranks(options, num_ranks)
    timeout_s = options.deadline_s + processes.FAILURE_GRACE_S
    figures = processes.run(run_rank, num_ranks, options, timeout_s=timeout_s)[0]
    return publish(options, figures, num_ranks)


def _join(options: Options) -> str | None:
    """As one rank of torchrun; None unless it is the one that reports."""
    import torch.distributed as dist

    from deep_comm.bench.measure import GROUP_TIMEOUT
    from deep_comm.bench.rank import run_rank

    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        # All ranks are on this host; without this gloo asks the resolver for the host's own name.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    try:
        figures = run_rank(dist.group.WORLD, options)
        return publish(options, figures, dist.get_world_size()) if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(given, shlex.join(["deep_comm", "bench", *given]))
    if (picture := vars(options).get("from")) is not None:
        plot.draw(picture, options.plot)
        print(f"# deep_comm bench OK: drawn into {options.plot}")
        return 0
    is_rank = "TORCHELASTIC_RUN_ID" in os.environ
    run: Callable[[Options], str | None] = _join if is_rank else _start
    started = time.monotonic()
    try:
        said = run(options)
    except Exception as error:
        if os.environ.get("RANK", "0") == "0":
            reason = str(error).splitlines() or [""]
            print(f"# deep_comm bench FAILED: {type(error).__name__}: {reason[0]}", flush=True)
        raise
    if said is not None:
        print(f"# deep_comm bench OK: {said}, {time.monotonic() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
