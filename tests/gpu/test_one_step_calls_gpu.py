"""Normal mode's calls in one native step on GPUs, which the other tests' poison keeps away."""

import gpu_pool
from one_step_calls import run_calls, run_tier_calls


def test_calls_in_one_step_give_what_many_do(num_ranks: int) -> None:
    gpu_pool.shared().run(
        run_calls, num_ranks, "cuda", 24, backend="gloo", devices=range(num_ranks), variables={},
        timeout_s=200,
    )  # fmt: skip


def test_calls_between_nodes_in_one_step_give_what_many_do(num_ranks: int) -> None:
    num = num_ranks // 2 * 2
    gpu_pool.shared().run(
        run_tier_calls, num, "cuda", 12, num // 2, backend="gloo", devices=range(num), variables={},
        timeout_s=200,
    )  # fmt: skip
