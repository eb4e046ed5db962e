"""Completions over HTTP, as OpenAI's API or SGLang's /generate has them: streamed, many at once,
some aborted.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from servers.models import token_of

_LENGTHS = (1, 2, 3, 17, 31, 64, 100, 129, 200, 7, 50, 90)
NUM_LENGTHS = len(_LENGTHS)
# Student's t for 95 % of n measurements, n = 2 to 10.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def prompts(vocab: int, count: int, seed: int, common: int = 0) -> list[list[int]]:
    """Token ids, of mixed lengths. ``common``: so many first ids are the same in all of them."""
    draw = random.Random(seed)
    start = [draw.randrange(3, vocab) for _ in range(common)]
    return [
        start + [draw.randrange(3, vocab) for _ in range(_LENGTHS[index % len(_LENGTHS)])]
        for index in range(count)
    ]


@dataclass(frozen=True)
class Server:
    port: int
    timeout_s: float = 120.0  # of each wait for the server's next bytes
    is_sglang: bool = False  # token ids without a tokenizer: /generate, not OpenAI's API


@dataclass(frozen=True)
class Asked:
    """A completion that is wanted."""

    prompt: int
    ids: list[int]
    tokens: int
    rank: int | None = None  # the data-parallel rank that shall serve it
    abort_after: int | None = None  # close the connection after so many tokens
    is_bare: bool = False  # without log-probabilities


@dataclass
class Answer:
    prompt: int
    ids: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)  # best minus second best log-probability
    aborted: bool = False
    first_s: float = 0.0  # until the first token
    last_s: float = 0.0


class BadAnswer(Exception):
    """The server refused, or ended a completion early."""


def complete(server: Server, asked: Asked) -> Answer:
    """One completion, streamed, greedy. Raises BadAnswer, OSError."""
    path, body = _request(server, asked)
    headers = {"Content-Type": "application/json"}
    if asked.rank is not None:
        headers["X-data-parallel-rank"] = str(asked.rank)
    answer = Answer(asked.prompt, asked.ids)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=server.timeout_s)
    began = time.perf_counter()
    try:
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise BadAnswer(f"prompt {asked.prompt}: {response.status} {response.read(500)!r}")
        for line in response:
            if not line.startswith(b"data: "):
                continue
            text = line.removeprefix(b"data: ").strip()
            if text == b"[DONE]":
                break
            event = json.loads(text)
            if "error" in event:
                raise BadAnswer(f"prompt {asked.prompt}: {event['error']}")
            if server.is_sglang:
                _take_again(answer, event)
            for choice in event.get("choices", ()):
                _take(answer, choice)
            if answer.tokens:
                answer.last_s = time.perf_counter() - began
                answer.first_s = answer.first_s or answer.last_s
            if asked.abort_after is not None and len(answer.tokens) >= asked.abort_after:
                answer.aborted = True
                return answer
    finally:
        connection.close()
    if len(answer.tokens) != asked.tokens:
        raise BadAnswer(f"prompt {asked.prompt}: {len(answer.tokens)} of {asked.tokens} tokens")
    return answer


def _request(server: Server, asked: Asked) -> tuple[str, dict[str, Any]]:
    same: dict[str, Any] = dict(temperature=0, ignore_eos=True)
    if server.is_sglang:
        return "/generate", dict(
            input_ids=asked.ids, sampling_params=same | dict(max_new_tokens=asked.tokens),
            return_logprob=True, top_logprobs_num=2, stream=True,
        )  # fmt: skip
    return "/v1/completions", same | dict(
        model="m", prompt=asked.ids, max_tokens=asked.tokens, stream=True,
        logprobs=None if asked.is_bare else 2, return_token_ids=True, add_special_tokens=False,
    )  # fmt: skip


def _take_again(answer: Answer, event: dict[str, Any]) -> None:
    """SGLang's events have all tokens so far, and [log-probability, id, text] of each."""
    said = event["meta_info"]
    answer.tokens = event["output_ids"]
    answer.logprobs = [one[0] for one in said["output_token_logprobs"]]
    answer.margins = [best[0][0] - best[1][0] for best in said["output_top_logprobs"]]


def _take(answer: Answer, choice: dict[str, Any]) -> None:
    said = choice.get("logprobs") or {}
    ids = choice.get("token_ids")
    if ids is None:
        ids = [token_of(word.strip()) for word in said.get("tokens", ())]
    answer.tokens += ids
    answer.logprobs += said.get("token_logprobs", ())
    for best in said.get("top_logprobs") or ():
        ordered = sorted(best.values(), reverse=True)
        answer.margins.append(ordered[0] - ordered[1] if len(ordered) > 1 else 0.0)


def complete_all(server: Server, wanted: Sequence[Asked], at_once: int) -> list[Answer]:
    """In the order of ``wanted``. Raises what the first that failed raised."""
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda asked: complete(server, asked), wanted))


# ---- figures -------------------------------------------------------------------------------------

# A server's ranks go on with empty steps for a while after the last request.
_REST_S = 0.5


@dataclass(frozen=True)
class Figure:
    """Mean of repeated runs, and half the width of its 95 % interval."""

    mean: float
    half_width: float


def figure(values: Sequence[float]) -> Figure:
    """Raises ValueError unless there are 2 to 10 values."""
    if not 2 <= len(values) <= len(_T95) + 1:
        raise ValueError(f"an interval needs 2 to {len(_T95) + 1} runs, not {len(values)}")
    spread = statistics.stdev(values) / math.sqrt(len(values))
    return Figure(statistics.fmean(values), _T95[len(values) - 2] * spread)


def put_on(
    server: Server, ids: list[list[int]], tokens: int, num_clients: int, num_ranks: int
) -> list[Answer]:
    """Clients that each ask for two completions, one after the other; a lone one for four.

    A client's are served by one rank, so that all ranks have equally many at any time; a lone
    client's by one rank after the other.
    """

    def ask(client: int) -> list[Answer]:
        answers = []
        for turn in range(2 if num_clients > 1 else 4):
            index = client + turn * num_clients
            rank = (client if num_clients >= num_ranks else index) % num_ranks
            wanted = Asked(index, ids[index % len(ids)], tokens, rank, is_bare=True)
            answers.append(complete(server, wanted))
        return answers

    with concurrent.futures.ThreadPoolExecutor(num_clients) as pool:
        return [answer for answers in pool.map(ask, range(num_clients)) for answer in answers]


def measure(
    servers: Sequence[Server],
    ids: list[list[int]],
    tokens: int,
    num_clients: int,
    num_ranks: int,
    repeats: int,
) -> list[dict[str, Figure]]:
    """Rates and times of servers under the same load, measured in turn.

    tokens_s: tokens of all per second. first_ms: median time to the first token. each_ms: median
    time per token after it. gain: tokens_s beside the first server's, turn by turn. The first two
    turns are not counted: kernels compile.
    """
    kept: list[dict[str, list[float]]] = [
        dict(tokens_s=[], first_ms=[], each_ms=[], gain=[]) for _ in servers
    ]
    for turn in range(repeats + 2):
        for server, values in zip(servers, kept, strict=True):
            began = time.perf_counter()
            answers = put_on(server, ids, tokens, num_clients, num_ranks)
            seconds = time.perf_counter() - began
            time.sleep(_REST_S)
            if turn < 2:
                continue
            values["tokens_s"].append(sum(len(one.tokens) for one in answers) / seconds)
            values["first_ms"].append(1e3 * statistics.median(one.first_s for one in answers))
            each = [(one.last_s - one.first_s) / (len(one.tokens) - 1) for one in answers]
            values["each_ms"].append(1e3 * statistics.median(each))
            values["gain"].append(values["tokens_s"][-1] / kept[0]["tokens_s"][-1])
    return [{name: figure(every) for name, every in values.items()} for values in kept]
