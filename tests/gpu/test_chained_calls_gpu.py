"""Calls one after the other and on several streams."""

import functools

import gpu_cases
from chained_calls import run_calls

run = functools.partial(gpu_cases.run, variables={}, timeout_s=200)


def test_calls_give_what_each_gives_alone(num_ranks: int) -> None:
    run(run_calls, num_ranks, "cuda", 24)


def test_calls_between_nodes_give_what_each_gives_alone(num_ranks: int) -> None:
    num = num_ranks // 2 * 2
    run(run_calls, num, "cuda", 12, num // 2)
