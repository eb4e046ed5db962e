"""A trainer, a process for each rank, that trains a small MoE on this project's own pages."""

from __future__ import annotations

from typing import Any

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
    of_host = dict(DEEP_COMM_DEVICE="cpu") if machine.device == "cpu" else {}
    said, logs = runs.run_ranks(
        row, machine, f"{row.server}_rank.py",
        [job(row, machine, rank) for rank in range(row.num_gpus)],
        CUBLAS_WORKSPACE_CONFIG=":4096:8", TORCH_COMPILE_DISABLE="1", **of_host,
    )  # fmt: skip
    return dict(
        facts=said[0]["facts"], losses=[one["losses"] for one in said],
        norms=[one["norms"] for one in said], calls=runs.counted(row, machine),
        built=runs.built(logs),
    )  # fmt: skip
