"""``python -m deep_comm.bench``: dispatch and combine, timed after they have been checked.

Under torchrun every process is a rank; else the ranks are started here. deep_comm.bench.options
says what can be chosen, deep_comm.bench.measure how calls are timed.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from deep_comm import processes
from deep_comm.bench import layer, report
from deep_comm.bench.measure import GROUP_TIMEOUT
from deep_comm.bench.options import Options, parse
from deep_comm.bench.rank import run_rank


def publish(options: Options, figures: Any, num_ranks: int, started: float) -> None:
    (layer if options.family == "layer" else report).publish(options, figures, num_ranks)
    print(f"measured in {time.monotonic() - started:.0f} s", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(given, shlex.join(["python", "-m", "deep_comm.bench", *given]))
    started = time.monotonic()
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        num_ranks = options.ranks or (torch.cuda.device_count() if options.on_gpu else 4)
        timeout_s = options.deadline_s + processes.FAILURE_GRACE_S
        figures = processes.run(run_rank, num_ranks, options, timeout_s=timeout_s)[0]
        publish(options, figures, num_ranks, started)
        return 0
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        # All ranks are on this host; without this gloo asks the resolver for the host's own name.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    try:
        figures = run_rank(dist.group.WORLD, options)
        if dist.get_rank() == 0:
            publish(options, figures, dist.get_world_size(), started)
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
