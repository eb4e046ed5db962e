"""tests/cpu/test_model_shapes.py on GPUs, with more tokens."""

from typing import Any

import gpu_cases
import model_shapes
import torch

TOKENS = (37, 0, 64, 5, 19, 1, 48, 30)


def _all_models(group: Any) -> list:
    device, tokens = torch.device("cuda", torch.cuda.current_device()), TOKENS[: group.size()]
    return [model_shapes.run(group, name, tokens, device) for name in model_shapes.MODELS]


def test_rows_and_sums_of_the_known_models(num_ranks: int) -> None:
    results = gpu_cases.run(_all_models, num_ranks)
    for number, name in enumerate(model_shapes.MODELS):
        model_shapes.verify(name, TOKENS[:num_ranks], [of_rank[number] for of_rank in results])
