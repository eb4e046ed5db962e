"""Completions over HTTP: streamed, many at once, aborted; times of each."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
import time
from pathlib import Path

import pytest
from server_stand_ins import (
    BY_NAME,
    answering,
    machine_at,
)
from servers import compare, load, offline, profile, runs, serving
from servers.load import Asked, Server


@pytest.mark.parametrize("has_ids, is_sglang", [(True, False), (False, False), (True, True)])
def test_a_streamed_completion_has_tokens_margins_and_times(has_ids: bool, is_sglang: bool) -> None:
    with answering(has_ids) as server:
        asked = Asked(3, [10, 20], 5, rank=1)
        answer = load.complete(Server(server.server_port, 20, is_sglang), asked)
        assert server.ranks == ["1"]
    assert answer.prompt == 3 and answer.tokens == [30, 31, 32, 33, 34]
    assert answer.logprobs == [-1.0] * 5 and answer.margins == [0.5] * 5
    assert 0 < answer.first_s < answer.last_s


@pytest.mark.parametrize("is_sglang", [False, True])
def test_an_aborted_request_closes_its_connection(is_sglang: bool) -> None:
    with answering() as server:
        asked = Asked(0, [1], 500, abort_after=3)
        answer = load.complete(Server(server.server_port, 20, is_sglang), asked)
        assert answer.aborted and 3 <= len(answer.tokens) < 500
        deadline = time.monotonic() + 20
        while not server.aborted and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.aborted == 1


@pytest.mark.parametrize("is_sglang", [False, True])
def test_refusals_and_early_ends_are_errors(is_sglang: bool) -> None:
    with answering() as server:
        for ids, words in (([666], "400"), ([777], "2 of 9 tokens")):
            with pytest.raises(load.BadAnswer, match=words):
                load.complete(Server(server.server_port, 20, is_sglang), Asked(0, ids, 9))


def test_what_a_server_is_asked_covers_64_at_once_aborts_and_a_rank_without_work() -> None:
    row = BY_NAME["vllm/http/qwen/deepep_low_latency:graphs"]
    with answering() as server:
        result = serving.tokens(row, Server(server.server_port, 20))
        num_prompts = len(offline.prompts_of(row))
        assert server.ranks[-2 * num_prompts : -num_prompts] == ["0"] * num_prompts
    assert result["aborted"] == 8 and len(result["rows"]) == 3 * num_prompts + 56
    assert len({one["prompt"] for one in result["rows"]}) == len(result["rows"])
    assert compare.compare(result["rows"], result["rows"]).agrees()


def test_figures_are_measured_in_turn_after_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_REST_S", 0.0)
    with answering() as base, answering() as server:
        servers = [Server(one.server_port, 20) for one in (base, server)]
        first, found = load.measure(servers, [[1], [2, 3]], 4, 8, 2, repeats=2)
        for one in (base, server):
            assert len(one.ranks) == 4 * 16 and one.ranks.count("0") == one.ranks.count("1")
        assert load.measure(servers[:1], [[1]], 4, 1, 2, repeats=2)
        assert base.ranks[-16:] == ["0", "1"] * 8  # a lone client goes to all ranks
    assert set(found) == {"tokens_s", "first_ms", "each_ms", "gain"}
    assert all(one.mean > 0 for one in found.values())
    assert first["gain"] == load.Figure(1.0, 0.0)


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_row_of_figures_is_measured_beside_its_base(
    is_traced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_REST_S", 0.0)
    monkeypatch.setattr(serving, "LOADS", (1, 2))
    up: list[str] = []
    both = threading.Barrier(2, timeout=20)  # both start at the same time

    @contextlib.contextmanager
    def served(row, machine, log):
        with answering() as server:
            both.wait()
            log.write_text("")
            up.append(row.name)
            yield serving.Up(Server(server.server_port, 20), 1.5, None)

    told: list[str] = []

    @contextlib.contextmanager
    def running(port, name):
        told.append(name)
        yield

    monkeypatch.setattr(serving, "served", served)
    monkeypatch.setattr(profile, "running", running)
    monkeypatch.setattr(profile, "read", lambda folder, name: [f"{folder.name} {name}"])
    row = BY_NAME["vllm/figures/large/deepep_v2:graphs"]
    found = serving.run(row, machine_at(tmp_path, repeats=2, trace=is_traced))
    assert sorted(up) == sorted([row.name, row.base.name])
    assert row.base.name == "vllm/figures/large/allgather_reducescatter:graphs"
    assert found["facts"]["start_s"] == 1.5 and list(found["figures"]) == ["1", "2"]
    assert all(len(both) == 2 for both in found["figures"].values())
    assert told == ["load1", "load2"] * 2 * is_traced
    if is_traced:
        name = runs.file_name(row)
        assert found["traces"] == {
            row.base.name: {n: [f"{name}.base.traces load{n}"] for n in "12"},
            row.name: {n: [f"{name}.traces load{n}"] for n in "12"},
        }


def test_a_trace_says_what_the_steps_were_and_which_kernels_ran(tmp_path: Path) -> None:
    def event(kind: str, name: str, at: float, us: float, blocks: int = 1) -> dict:
        args = dict(grid=[blocks, 1, 1]) if kind == "kernel" else {}
        return dict(ph="X", cat=kind, name=name, ts=at, dur=us, args=args)

    step = "execute_context_{}(9)_generation_{}(4)"
    events = [
        event("user_annotation", step.format(1, 0), 0, 50),
        event("user_annotation", step.format(0, 4), 2000, 50),
        event("user_annotation", step.format(0, 4), 5000, 50),
        event("user_annotation", step.format(0, 4), 9000, 50),
        event("kernel", "experts", 100, 300), event("kernel", "experts", 1000, 100),
        event("kernel", "experts", 700, 100, 64), event("gpu_memcpy", "copy", 900, 10),
        event("kernel", "dispatch", 350, 250), event("cpu_op", "aten::add", 0, 5000),
        dict(ph="M", name="process_name"),
    ]  # fmt: skip
    path = tmp_path / "load8_dp0.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump(dict(traceEvents=events), file)
    (tmp_path / "load80_dp0.json.gz").write_text("another load")
    (found,) = profile.read(tmp_path, "load8")
    assert found["steps"] == {
        "1 prompts, 0 single tokens": dict(count=1, median_ms=2.0),
        "0 prompts, 4 single tokens": dict(count=2, median_ms=3.5),
    }
    found_kernels = [
        (one["name"], one["grid"], one["us"], one["count"]) for one in found["kernels"]
    ]
    assert found_kernels == [
        ("experts", [1, 1, 1], 400, 2), ("dispatch", [1, 1, 1], 250, 1),
        ("experts", [64, 1, 1], 100, 1), ("copy", [], 10, 1),
    ]  # fmt: skip
    assert found["busy"] == pytest.approx(710 / 1000)


def test_prompts_have_mixed_lengths_and_repeat() -> None:
    found = load.prompts(64, 12, 1)
    assert found == load.prompts(64, 12, 1) != load.prompts(64, 12, 2)
    assert len({len(one) for one in found}) == 12 and min(map(len, found)) == 1
    assert all(3 <= token < 64 for one in found for token in one)
