"""What each rank of a run does. Not in __main__: processes that are started find it by its name."""

from __future__ import annotations

import faulthandler
import gc
import os
from typing import Any

import torch
import torch.distributed as dist

from deep_comm.bench import layer
from deep_comm.bench.options import Options
from deep_comm.bench.runner import Runner


def run_rank(_group: Any, options: Options) -> Any:
    """One rank, however it was started. The default group carries rendezvous and statistics."""
    # Everything is collected before each timing; what the imports have left, 0.1 s a time, stays.
    gc.freeze()
    # Everything that waits has a limit of its own; this one is for what nobody thought of.
    faulthandler.dump_traceback_later(options.deadline_s, exit=True)
    try:
        torch.set_num_threads(1)
        device, rank = torch.device("cpu"), dist.get_rank()
        if options.on_gpu:
            # NVLink multicast stays off unless the user asks for it.
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
            os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
            device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(device)

        def say(text: str) -> None:
            if rank == 0:
                print(text, flush=True)

        make: Any = layer.Runner if options.family == "layer" else Runner
        if options.family == "tp":  # loads what torch has for tensor parallelism
            from deep_comm.bench import tensor_parallel

            make = tensor_parallel.Runner
        return make(options, device, say).run()
    finally:
        faulthandler.cancel_dump_traceback_later()
