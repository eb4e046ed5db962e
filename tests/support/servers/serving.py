"""A server over HTTP: tokens, aborted requests, a rank without work, kill -9, times."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from free_port import free_port

from servers import load, offline, profile, runs
from servers.combinations import Row, sglang_flags, vllm_options
from servers.load import Asked, Server
from servers.models import MODELS
from servers.runs import Failed, Left, Machine

_NUM_TOKENS = 24
_AT_ONCE = 64  # requests, one in eight of which is aborted
_OUR_ERROR = re.compile(r"deep_comm\.errors\.\w+: .*")
LOADS = (1, 8, 32, 128)  # clients, of figures


def flags(options: dict[str, Any]) -> list[str]:
    """Arguments of vLLM's engine as flags of its server."""
    found = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            found += [f"--{flag}", text]
    return found


def command(row: Row, machine: Machine, port: int, traces: Path | None = None) -> list[str]:
    model, where = str(machine.model(row.model)), ["--host", "127.0.0.1", "--port", str(port)]
    if row.server == "sglang":
        module = "sglang.launch_server"
        if "native" in row.options:
            module = "deep_comm.integrations.sglang.launch"
        named = ["--model-path", model, "--served-model-name", "m"]
        return runs.python("-m", module, *named, *where, *sglang_flags(row))
    named = [model, "--served-model-name", "m", "--api-server-count", "1"]
    main, options = "vllm.entrypoints.cli.main", vllm_options(row)
    if traces is not None:
        options |= profile.vllm_options(traces)
    return runs.python("-m", main, "serve", *named, *where, *flags(options))


@dataclass(frozen=True)
class Up:
    server: Server
    after_s: float
    kill: Any  # ends it by SIGKILL


def _answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
    except (urllib.error.URLError, OSError):
        return False
    return True


@contextlib.contextmanager
def served(row: Row, machine: Machine, log: Path) -> Iterator[Up]:
    """A server that answers. Raises Failed if it ends, or does not come in time."""
    port, env = free_port(), runs.environment(row, machine)
    began = time.monotonic()
    run = command(row, machine, port, log.with_suffix(".traces") if machine.trace else None)
    with runs.started(run, env, log, 4 * machine.limit_s) as process:
        while True:
            if process.poll() is not None:
                raise Failed(f"the server ended with {process.returncode}\n{runs.tail(log)}")
            if time.monotonic() - began > machine.limit_s:
                raise Failed(f"no server within {machine.limit_s} s\n{runs.tail(log)}")
            if _answers(port):
                break
            time.sleep(0.5)
        after_s = time.monotonic() - began
        try:
            yield Up(
                Server(port, is_sglang=row.server == "sglang"), after_s, lambda: runs.end(process)
            )
        except (load.BadAnswer, http.client.HTTPException, OSError) as error:
            raise Failed(f"{type(error).__name__}: {error}\n{runs.tail(log)}") from error


def tokens(row: Row, server: Server) -> dict[str, Any]:
    """One by one; then 64 at once, one in eight aborted; then one rank without work; once more.

    What comes is compared with the base; here only that the server goes on.
    """
    every = list(enumerate(offline.prompts_of(row)))
    plain = [Asked(i, ids, _NUM_TOKENS, offline.rank_of(row, i)) for i, ids in every]
    alone = load.complete_all(server, plain, 1)
    many = [
        Asked(i, every[i % len(every)][1], _NUM_TOKENS, i % row.num_gpus, 3 if i % 8 == 7 else None)
        for i in range(_AT_ONCE)
    ]
    together = load.complete_all(server, many, _AT_ONCE)
    one_rank = load.complete_all(server, [Asked(i, ids, _NUM_TOKENS, 0) for i, ids in every], 8)
    again = load.complete_all(server, plain, 8)
    phases = dict(alone=alone, together=together, one_rank=one_rank, again=again)
    rows = [
        dict(vars(answer), prompt=f"{phase} {answer.prompt}")
        for phase, answers in phases.items() for answer in answers if not answer.aborted
    ]  # fmt: skip
    return dict(rows=rows, aborted=sum(answer.aborted for answer in together))


def killed(row: Row, machine: Machine, log: Path) -> None:
    """kill -9 under load. Raises Failed if it leaves anything behind."""
    before = Left.settled()
    with served(row, machine, log) as up:
        ids = load.prompts(MODELS[row.model].vocab, _AT_ONCE, 2)
        load.complete(up.server, Asked(0, ids[0], 2, 0))  # it serves
        wanted = [Asked(i, one, 200, i % row.num_gpus) for i, one in enumerate(ids)]
        loaded = threading.Thread(target=_ask_in_vain, args=(up.server, wanted))
        loaded.start()
        time.sleep(0.4)
        if not loaded.is_alive():
            raise Failed(f"{len(wanted)} requests ended before the kill\n{runs.tail(log)}")
        up.kill()
        loaded.join(up.server.timeout_s)
    before.require_nothing_more()
    runs.forget_counts(row, machine)


def _ask_in_vain(server: Server, wanted: list[Asked]) -> None:
    with contextlib.suppress(load.BadAnswer, OSError, ValueError):
        load.complete_all(server, wanted, len(wanted))


def timed(row: Row, machine: Machine) -> dict[str, Any]:
    """Figures of a row and its base, whose servers are up at the same time, in turn."""
    rows = [row.base, row]
    ids = [(one * 8)[:512] for one in load.prompts(MODELS[row.model].vocab, 256, 3)]
    facts, found, traces = {}, {}, {}
    with contextlib.ExitStack() as stack:
        with concurrent.futures.ThreadPoolExecutor(len(rows)) as pool:
            starting = [served(one, machine, _log(row, machine, one)) for one in rows]
            ups = list(pool.map(stack.enter_context, starting))
        servers = [up.server for up in ups]
        facts = dict(server=row.server, start_s=ups[-1].after_s)
        for clients in LOADS:
            measured = load.measure(servers, ids, 128, clients, row.num_gpus, machine.repeats)
            found[str(clients)] = [
                {name: vars(value) for name, value in one.items()} for one in measured
            ]
        for one, server in zip(rows, servers, strict=True) if machine.trace else ():
            folder = _log(row, machine, one).with_suffix(".traces")
            for clients in LOADS:
                with profile.running(server.port, f"load{clients}"):
                    load.put_on(server, ids, 128, clients, row.num_gpus)
            traces[one.name] = {name: profile.read(folder, f"load{name}") for name in found}
    return dict(facts=facts, figures=found, traces=traces)


def _log(row: Row, machine: Machine, one: Row) -> Path:
    """Of a server of this row: its own, or its base's."""
    return machine.out / f"{runs.file_name(row)}{'' if one == row else '.base'}.log"


def refused(row: Row, machine: Machine, log: Path) -> dict[str, Any]:
    """A server that cannot work ends by itself, and says why. Raises Failed if it does not."""
    began, env, port = time.monotonic(), runs.environment(row, machine), free_port()
    with runs.started(command(row, machine, port), env, log, machine.limit_s) as process:
        while (code := process.poll()) is None:
            if _answers(port):
                raise Failed(f"the server has started\n{runs.tail(log)}")
            time.sleep(0.5)
    said = _OUR_ERROR.search(log.read_text(errors="replace"))
    if code in (0, runs.TIME_IS_UP) or said is None:
        raise Failed(f"no error of deep_comm; ended with {code}\n{runs.tail(log)}")
    return dict(facts=dict(server=row.server, ended_s=time.monotonic() - began), said=said[0])


def run(row: Row, machine: Machine) -> dict[str, Any]:
    """Raises Failed."""
    log = machine.out / f"{runs.file_name(row)}.log"
    if "refused" in row.options:
        return refused(row, machine, log)
    if "kill" in row.options:
        killed(row, machine, log.with_suffix(".killed.log"))
    if row.front == "figures":
        result = timed(row, machine)
    else:
        with served(row, machine, log) as up:
            facts = dict(server=row.server, start_s=up.after_s)
            result = dict(facts=facts) | tokens(row, up.server)
    return result | dict(
        calls=runs.counted(row, machine), built=runs.built([log]),
        rearranged=offline.rearranged([log]),
    )  # fmt: skip
