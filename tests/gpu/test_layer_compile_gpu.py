"""test_layer_compile.py on GPUs: eager graphs and inductor's kernels; every rank is a process.

Started for each backend: what a compiler keeps in a process would outlive a pool's test, and a
process that compiles takes long to start.
"""

import importlib.util
import shutil
import time
from typing import Any

import pytest
import torch
from compiled_layer import equals_eager, gradients, parts_of, scaled, unused_result
from layer_cases import LayerCase, build
from payload import assert_same_bits
from torch import Tensor

from deep_comm import processes

CAN_INDUCE = importlib.util.find_spec("triton") is not None and shutil.which("g++") is not None
BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor", marks=pytest.mark.skipif(not CAN_INDUCE, reason="inductor needs triton and g++")
    ),
]


def on_gpus(fn: Any, num_ranks: int, *args: object, cache: Any) -> list[Any]:
    variables = {
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        # Every rank compiles a few small kernels: a pool of processes would take longer to start.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "DEEP_COMM_POISON": "1",
    }
    return processes.run(
        fn, num_ranks, *args, devices=range(num_ranks), variables=variables, timeout_s=270
    )


def steps_of(num_ranks: int, mode: str) -> LayerCase:
    """Ranks without tokens, and for auto a step that is too large for decode, among them."""
    many = 4 if mode == "decode" else 9
    first = (
        tuple(range(3, 3 - num_ranks, -1))
        if num_ranks < 4
        else (3, 1, 0, 4, *(2,) * (num_ranks - 4))
    )
    steps = (first, tuple(reversed(first)), (many, *(0,) * (num_ranks - 1)), (2,) * num_ranks)
    return LayerCase(steps, many, 4, hidden=256, experts=3 * num_ranks, topk=2, mode=mode)


def compiled_gradients(group: Any, backend: str, device: torch.device) -> None:
    num_ranks = group.size()
    steps = ((3,) * num_ranks, (0, *(2,) * (num_ranks - 1)))
    case = LayerCase(steps, 8, 4, hidden=256, experts=2 * num_ranks, topk=2, mode="prefill")
    with build(group, case, device) as layer:

        def step(x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
            return layer(x * 1.5, idx, weights, scaled)

        compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
        for number in range(len(case.steps)):
            want, got = (
                gradients(run, parts_of(group, case, number, device)) for run in (step, compiled)
            )
            assert_same_bits(got[0], want[0], f"step {number}: y")
            assert_same_bits(got[1], want[1], f"step {number}: x")
            torch.testing.assert_close(got[2], want[2], rtol=1e-2, atol=1e-2)


def compiled(group: Any, backend: str) -> None:
    """A compiled step gives the bits of an eager one, in every mode; its gradients are those of an
    eager one; a call whose result is not used is made."""
    num_ranks, device = group.size(), torch.device("cuda", group.rank())
    for mode in ("prefill", "decode", "auto"):
        _begin(group, f"{backend}: {mode}")
        equals_eager(group, steps_of(num_ranks, mode), backend, device)
    _begin(group, f"{backend}: gradients")
    compiled_gradients(group, backend, device)
    _begin(group, f"{backend}: a result that is not used")
    case = LayerCase(
        ((3,) * num_ranks, (4,) * num_ranks), 4, 4, hidden=256, experts=2 * num_ranks,
        mode="prefill",
    )  # fmt: skip
    unused_result(group, case, backend, device)


def _begin(group: Any, what: str) -> None:
    torch._dynamo.reset()
    if group.rank() == 0:  # shown where a test fails or takes too long
        print(f"{time.monotonic():.0f} s, {what}", flush=True)


@pytest.mark.gpu
@pytest.mark.timeout(280)
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_steps(backend: str, num_ranks: int, tmp_path: Any) -> None:
    on_gpus(compiled, num_ranks, backend, cache=tmp_path)
