"""Completions over HTTP: streamed, many at once, aborted; times of each."""

from __future__ import annotations

import time

import pytest
from server_stand_ins import (
    BY_NAME,
    answering,
)
from servers import compare, load, offline, serving
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


def test_figures_are_measured_after_two_runs() -> None:
    with answering() as server:
        found = load.measure(Server(server.server_port, 20), [[1], [2, 3]], 4, 8, 2, repeats=2)
        assert len(server.ranks) == 4 * 16 and set(server.ranks) == {"0", "1"}
    assert set(found) == {"tokens_s", "first_ms", "each_ms"}
    assert all(one.mean > 0 for one in found.values())


def test_prompts_have_mixed_lengths_and_repeat() -> None:
    found = load.prompts(64, 12, 1)
    assert found == load.prompts(64, 12, 1) != load.prompts(64, 12, 2)
    assert len({len(one) for one in found}) == 12 and min(map(len, found)) == 1
    assert all(3 <= token < 64 for one in found for token in one)
