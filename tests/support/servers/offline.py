"""vLLM's engine without a server, a process for each rank, and the dense model to compare with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from servers import load, runs
from servers.combinations import Row, vllm_options
from servers.models import MODELS, write_dequantised
from servers.runs import Machine

_NUM_TOKENS = 24
_COMMON = 64  # first tokens that prompts share where prefixes are cached


def prompts_of(row: Row) -> list[list[int]]:
    common = _COMMON if "prefix" in row.options else 0
    return load.prompts(MODELS[row.model].vocab, _num_prompts(row), 1, common)


def _num_prompts(row: Row) -> int:
    return row.num_gpus * load.NUM_LENGTHS if "even" in row.options else 18


def rank_of(row: Row, prompt: int) -> int:
    """Uneven: two thirds are the first rank's. The first prompt has one token."""
    if "idle" in row.options:
        return 1 if prompt == 0 else 0
    if "even" in row.options:
        return prompt // load.NUM_LENGTHS
    num_first = 2 * _num_prompts(row) // 3
    return 0 if prompt < num_first else 1 + prompt % (row.num_gpus - 1)


def jobs(row: Row, machine: Machine) -> list[dict[str, Any]]:
    """For rank.py, one per rank."""
    model, every = machine.model(row.model), list(enumerate(prompts_of(row)))
    rounds = {"prefix": 2, "eplb": 4}
    return [
        dict(
            model=str(model), options=vllm_options(row), tokens=_NUM_TOKENS,
            rounds=max([1, *(rounds.get(option, 1) for option in row.options)]),
            prompts=[
                dict(prompt=i, ids=ids) for i, ids in every if rank_of(row, i) == rank
            ],
            result=str(machine.out / f"{runs.file_name(row)}.rank{rank}.json"),
        )
        for rank in range(row.num_gpus)
    ]  # fmt: skip


def run(row: Row, machine: Machine) -> dict[str, Any]:
    """Tokens of all ranks. Raises Failed."""
    results, logs = runs.run_ranks(
        row, machine, "rank.py", jobs(row, machine), VLLM_ENABLE_V1_MULTIPROCESSING="0"
    )
    rows = sorted((one for result in results for one in result["rows"]), key=lambda x: x["prompt"])
    return dict(
        facts=results[0]["facts"], rows=rows, calls=runs.counted(row, machine),
        built=runs.built(logs), rearranged=rearranged(logs),
        cached=sum(result["cached"] for result in results), steps=results[0]["steps"],
    )  # fmt: skip


def rearranged(logs: list[Path]) -> int:
    """How often vLLM began to move experts; a second move begins when the first one has ended."""
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    return sum("Rearranging experts" in line and "(profile)" not in line for line in lines)


def dense_model(row: Row, machine: Machine) -> Path:
    """A model's folder, in BF16; made when it is first asked for."""
    folder = machine.model(row.model)
    if not MODELS[row.model].fp8:
        return folder
    plain = folder.with_name(f"{row.model}-plain")
    if not (plain / "config.json").exists():
        write_dequantised(folder, plain)
    return plain


def reference(row: Row, machine: Machine, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the dense model says after each prefix of these rows. Raises Failed."""
    folder = dense_model(row, machine)
    given = machine.out / f"{runs.file_name(row)}.given"
    given.write_text(json.dumps(rows))
    result = given.with_suffix(".reference.json")
    command = runs.python(
        str(runs.IN_SERVER / "reference.py"), str(folder), str(given), str(result)
    )
    env = runs.environment(row, machine) | {"SERVERS_WATCH": "", "SERVERS_HOOKS": ""}
    runs.run_to_end([(command, env, given.with_suffix(".reference.log"))], machine.limit_s)
    return json.loads(result.read_text())
