"""The products of deep_comm.tp between processes that share one GPU: they run in turns."""

from __future__ import annotations

import gpu_pool
import pytest
import torch
from products import (
    METHODS_ON_GPUS,
    OPS,
    ProductCase,
    bits_of_fused,
    device_products,
    late_and_absent,
    replayed,
    run_case,
    scaled_on_device,
    verify,
)


def run(fn, num_ranks: int, *args: object) -> list:
    return gpu_pool.shared().run(fn, num_ranks, *args, devices=[0] * num_ranks, timeout_s=100)


def on_device(group, case: ProductCase) -> list[torch.Tensor]:
    return run_case(group, case, device=torch.device("cuda", 0), timeout_s=30)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("method", METHODS_ON_GPUS)
@pytest.mark.parametrize("op", OPS)
def test_results_have_the_bits_of_the_reference(op: str, method: str, num_ranks: int) -> None:
    case = ProductCase(num_ranks, device_products(op, method), staging_bytes=4 << 20)
    verify(case, run(on_device, num_ranks, case))


@pytest.mark.parametrize("op", OPS[:2])
def test_fused_products_have_the_bits_of_the_same_product_alone(op: str) -> None:
    pytest.importorskip("triton")
    assert run(bits_of_fused, 2, op, 0) == [""] * 2


@pytest.mark.parametrize("method", METHODS_ON_GPUS)
@pytest.mark.parametrize("op", OPS)
def test_graphs_are_replayed_between_eager_calls(op: str, method: str) -> None:
    assert run(replayed, 2, op, method, 0, 20) == [""] * 2


@pytest.mark.parametrize("method", METHODS_ON_GPUS[1:])
def test_late_ranks_are_waited_for_and_absent_ones_are_named(method: str) -> None:
    assert run(late_and_absent, 2, method, 0) == [""] * 2


def test_fp8_with_scales() -> None:
    assert run(scaled_on_device, 2, 0) == [""] * 2
