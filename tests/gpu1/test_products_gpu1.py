"""The products of deep_comm.tp between processes that share one GPU: they run in turns."""

from __future__ import annotations

import gpu_cases
import products
import pytest
from collectives import verify
from gpu_cases import on_own_device
from products import METHODS_ON_GPUS, OPS, ProductCase, device_products


def run(num_ranks: int, fn, *args: object) -> list:
    return gpu_cases.run(
        on_own_device, num_ranks, fn, *args, devices=[0] * num_ranks, variables={}, timeout_s=100
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("method", METHODS_ON_GPUS)
@pytest.mark.parametrize("op", OPS)
def test_results_have_the_bits_of_the_reference(op: str, method: str, num_ranks: int) -> None:
    case = ProductCase(num_ranks, device_products(op, method), staging_bytes=8 << 20)
    verify(case, run(num_ranks, products.run_on_gpu, case))


@pytest.mark.parametrize("op", OPS[:2])
def test_fused_products_have_the_bits_of_the_same_product_alone(op: str) -> None:
    pytest.importorskip("triton")
    assert run(2, products.bits_of_fused, op) == [""] * 2


@pytest.mark.parametrize("method", METHODS_ON_GPUS)
@pytest.mark.parametrize("op", OPS)
def test_graphs_are_replayed_between_eager_calls(op: str, method: str) -> None:
    assert run(2, products.replayed, op, method, 20) == [""] * 2


@pytest.mark.parametrize("method", METHODS_ON_GPUS[1:])
def test_late_ranks_are_waited_for_and_absent_ones_are_named(method: str) -> None:
    assert run(2, products.late_and_absent, method) == [""] * 2


def test_fp8_with_scales() -> None:
    assert run(2, products.scaled_on_device) == [""] * 2
