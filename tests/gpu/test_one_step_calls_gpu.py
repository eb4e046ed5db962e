"""Normal mode's calls in one native step on GPUs, which the other tests' poison keeps away."""

import gpu_pool
from one_step_calls import run_calls


def test_calls_in_one_step_give_what_many_do(num_ranks: int) -> None:
    gpu_pool.shared().run(
        run_calls, num_ranks, "cuda", 24, backend="gloo", devices=range(num_ranks), variables={},
        timeout_s=200,
    )  # fmt: skip
