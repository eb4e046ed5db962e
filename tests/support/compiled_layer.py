"""Steps of ExpertParallel in graphs of torch.compile, against eager ones: bodies of one rank, the
same on all targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from layer_cases import LayerCase, build, inputs
from payload import assert_same_bits
from torch import Tensor

from deep_comm import ExpertBatch

Step = Callable[[Tensor, Tensor, Tensor], Tensor]


def scaled(batch: ExpertBatch) -> Tensor:
    """Experts of a compiled graph: everything by device counts and offsets, no loop over rows."""
    row = torch.arange(batch.x.shape[0], device=batch.x.device)
    expert = torch.searchsorted(batch.offsets[1:].long(), row, right=True)
    expert = expert.clamp(max=batch.num_local_experts - 1)
    return batch.x * (1.0 + (batch.first_expert + expert) / 8).unsqueeze(1).to(batch.x.dtype)


@torch.library.custom_op("deep_comm_tests::takes_tiles", mutates_args=())
def takes_tiles(rows: Tensor, tiles: Tensor) -> Tensor:
    """A kernel that the compiler does not look into."""
    return rows.clone()


@takes_tiles.register_fake
def _(rows: Tensor, tiles: Tensor) -> Tensor:
    return rows.new_empty(rows.shape)


takes_tiles.register_autograd(lambda ctx, grad: (grad, None))


def scaled_in_tiles(batch: ExpertBatch) -> Tensor:
    """``scaled``, with a tensor that the compiler may put in the place of the counts, and rows that
    are not contiguous."""
    tiles = (batch.num_tokens_per_expert - 1) // 8
    return takes_tiles(scaled(batch), tiles).t().clone(memory_format=torch.contiguous_format).t()


def scaled_masked(batch: ExpertBatch) -> Tensor:
    assert batch.is_masked
    experts = torch.arange(batch.num_local_experts, device=batch.x.device)
    factors = 1.0 + (batch.first_expert + experts) / 8
    return (batch.masked() * factors.view(-1, 1, 1).to(batch.x.dtype)).view(batch.x.shape)


def compute_of(case: LayerCase) -> Callable[[ExpertBatch], Tensor]:
    return scaled_masked if case.mode == "decode" else scaled


def parts_of(group: Any, case: LayerCase, step: int, device: Any) -> list[Tensor]:
    return [part.to(device) for part in inputs(case, group.rank(), step)]


def equals_eager(group: Any, case: LayerCase, backend: str, device: Any = "cpu") -> list[bool]:
    """Whether each step was a prefill step."""
    compute, results = compute_of(case), []
    with build(group, case, device) as layer, build(group, case, device) as eager, torch.no_grad():

        @torch.compile(backend=backend, fullgraph=True, dynamic=True)
        def step(x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
            return layer(x * 2, idx, weights, compute) + 1

        for number in range(len(case.steps)):
            x, idx, weights = parts_of(group, case, number, device)
            want = (eager(x * 2, idx, weights, compute) + 1).cpu()
            got = step(x, idx, weights).cpu()
            assert_same_bits(got, want, f"step {number}")
            # A compiled step dispatches and combines, an eager one may do so
            # twice; the rule is one.
            assert layer.rule.begins_with_decode == eager.rule.begins_with_decode
            results.append(not layer.rule.begins_with_decode)
        layer.buffer.check()
    return results


def gradients(step: Step, parts: list[Tensor]) -> list[Tensor]:
    """y, and what comes back to x and to the weights."""
    x, idx, weights = parts
    x.requires_grad_()
    weights.requires_grad_()
    y = step(x, idx, weights)
    y.backward(torch.cos(torch.arange(y.numel()).float()).view_as(y).to(y.device, y.dtype))
    return [part.detach().cpu() for part in (y, x.grad, weights.grad)]


def unused_result(group: Any, case: LayerCase, backend: str, device: Any = "cpu") -> None:
    """Two batches that do not depend on each other; the last rank has no use for the second."""
    compute = compute_of(case)
    is_last = group.rank() == group.size() - 1
    with build(group, case, device) as layer, torch.no_grad():

        def step(first: Any, second: Any) -> tuple[Tensor, ...]:
            a = layer(*first, compute)
            b = layer(*second, compute)
            return (a,) if is_last else (a, b)

        parts = [parts_of(group, case, number, device) for number in range(2)]
        want = step(*parts)
        got = torch.compile(step, backend=backend, fullgraph=True)(*parts)
        for number in range(len(got)):
            assert_same_bits(got[number].cpu(), want[number].cpu(), f"batch {number}")
