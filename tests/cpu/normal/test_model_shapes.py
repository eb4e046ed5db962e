"""Every model on docs/guide/shapes.md, in both modes, bit for bit; ranks are threads."""

from __future__ import annotations

import model_shapes
import pytest

from deep_comm import local

pytestmark = pytest.mark.usefixtures("poison")

TOKENS = (3, 0, 5)


@pytest.mark.parametrize("name", model_shapes.MODELS)
def test_rows_and_sums_of_a_known_model(name: str) -> None:
    results = local.run(
        lambda group: model_shapes.run(group, "cpu", name, TOKENS), len(TOKENS), timeout_s=120
    )
    model_shapes.verify(name, TOKENS, results)
