"""test_model_shapes.py on GPUs."""

from typing import Any

import gpu_cases
import model_shapes
import pytest
import torch

TOKENS = (5, 0, 8, 3, 4, 1, 7, 2)


def _on_its_device(group: Any, name: str, tokens: tuple[int, ...]) -> tuple[list, list]:
    return model_shapes.run(group, name, tokens, torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.parametrize("name", model_shapes.MODELS)
def test_rows_and_sums_of_a_known_model(num_ranks: int, name: str) -> None:
    tokens = TOKENS[:num_ranks]
    results = gpu_cases.run(_on_its_device, num_ranks, name, tokens)
    model_shapes.verify(name, tokens, results)
