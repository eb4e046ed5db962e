"""The products of deep_comm.tp between GPUs, in CUDA graphs as well."""

from __future__ import annotations

import functools

import gpu_cases
import products
import pytest
from collectives import verify
from gpu_cases import on_own_device
from products import METHODS_ON_GPUS, OPS, Product, ProductCase, device_products

REPLAYS = 1000

run = functools.partial(gpu_cases.run, on_own_device, variables={}, timeout_s=100)


@pytest.mark.parametrize("method", METHODS_ON_GPUS)
@pytest.mark.parametrize("op", OPS)
def test_results_have_the_bits_of_the_reference(op: str, method: str, num_ranks: int) -> None:
    large = (Product(op, method, 2048, 512, 1024),)
    of_case = (*device_products(op, method), *large, *large)
    case = ProductCase(num_ranks, of_case, staging_bytes=128 << 20)
    verify(case, run(num_ranks, products.run_on_gpu, case))


@pytest.mark.parametrize("op", OPS[:2])
def test_fused_products_have_the_bits_of_the_same_product_alone(op: str, num_ranks: int) -> None:
    pytest.importorskip("triton")
    assert run(num_ranks, products.bits_of_fused, op) == [""] * num_ranks


@pytest.mark.parametrize("method", METHODS_ON_GPUS)
@pytest.mark.parametrize("op", OPS)
def test_graphs_are_replayed_between_eager_calls(op: str, method: str, num_ranks: int) -> None:
    assert run(num_ranks, products.replayed, op, method, REPLAYS) == [""] * num_ranks


@pytest.mark.parametrize("method", METHODS_ON_GPUS[1:])
def test_late_ranks_are_waited_for_and_absent_ones_are_named(method: str) -> None:
    assert run(2, products.late_and_absent, method) == [""] * 2


def test_fp8_with_scales() -> None:
    assert run(2, products.scaled_on_device) == [""] * 2
