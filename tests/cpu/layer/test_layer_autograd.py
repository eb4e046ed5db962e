"""Gradients through ExpertParallel: against the reference's bits and against one process."""

import copy
import random
from typing import Any

import forked
import pytest
import torch
from layer_cases import LayerCase, build, expert, expert_backward, inputs
from payload import assert_same_bits
from schedules import some_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deep_comm import ExpertBatch, local
from deep_comm.reference import layer as reference_layer

DTYPES = (torch.bfloat16, torch.float32)

pytestmark = pytest.mark.usefixtures("poison")


class _Expert(torch.autograd.Function):
    """layer_cases.expert, with layer_cases.expert_backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, idx: int) -> Tensor:
        ctx.idx = idx
        return expert(idx, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return expert_backward(ctx.idx, grad), None


def compute(batch: ExpertBatch) -> Tensor:
    return batch.map(lambda idx, rows: _Expert.apply(rows, idx))


def compute_everywhere(batch: ExpertBatch) -> Tensor:
    """The same with counts on the device."""
    rows = []
    for local_idx in range(batch.num_local_experts):
        first = int(batch.offsets[local_idx])
        end = int(batch.offsets[local_idx + 1])
        rows.append(_Expert.apply(batch.x[first:end], batch.first_expert + local_idx))
    rows.append(batch.x[int(batch.offsets[-1]) :])
    return torch.cat(rows)


def grad_of(case: LayerCase, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(((case.seed * 8 + rank) * 64 + step) * 2 + 1)
    return torch.randn(case.steps[step][rank], case.hidden, generator=generator).to(case.dtype)


def gradients(group: Any, case: LayerCase) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(y, gradient of x, of weights) of each step."""
    results = []
    with build(group, case) as layer:
        rank = layer.buffer.rank
        for step in range(len(case.steps)):
            x, idx, weights = inputs(case, rank, step)
            x.requires_grad_()
            weights.requires_grad_()
            if case.how == "async":
                with layer.dispatch_async(x, idx, weights, bounded=case.bounded) as sent:
                    pass
                batch = sent.result()
                y = layer.combine_async(batch, compute(batch)).result()
            else:
                y = layer(
                    x, idx, weights, compute_everywhere if case.bounded else compute,
                    bounded=case.bounded,
                )  # fmt: skip
            y.backward(grad_of(case, rank, step))
            results.append((y.detach(), x.grad, weights.grad))
    return results


def verify(case: LayerCase, results: Any) -> None:
    for step in range(len(case.steps)):
        for rank in range(case.num_ranks):
            x, idx, weights = inputs(case, rank, step)
            y, grad_x, grad_weights = results[rank][step]
            want_x, want_weights = reference_layer.gradients(
                grad_of(case, rank, step), x, idx, weights, case.experts, case.num_ranks, expert,
                expert_backward,
            )  # fmt: skip
            assert_same_bits(grad_x, want_x, f"step {step} rank {rank}: gradient of x")
            assert torch.allclose(grad_weights, want_weights, rtol=1e-5, atol=1e-3), (step, rank)


def sampled(seed: int) -> LayerCase:
    choose = random.Random(seed)
    num_ranks = choose.choice((1, 2, 3, 4, 8))
    bounded = choose.random() < 0.3
    return LayerCase(
        tuple(tuple(choose.choice((0, 1, 5, 12)) for _ in range(num_ranks)) for _ in range(2)),
        max_tokens=12, decode_tokens=4, hidden=choose.choice((8, 40, 128)),
        experts=choose.choice((1, 3, 8, 19)), topk=choose.choice((1, 2, 5)),
        routing=choose.choice(("random", "skewed", "holes", "one_expert", "none", "duplicates")),
        dtype=choose.choice(DTYPES),
        mode="prefill" if bounded else choose.choice(("prefill", "auto")),
        alignment=choose.choice((1, 8)), bounded=bounded,
        how=choose.choice(("forward", "async")) if not bounded else "forward", seed=seed,
    )  # fmt: skip


def test_gradients_have_the_bits_of_the_reference() -> None:
    for seed in some_of(range(40)):
        case = sampled(seed)
        try:
            verify(case, local.run(lambda group, c=case: gradients(group, c), case.num_ranks))
        except Exception as error:
            raise AssertionError(f"seed {seed}, {case}: {error}") from error


def test_ranks_may_be_processes() -> None:
    case = LayerCase(((3, 9, 0), (2, 2, 2)), 9, 3, hidden=128, topk=3, mode="prefill")
    verify(case, forked.run(gradients, 3, case, timeout_s=100))


# ---- modules with weights ---------------------------------------------------------------------

HIDDEN, EXPERTS, TOPK, RANKS = 32, 6, 2, 3


class MoE(nn.Module):
    """A gate and two-layer experts; with a layer, only this rank's experts are used."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        # Ranks that are threads share torch's own generator.
        generator = torch.Generator().manual_seed(11)

        def parameter(*shape: int, scale: float) -> nn.Parameter:
            return nn.Parameter((torch.randn(shape, generator=generator) * scale).to(dtype))

        self.gate = parameter(HIDDEN, EXPERTS, scale=0.18)
        self.up = parameter(EXPERTS, HIDDEN, 2 * HIDDEN, scale=0.16)
        self.down = parameter(EXPERTS, 2 * HIDDEN, HIDDEN, scale=0.12)

    def expert(self, idx: int, rows: Tensor) -> Tensor:
        return torch.relu(rows @ self.up[idx]) @ self.down[idx]

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, idx = (x @ self.gate).float().softmax(-1).topk(TOPK)
        return idx, weights

    def alone(self, x: Tensor) -> Tensor:
        """All experts in this process, no communication."""
        idx, weights = self.route(x)
        rows = torch.stack([self.expert(e, x) for e in range(EXPERTS)], dim=1)  # [T, E, H]
        picked = rows.gather(1, idx.unsqueeze(2).expand(-1, -1, HIDDEN))
        return (picked.float() * weights.unsqueeze(2)).sum(1).to(x.dtype)

    def parallel(self, layer: Any, x: Tensor) -> Tensor:
        idx, weights = self.route(x)
        return layer(x, idx, weights, lambda batch: batch.map(self.expert))


def tokens_of(rank: int, dtype: torch.dtype, batch: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * batch + rank)
    return torch.randn((5, 0, 8)[rank], HIDDEN, generator=generator).to(dtype)


def _alone(dtype: torch.dtype, num_batches: int = 1) -> tuple[list[Tensor], dict[str, Tensor]]:
    model = MoE(dtype)
    x_grads = []
    for rank in range(RANKS):
        for batch in range(num_batches):
            x = tokens_of(rank, dtype, batch).requires_grad_()
            (model.alone(x).float() ** 2).sum().backward()
            x_grads.append(x.grad)
    return x_grads, {name: p.grad for name, p in model.named_parameters()}


def _check_against_one_process(how: str, dtype: torch.dtype) -> None:
    num_batches = 2 if how == "two batches" else 1

    def main(group: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
        model, rank = MoE(dtype), group.rank()
        case = LayerCase(
            ((1,) * RANKS,), 8, 2, hidden=HIDDEN, experts=EXPERTS, topk=TOPK, dtype=dtype
        )
        xs = [tokens_of(rank, dtype, batch).requires_grad_() for batch in range(num_batches)]
        with build(group, case) as layer:
            if how == "checkpoint" or how == "reentrant checkpoint":
                ys = [
                    checkpoint(
                        model.parallel, layer, xs[0], use_reentrant=how == "reentrant checkpoint"
                    )
                ]
            elif how == "two batches":
                # Both are on their way before either is back.
                routed = [model.route(x) for x in xs]
                sent = [layer.dispatch_async(x, *r) for x, r in zip(xs, routed, strict=True)]
                batches = [pending.result() for pending in sent]
                back = [layer.combine_async(b, b.map(model.expert)) for b in batches]
                ys = [pending.result() for pending in back]
            else:
                ys = [model.parallel(layer, xs[0])]
            sum((y.float() ** 2).sum() for y in ys).backward()
        return [x.grad for x in xs], {name: p.grad for name, p in model.named_parameters()}

    results = local.run(main, RANKS, timeout_s=60)
    expected_x, expected = _alone(dtype, num_batches)
    tolerance = dict(rtol=1e-4, atol=1e-4) if dtype == torch.float32 else dict(rtol=0.05, atol=0.1)
    got_x = [grad for grads, _ in results for grad in grads]
    for got, want in zip(got_x, expected_x, strict=True):
        assert torch.allclose(got.float(), want.float(), **tolerance), (got - want).abs().max()
    for name, want in expected.items():
        # Every rank has the gradients of its experts, and its tokens' part of the gate's.
        got = sum(grads[name].float() for _, grads in results if grads[name] is not None)
        difference = (got - want.float()).abs().max()
        assert torch.allclose(got, want.float(), **tolerance), (name, difference)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["plain", "checkpoint", "reentrant checkpoint", "two batches"])
def test_gradients_are_those_of_one_process(how: str, dtype: torch.dtype) -> None:
    _check_against_one_process(how, dtype)


def test_finite_differences_agree_in_float32() -> None:
    """Of the sum of all ranks' outputs, moved along a random direction on every rank."""
    case = LayerCase(((4, 2),), 8, 2, hidden=16, experts=4, dtype=torch.float32, mode="prefill")

    def smooth(batch: ExpertBatch) -> Tensor:
        return batch.map(lambda idx, rows: torch.tanh(rows * (0.5 + idx / 8)))

    def main(group: Any) -> tuple[float, list[float]]:
        x, idx, weights = inputs(case, group.rank(), 0)
        x = x.clamp(-2, 2)
        generator = torch.Generator().manual_seed(group.rank())
        along_x = torch.randn(x.shape, generator=generator)
        along_weights = torch.randn(weights.shape, generator=generator)
        with build(group, case) as layer:
            values = []
            for step in (-1e-2, 1e-2):
                with torch.no_grad():
                    moved = layer(x + step * along_x, idx, weights + step * along_weights, smooth)
                values.append(float(moved.double().sum()))
            x.requires_grad_()
            weights.requires_grad_()
            layer(x, idx, weights, smooth).sum().backward()
            slope = float((x.grad * along_x).sum() + (weights.grad * along_weights).sum())
        return slope, values

    results = local.run(main, 2, timeout_s=30)
    for slope, (low, high) in results:
        assert abs((high - low) / 2e-2 - slope) < 2e-2 * max(1.0, abs(slope)), (slope, low, high)


def test_a_model_with_the_layer_can_be_copied_and_trained() -> None:
    def main(group: Any) -> list[float]:
        case = LayerCase(((1,) * RANKS,), 8, 2, hidden=HIDDEN, experts=EXPERTS, dtype=torch.float32)
        with build(group, case) as layer:
            model = MoE(torch.float32)
            model.layer = layer
            model = copy.deepcopy(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
            x = tokens_of(group.rank(), torch.float32)
            losses = []
            for _ in range(8):
                optimizer.zero_grad()
                loss = ((model.parallel(model.layer, x) - 1) ** 2).sum()
                loss.backward()
                optimizer.step()
                losses.append(float(loss))
            return losses

    for losses in local.run(main, RANKS, timeout_s=60):
        assert losses[-1] < 0.8 * losses[0] or losses[0] == 0, losses
