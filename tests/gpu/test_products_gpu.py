"""The products of deep_comm.tp between GPUs, in CUDA graphs as well."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import gpu_cases
import products
import pytest
from collectives import verify
from gpu_cases import on_own_device
from products import METHODS_ON_GPUS, OPS, Product, ProductCase, device_products

from deep_comm.trace import picture

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


def test_the_bench_traces_what_overlaps(tmp_path: Path) -> None:
    """The last of a few calls, way by way. The rest of it: test_bench.py, test_examples.py."""
    command = [sys.executable, "-m", "deep_comm.bench", "--mode", "tp", "--ranks", "2"]
    command += ["--tokens", "1024", "--divide", "2", "--ops", "down", "--iterations", "2"]
    command += ["--rounds", "1", "--trace", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0 and "equal calls" not in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "down-1024.png").exists() or picture.MISSING in done.stdout
    spans = {it.stem: picture.device_spans(it) for it in tmp_path.glob("*.json")}
    assert {"down-1024-fused", "down-1024-decomposed", "down-1024-cuBLAS-+-NCCL"} <= spans.keys()
    assert any(it.is_communication for it in spans["down-1024-cuBLAS-+-NCCL"])
    assert not any(it.is_communication for it in spans["down-1024-product-alone"])
