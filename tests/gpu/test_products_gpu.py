"""The products of deep_comm.tp between GPUs, in CUDA graphs as well."""

from __future__ import annotations

import gpu_pool
import pytest
import torch
from products import (
    METHODS_ON_GPUS,
    OPS,
    Product,
    ProductCase,
    bits_of_fused,
    device_products,
    late_and_absent,
    replayed,
    run_case,
    scaled_on_device,
    verify,
)

REPLAYS = 1000


def run(fn, num_ranks: int, *args: object) -> list:
    return gpu_pool.shared().run(fn, num_ranks, *args, devices=range(num_ranks), timeout_s=100)


def on_device(group, case: ProductCase) -> list[torch.Tensor]:
    device = torch.device("cuda", torch.cuda.current_device())
    return run_case(group, case, device=device, timeout_s=30)


def on_own(group, fn, *args: object) -> str:
    """``fn`` with this rank's device."""
    return fn(group, *args[:-1], torch.cuda.current_device(), *args[-1])


@pytest.mark.parametrize("method", METHODS_ON_GPUS)
@pytest.mark.parametrize("op", OPS)
def test_results_have_the_bits_of_the_reference(op: str, method: str, num_ranks: int) -> None:
    large = (Product(op, method, 2048, 512, 1024),)
    products = (*device_products(op, method), *large, *large)
    case = ProductCase(num_ranks, products, staging_bytes=64 << 20)
    verify(case, run(on_device, num_ranks, case))


@pytest.mark.parametrize("op", OPS[:2])
def test_fused_products_have_the_bits_of_the_same_product_alone(op: str, num_ranks: int) -> None:
    pytest.importorskip("triton")
    assert run(on_own, num_ranks, bits_of_fused, op, ()) == [""] * num_ranks


@pytest.mark.parametrize("method", METHODS_ON_GPUS)
@pytest.mark.parametrize("op", OPS)
def test_graphs_are_replayed_between_eager_calls(op: str, method: str, num_ranks: int) -> None:
    assert run(on_own, num_ranks, replayed, op, method, (REPLAYS,)) == [""] * num_ranks


@pytest.mark.parametrize("method", METHODS_ON_GPUS[1:])
def test_late_ranks_are_waited_for_and_absent_ones_are_named(method: str) -> None:
    assert run(on_own, 2, late_and_absent, method, ()) == [""] * 2


def test_fp8_with_scales() -> None:
    assert run(on_own, 2, scaled_on_device, ()) == [""] * 2
