"""A row's processes: their limits, and what they leave behind."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from server_stand_ins import (
    BY_NAME,
    ROOT,
    TOOL,
    machine_at,
)
from servers import compare, offline, runs, serving
from servers.combinations import BASE


def test_a_process_ends_when_its_time_is_up_and_its_log_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    command = runs.python("-uc", "print('so far'); import time; time.sleep(100)")
    with pytest.raises(runs.Failed, match=r"\[124\].*\n.*\nso far"):
        runs.run_to_end([(command, dict(os.environ), log)], 1.5)


def test_one_process_that_fails_ends_the_others(tmp_path: Path) -> None:
    began = time.monotonic()
    commands = [
        (runs.python("-c", code), dict(os.environ), tmp_path / f"{index}.log")
        for index, code in enumerate(("import time; time.sleep(100)", "raise SystemExit(3)"))
    ]
    with pytest.raises(runs.Failed, match="None, 3"):
        runs.run_to_end(commands, 60)
    assert time.monotonic() - began < 30


RANKS = """
import sys, deep_comm
from deep_comm import processes

def serve(group):
    buffer = deep_comm.Buffer(group, 1 << 20, device="cpu")
    print("up", flush=True)
    while True:
        buffer.barrier()

if __name__ == "__main__":
    processes.run(serve, 2, timeout_s=100)
"""


def test_ranks_that_are_killed_in_the_middle_of_calls_leave_no_shared_memory(
    tmp_path: Path,
) -> None:
    program, log = tmp_path / "ranks.py", tmp_path / "ranks.log"
    program.write_text(RANKS)
    env = {**os.environ, "DEEP_COMM_LOG": "info"}
    for _ in range(2):  # and start again at once
        before = runs.Left.now()
        with runs.started(runs.python(str(program)), env, log, 60) as process:
            while log.read_text().count("up") < 2:
                assert process.poll() is None, log.read_text()
                time.sleep(0.05)
            time.sleep(0.2)
            runs.end(process)
        before.require_nothing_more(limit_s=10)
    assert len(runs.built([log])) == 2  # the line of each Buffer


def test_calls_of_an_earlier_run_do_not_count(tmp_path: Path) -> None:
    row, machine = BY_NAME["vllm/offline/qwen/deepep_low_latency"], machine_at(tmp_path)
    folder = Path(runs.environment(row, machine)["SERVERS_COUNTS"])
    folder.mkdir(parents=True)
    (folder / "1.json").write_text(json.dumps(dict(file="x", counts={"Buffer.dispatch": 1})))
    assert len(runs.counted(row, machine)) == 1
    runs.forget_counts(row, machine)
    assert runs.counted(row, machine) == []


def test_what_is_left_behind_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "SHARED_MEMORY", tmp_path)
    before = runs.Left.now()
    (tmp_path / "deep_comm.0.1.2").touch()
    (tmp_path / "another").touch()
    with pytest.raises(runs.Failed, match=r"\['deep_comm.0.1.2'\]"):
        before.require_nothing_more(limit_s=0.1)


def test_what_was_there_before_is_read_when_nobody_else_comes_or_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    falling = iter([900, 500, 7, 7, 3])
    monkeypatch.setattr(runs, "device_mib", lambda: [next(falling)])
    assert runs.Left.settled().device_mib == [7]
    monkeypatch.setattr(runs, "device_mib", lambda: [time.monotonic_ns()])
    with pytest.raises(runs.Failed, match="other processes use these GPUs"):
        runs.Left.settled(limit_s=0.1)


SERVER = """
import sys
sys.path[:0] = {paths!r}
import server_stand_ins
port = int(sys.argv[sys.argv.index("--port") + 1])
server_stand_ins.server_at(port).serve_forever()
"""


def test_a_row_starts_its_server_kills_it_starts_it_again_and_asks_it(tmp_path: Path) -> None:
    """With a server of a few lines in vLLM's place."""
    package = tmp_path / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    paths = [str(ROOT / "tests" / "support")]
    (package / "main.py").write_text(SERVER.format(paths=paths))
    machine = dataclasses.replace(machine_at(tmp_path, limit_s=60), paths=(str(tmp_path),))
    row = BY_NAME["vllm/http/qwen/deepep_low_latency:graphs:kill"]
    result = serving.run(row, machine)
    assert result["aborted"] == 8 and result["facts"]["start_s"] < 60
    runs.keep(row, machine, result)
    (line,) = compare.lines(machine.out, [row])
    assert line.is_good is False and line.text == "deep_comm was not called"


ENGINE = """
import os, torch
from types import SimpleNamespace

__version__ = "0"
torch.cuda.get_device_name = lambda: "none"
SamplingParams = SimpleNamespace

class LLM:
    def __init__(self, **options):
        assert options["all2all_backend"] and options["data_parallel_size"] == 2
        assert os.environ["WORLD_SIZE"] == "2"

    def generate(self, prompts, sampling):
        outputs = []
        for prompt in prompts:
            first = sum(prompt["prompt_token_ids"])
            ids = [first + step for step in range(sampling.max_tokens)]
            said = [{one: SimpleNamespace(logprob=-1.0), 0: SimpleNamespace(logprob=-1.5)}
                    for one in ids]
            made = SimpleNamespace(token_ids=ids, logprobs=said)
            outputs.append(SimpleNamespace(outputs=[made], num_cached_tokens=2))
        return outputs
"""


def test_ranks_of_an_engine_get_their_prompts_and_give_their_tokens(tmp_path: Path) -> None:
    """With an engine of a few lines in vLLM's place."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(ENGINE)
    machine = dataclasses.replace(machine_at(tmp_path, limit_s=100), paths=(str(tmp_path),))
    row = BY_NAME[f"vllm/offline/qwen/{BASE}:prefix"]
    result = offline.run(row, machine)
    assert [one["ids"] for one in result["rows"]] == offline.prompts_of(row)
    for one in result["rows"]:
        assert one["tokens"] == list(range(sum(one["ids"]), sum(one["ids"]) + 24))
        assert one["logprobs"] == [-1.0] * 24 and one["margins"] == [0.5] * 24
    assert result["facts"]["server"] == "vllm 0" and result["calls"] == []
    assert result["cached"] == 2 * 2 * 18 and result["steps"] == {}


SLOW_ENGINE = """
import pathlib, sys, time

class LLM:
    def __init__(self, **options):
        folder = pathlib.Path({folder!r})
        (folder / sys.argv[1].replace("/", "-")).touch()
        while len(list(folder.iterdir())) < {wanted}:
            time.sleep(0.05)
        raise SystemExit(7)
"""


@pytest.mark.parametrize("is_told_to_end", [False, True])
def test_rows_run_side_by_side_until_the_tool_is_told_to_end(
    is_told_to_end: bool, tmp_path: Path
) -> None:
    """With an engine that waits for the other row's, and GPUs that nvidia-smi alone knows."""
    begun, place, path = (tmp_path / name for name in ("begun", "place", "path"))
    for folder in (begun, place / "vllm", path):
        folder.mkdir(parents=True)
    wanted = 99 if is_told_to_end else 4  # two rows of two ranks
    engine = SLOW_ENGINE.format(folder=str(begun), wanted=wanted)
    (place / "vllm" / "__init__.py").write_text(engine)
    smi = path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: a'; echo 'GPU 1: b'\n")
    smi.chmod(0o755)
    machine = machine_at(tmp_path)
    names = [f"vllm/offline/qwen/{BASE}", "vllm/offline/qwen/deepep_low_latency"]
    command = [*TOOL, "run", str(tmp_path), names[1], "--installed", "--at-once", "2"]
    env = {**os.environ, "PYTHONPATH": str(place), "PATH": f"{path}:{os.environ['PATH']}"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as tool:
        deadline = time.monotonic() + 60
        while len(list(begun.iterdir())) < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(list(begun.iterdir())) == 4
        if is_told_to_end:
            tool.terminate()
        said, _ = tool.communicate(timeout=60)
    assert tool.returncode == 1
    outcome = "0 good, 0 bad, 2 not run" if is_told_to_end else "0 good, 2 bad, 0 not run"
    assert outcome in said
    kept = [(machine.out / f"{runs.file_name(BY_NAME[name])}.json").exists() for name in names]
    assert kept == [not is_told_to_end] * 2


DENSE = """
import torch
from types import SimpleNamespace

class Model:
    def to(self, device):
        return self

    eval = lambda self: self

    def __call__(self, ids, use_cache):
        if self.is_cut_off:
            raise SystemExit(9)
        # The next token is the sum of all before it, of 97.
        return SimpleNamespace(logits=4 * torch.nn.functional.one_hot(ids.cumsum(1) % 97, 97))

class AutoModelForCausalLM:
    @staticmethod
    def from_pretrained(path, **options):
        assert path.endswith("models/qwen")
        Model.is_cut_off = {is_cut_off}
        return Model()
"""


def test_tokens_are_kept_when_the_dense_model_is_cut_off_and_compared_later(tmp_path: Path) -> None:
    """With a dense model of a few lines, which is given rows of different lengths at once."""
    row, machine = BY_NAME[f"vllm/offline/qwen/{BASE}"], machine_at(tmp_path)
    rows = []
    for prompt, ids in enumerate(([3], [5, 8, 13], [96] * 40)):
        tokens = [sum(ids) % 97]
        while len(tokens) < 24:
            tokens.append((sum(ids) + sum(tokens)) % 97)
        rows.append(dict(prompt=prompt, ids=ids, tokens=tokens, logprobs=[-1.0] * 24))
    rows[1]["tokens"][-1] += 1
    runs.keep(row, machine, dict(rows=rows, calls=[], built=[]))
    dense = tmp_path / "dense" / "transformers.py"
    dense.parent.mkdir()
    command = [*TOOL, "compare", str(tmp_path), row.name]
    env = {**os.environ, "PYTHONPATH": str(dense.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    for is_cut_off, said in (
        (True, "processes ended with [9]"),
        (False, "71 equal, 0 near ties, 1"),
    ):
        dense.write_text(DENSE.format(is_cut_off=is_cut_off))
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert said in done.stderr + done.stdout
        assert ("reference" in runs.kept(row, machine)) == (not is_cut_off)
        assert done.returncode == int(is_cut_off)


ANSWERS = """
import http.server, sys

class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("raise __import__('deep_comm').errors.ArgumentError('sizes', 1, 'too small')", None),
        ("raise SystemExit(1)", "no error of deep_comm"),
        ("import time; time.sleep(100)", "no error of deep_comm"),
        (ANSWERS, "the server has started"),
    ],
)
def test_a_server_that_cannot_work_must_end_with_our_message(
    code: str, failure: str | None, tmp_path: Path
) -> None:
    package = tmp_path / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(code)
    limit_s = 5 if "sleep" in code else 60
    machine = dataclasses.replace(machine_at(tmp_path, limit_s=limit_s), paths=(str(tmp_path),))
    row = BY_NAME["vllm/http/qwen/deepep_high_throughput:refused"]
    if failure is not None:
        with pytest.raises(runs.Failed, match=failure):
            serving.run(row, machine)
        return
    result = serving.run(row, machine)
    assert compare.judge(row, result, None)[0]
    assert result["said"].startswith("deep_comm.errors.ArgumentError: ")
