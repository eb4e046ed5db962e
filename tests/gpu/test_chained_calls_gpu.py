"""Calls one after the other and on several streams."""

import gpu_pool
from chained_calls import run_calls


def test_calls_give_what_each_gives_alone(num_ranks: int) -> None:
    gpu_pool.shared().run(
        run_calls, num_ranks, "cuda", 24, backend="gloo", devices=range(num_ranks), variables={},
        timeout_s=200,
    )  # fmt: skip
