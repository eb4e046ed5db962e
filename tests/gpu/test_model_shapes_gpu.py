"""test_model_shapes.py on GPUs."""

import model_shapes
import pytest
from gpu_cases import on_own_device, run

TOKENS = (5, 0, 8, 3, 4, 1, 7, 2)


@pytest.mark.parametrize("name", model_shapes.MODELS)
def test_rows_and_sums_of_a_known_model(num_ranks: int, name: str) -> None:
    tokens = TOKENS[:num_ranks]
    results = run(on_own_device, num_ranks, model_shapes.run, name, tokens)
    model_shapes.verify(name, tokens, results)
