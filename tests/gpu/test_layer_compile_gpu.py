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
from layer_cases import LayerCase, build, inputs
from payload import assert_same_bits
from torch import Tensor

from deep_comm import ExpertBatch, processes

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


def scaled(batch: ExpertBatch) -> Tensor:
    row = torch.arange(batch.x.shape[0], device=batch.x.device)
    expert = torch.searchsorted(batch.offsets[1:].long(), row, right=True)
    expert = expert.clamp(max=batch.num_local_experts - 1)
    return batch.x * (1.0 + (batch.first_expert + expert) / 8).unsqueeze(1).to(batch.x.dtype)


def scaled_masked(batch: ExpertBatch) -> Tensor:
    experts = torch.arange(batch.num_local_experts, device=batch.x.device)
    factors = 1.0 + (batch.first_expert + experts) / 8
    return (batch.masked() * factors.view(-1, 1, 1).to(batch.x.dtype)).view(batch.x.shape)


def parts_of(group: Any, case: LayerCase, step: int) -> list[Tensor]:
    device = torch.device("cuda", group.rank())
    return [part.to(device) for part in inputs(case, group.rank(), step)]


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


def compiled_equals_eager(group: Any, mode: str, backend: str) -> None:
    case = steps_of(group.size(), mode)
    compute = scaled_masked if mode == "decode" else scaled
    device = torch.device("cuda", group.rank())
    with build(group, case, device) as layer, build(group, case, device) as eager, torch.no_grad():

        @torch.compile(backend=backend, fullgraph=True, dynamic=True)
        def step(x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
            return layer(x * 2, idx, weights, compute) + 1

        for number in range(len(case.steps)):
            x, idx, weights = parts_of(group, case, number)
            want = (eager(x * 2, idx, weights, compute) + 1).cpu()
            got = step(x, idx, weights).cpu()
            assert_same_bits(got, want, f"step {number}")
            assert layer.rule.begins_with_decode == eager.rule.begins_with_decode
        layer.buffer.check()


def compiled_gradients(group: Any, backend: str) -> None:
    num_ranks = group.size()
    steps = ((3,) * num_ranks, (0, *(2,) * (num_ranks - 1)))
    case = LayerCase(steps, 8, 4, hidden=256, experts=2 * num_ranks, topk=2, mode="prefill")
    device = torch.device("cuda", group.rank())
    with build(group, case, device) as layer:

        def step(x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
            return layer(x * 1.5, idx, weights, scaled)

        compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
        for number in range(len(case.steps)):
            grads = []
            for run in (step, compiled):
                x, idx, weights = parts_of(group, case, number)
                x.requires_grad_()
                weights.requires_grad_()
                y = run(x, idx, weights)
                y.backward(torch.cos(torch.arange(y.numel())).view_as(y).to(y.device, y.dtype))
                grads.append([part.detach().cpu() for part in (y, x.grad, weights.grad)])
            for name, want, got in zip(("y", "x"), grads[0], grads[1], strict=False):
                assert_same_bits(got, want, f"step {number}: {name}")
            torch.testing.assert_close(grads[1][2], grads[0][2], rtol=1e-2, atol=1e-2)


def unused_result(group: Any, backend: str) -> None:
    num_ranks = group.size()
    case = LayerCase(
        ((3,) * num_ranks, (4,) * num_ranks), 4, 4, hidden=256, experts=2 * num_ranks,
        mode="prefill",
    )  # fmt: skip
    is_last = group.rank() == num_ranks - 1
    with build(group, case, torch.device("cuda", group.rank())) as layer, torch.no_grad():

        def step(first: Any, second: Any) -> tuple[Tensor, ...]:
            a = layer(*first, scaled)
            b = layer(*second, scaled)
            return (a,) if is_last else (a, b)

        parts = [parts_of(group, case, number) for number in range(2)]
        want = step(*parts)
        got = torch.compile(step, backend=backend, fullgraph=True)(*parts)
        for number in range(len(got)):
            assert_same_bits(got[number].cpu(), want[number].cpu(), f"batch {number}")


def compiled(group: Any, backend: str) -> None:
    """A compiled step gives the bits of an eager one, in every mode; its gradients are those of an
    eager one; a call whose result is not used is made."""
    for mode in ("prefill", "decode", "auto"):
        _begin(group, f"{backend}: {mode}")
        compiled_equals_eager(group, mode, backend)
    _begin(group, f"{backend}: gradients")
    compiled_gradients(group, backend)
    _begin(group, f"{backend}: a result that is not used")
    unused_result(group, backend)


def _begin(group: Any, what: str) -> None:
    torch._dynamo.reset()
    if group.rank() == 0:  # shown where a test fails or takes too long
        print(f"{time.monotonic():.0f} s, {what}", flush=True)


@pytest.mark.gpu
@pytest.mark.timeout(280)
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_steps(backend: str, num_ranks: int, tmp_path: Any) -> None:
    on_gpus(compiled, num_ranks, backend, cache=tmp_path)
