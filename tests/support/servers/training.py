"""A trainer, a process for each rank, that trains a small MoE on this project's own pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from free_port import free_port

from servers import runs
from servers.combinations import Row
from servers.models import MODELS
from servers.runs import Machine

LENGTH, BATCH = 128, 8  # of a rank's batches


def job(row: Row, machine: Machine, rank: int) -> dict[str, Any]:
    """For the trainer's program. Tokens are bytes."""
    model = MODELS[row.model]
    return dict(
        backend=row.backend, layers=model.layers, experts=model.experts, topk=model.topk,
        hidden=model.hidden, inter=model.inter, vocab=model.vocab, length=LENGTH, batch=BATCH,
        rate=1e-3, steps=machine.steps, device=machine.device, one_gpu=machine.one_gpu,
        copies=machine.one_gpu or machine.device == "cpu",
        result=str(machine.out / f"{runs.file_name(row)}.rank{rank}.json"),
    )  # fmt: skip


def run(row: Row, machine: Machine) -> dict[str, Any]:
    """Losses and norms of gradients of all ranks, by step. Raises Failed."""
    port, commands, results = free_port(), [], []
    for rank in range(row.num_gpus):
        described = job(row, machine, rank)
        results.append(Path(described["result"]))
        results[-1].unlink(missing_ok=True)
        path = results[-1].with_suffix(".job")
        path.write_text(json.dumps(described))
        env = runs.environment(row, machine) | dict(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(row.num_gpus),
            LOCAL_WORLD_SIZE=str(row.num_gpus), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            CUBLAS_WORKSPACE_CONFIG=":4096:8", TORCH_COMPILE_DISABLE="1",
        )  # fmt: skip
        if machine.device == "cpu":
            env["DEEP_COMM_DEVICE"] = "cpu"
        program = runs.IN_SERVER / f"{row.server}_rank.py"
        commands.append((runs.python(str(program), str(path)), env, path.with_suffix(".log")))
    runs.run_to_end(commands, machine.limit_s)
    said = [json.loads(path.read_text()) for path in results]
    return dict(
        facts=said[0]["facts"], losses=[one["losses"] for one in said],
        norms=[one["norms"] for one in said], calls=runs.counted(row, machine),
        built=runs.built([log for _, _, log in commands]),
    )  # fmt: skip
