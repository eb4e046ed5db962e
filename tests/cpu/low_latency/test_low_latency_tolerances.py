"""What rounding costs a pair of dispatch and combine, by the measure and within the bounds of
DeepEP's own tests. How each rounds is checked bit by bit elsewhere (test_low_latency.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drop_in import dequantised
from torch import Tensor

from deep_comm import Buffer, local

TOKENS, HIDDEN, EXPERTS, TOPK, RANKS = 16, 1024, 32, 8, 4
BFLOAT16_BOUND, FP8_BOUND = 1e-5, 9e-4


def difference(x: Tensor, y: Tensor) -> float:
    """1 - 2 x.y / (x.x + y.y), of float64 values moved up by one."""
    x, y = x.double() + 1, y.double() + 1
    return 1 - float(2 * (x * y).sum() / (x * x + y * y).sum())


@pytest.mark.parametrize("options", [{}, {"use_logfmt": True}, {"one_rounding": True}], ids=str)
@pytest.mark.parametrize(
    ("form", "bound"),
    [
        ({"use_fp8": False}, BFLOAT16_BOUND),
        ({}, FP8_BOUND),
        ({"round_scale": True}, FP8_BOUND),
        ({"round_scale": True, "use_ue8m0": True}, FP8_BOUND),
    ],
    ids=str,
)
def test_a_pair_stays_within_the_tolerances_of_deep_ep(
    form: dict[str, Any], bound: float, options: dict[str, Any]
) -> None:
    def main(group: local.ThreadGroup) -> float:
        num_bytes = Buffer.get_low_latency_rdma_size_hint(4 * TOKENS, HIDDEN, RANKS, EXPERTS)
        generator = torch.Generator().manual_seed(group.rank())
        x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
        idx = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOPK)[1]
        idx[torch.rand(TOKENS, TOPK, generator=generator) < 0.1] = -1
        weights = torch.randn(TOKENS, TOPK, generator=generator).abs()
        with Buffer(group, 0, num_bytes, low_latency_mode=True, device="cpu") as buffer:
            rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, TOKENS, EXPERTS, **form)
            if isinstance(rows, tuple):
                rows = dequantised(*rows).bfloat16()
            combined, _, _ = buffer.low_latency_combine(rows, idx, weights, handle, **options)
        exact = x.double() * (weights * (idx >= 0)).sum(1, keepdim=True)
        return difference(combined, exact)

    found = local.run(main, RANKS, timeout_s=60)
    assert max(found) < bound, found
