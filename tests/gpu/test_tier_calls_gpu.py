"""Calls between nodes behind each other on GPUs."""

import gpu_pool
from chained_calls import run_calls


def test_calls_between_nodes_behind_each_other_give_what_they_give_alone(num_ranks: int) -> None:
    num = num_ranks // 2 * 2
    gpu_pool.shared().run(
        run_calls, num, "cuda", 12, num // 2, backend="gloo", devices=range(num), variables={},
        timeout_s=200,
    )  # fmt: skip
