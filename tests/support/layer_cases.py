"""ExpertParallel on every rank against deep_comm.reference.layer, bit for bit."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from cases import Case, make_topk_idx
from payload import assert_same_bits
from torch import Tensor

import deep_comm
from deep_comm.reference import layer as reference_layer
from deep_comm.reference.low_latency import quantise


@dataclass(frozen=True)
class LayerCase:
    """``len(steps)`` steps; steps[i][r]: tokens of rank r."""

    steps: tuple[tuple[int, ...], ...]
    max_tokens: int
    decode_tokens: int
    hidden: int = 64
    experts: int = 8
    topk: int = 2
    routing: str = "random"
    idx_dtype: torch.dtype = torch.int64
    dtype: torch.dtype = torch.bfloat16
    mode: str = "auto"
    alignment: int = 1
    bounded: bool = False
    how: str = "forward"  # "split", "async", "shared", or "mixed": another way every step
    seed: int = 0
    fp8: bool = field(default=False)
    ranks_per_node: int | None = None

    @property
    def num_ranks(self) -> int:
        return len(self.steps[0])


def expert(idx: int, rows: Tensor) -> Tensor:
    """Each element by itself, so that no order of additions hides in it; not linear in idx."""
    factor = 1.0 + ((idx * 37) % 11) / 8
    return (rows.float() * factor - (idx % 3)).to(rows.dtype)


def expert_backward(idx: int, grads: Tensor) -> Tensor:
    return (grads.float() * (1.0 + ((idx * 37) % 11) / 8)).to(grads.dtype)


def shared(x: Tensor) -> Tensor:
    return (x.float() * 0.75).to(x.dtype)


def inputs(case: LayerCase, rank: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    count = case.steps[step][rank]
    generator = torch.Generator().manual_seed((case.seed * 64 + rank) * 256 + step)
    x = torch.randn(count, case.hidden, generator=generator)
    x *= torch.exp2(torch.randint(-6, 7, (count, 1), generator=generator).float())
    routing = Case(
        case.steps[step], experts=case.experts, topk=case.topk, routing=case.routing,
        idx_dtype=case.idx_dtype, seed=case.seed,
    )  # fmt: skip
    weights = torch.rand(count, case.topk, generator=generator)
    return x.to(case.dtype), make_topk_idx(routing, rank, step), weights


def build(group: Any, case: LayerCase, device: Any = "cpu", **options: Any) -> Any:
    return deep_comm.ExpertParallel(
        group, hidden=case.hidden, num_experts=case.experts, num_topk=case.topk,
        max_tokens=case.max_tokens, decode_tokens=case.decode_tokens, mode=case.mode,
        dtype=case.dtype, fp8=case.fp8, expert_alignment=case.alignment, device=device,
        ranks_per_node=case.ranks_per_node, **{"timeout_s": 60.0, **options},
    )  # fmt: skip


class Experts:
    """Counts how it is called, and checks what it is given."""

    def __init__(self) -> None:
        self.modes: list[str] = []

    def __call__(self, batch: deep_comm.ExpertBatch) -> Tensor:
        self.modes.append(batch.mode)
        check_batch(batch)
        if batch.scales is not None:
            batch = dataclasses.replace(batch, x=wide(batch.x, batch.scales), scales=None)
        if batch.counts is not None or batch.is_masked:
            return batch.map(expert)
        # Counts on the device only: every row by the expert of its group.
        rows = torch.zeros_like(batch.x)
        for local in range(batch.num_local_experts):
            first = int(batch.offsets[local])
            span = slice(first, first + int(batch.num_tokens_per_expert[local]))
            rows[span] = expert(batch.first_expert + local, batch.x[span])
        return rows


def wide(rows: Tensor, scales: Tensor) -> Tensor:
    """bfloat16, of FP8 rows; the same of padding, which may hold anything."""
    assert rows.dtype == torch.float8_e4m3fn and scales.shape == (len(rows), rows.shape[1] // 128)
    return (rows.float() * scales.repeat_interleave(128, dim=1)).bfloat16()


def check_batch(batch: deep_comm.ExpertBatch) -> None:
    counts, offsets = batch.num_tokens_per_expert.tolist(), batch.offsets.tolist()
    assert offsets[0] == 0 and len(offsets) == len(counts) + 1
    for local, count in enumerate(counts):
        assert offsets[local] % batch.alignment == 0
        assert offsets[local] + count <= offsets[local + 1] <= batch.x.shape[0]
    if batch.counts is not None:
        aligned = [-(-count // batch.alignment) * batch.alignment for count in counts]
        assert list(batch.counts) == aligned
        assert offsets[-1] == batch.x.shape[0]
    mask = batch.mask()
    assert int(mask.sum()) == sum(counts)
    if not batch.is_masked and batch.scales is None:
        padding = batch.x[~mask]
        assert torch.equal(padding, torch.zeros_like(padding))


def run(group: Any, case: LayerCase, device: Any = "cpu") -> list[tuple[Tensor, list[str]]]:
    """(y, modes that experts saw) of each step on one rank."""
    results = []
    with build(group, case, device) as layer, torch.no_grad():
        for step in range(len(case.steps)):
            x, idx, weights = (
                part.to(layer.buffer.device) for part in inputs(case, layer.buffer.rank, step)
            )
            experts = Experts()
            how = case.how
            if how == "mixed":
                how = ("forward", "split", "async", "shared")[(step + case.seed) % 4]
            y = one_step(layer, how, x, idx, weights, experts, case.bounded)
            results.append((y.cpu(), experts.modes))
    return results


def one_step(
    layer: Any, how: str, x: Tensor, idx: Tensor, weights: Tensor, experts: Any, bounded: bool
) -> Tensor:
    if how == "forward":
        return layer(x, idx, weights, experts, bounded=bounded)
    if how == "shared":
        y = layer(x, idx, weights, experts, bounded=bounded, shared=shared)
        return y
    if how == "split":
        batch = layer.dispatch(x, idx, weights, bounded=bounded)
        return layer.combine(batch, experts(batch))
    with layer.dispatch_async(x, idx, weights, bounded=bounded) as sent:
        pass
    with layer.combine_async(sent.result(), experts(sent.result())) as returning:
        pass
    return returning.result()


def reference_sums(case: LayerCase, step: int) -> list[Tensor]:
    """By rank, of experts that are called with rows as they were sent."""
    parts = zip(*(inputs(case, rank, step) for rank in range(case.num_ranks)), strict=True)
    return reference_layer.expert_parallel(*parts, case.experts, expert, case.ranks_per_node)


def verify(case: LayerCase, results: Sequence[Sequence[tuple[Tensor, list[str]]]]) -> None:
    """``results[rank][step]``."""
    for step in range(len(case.steps)):
        parts = [inputs(case, rank, step) for rank in range(case.num_ranks)]
        xs, idxs, weights = zip(*parts, strict=True)
        sent = [wide(*quantise(x)) for x in xs] if case.fp8 else xs
        expected = reference_layer.expert_parallel(
            sent, idxs, weights, case.experts, expert, case.ranks_per_node
        )
        decoded = expected
        if case.ranks_per_node is not None:  # then prefill and decode round at different places
            decoded = reference_layer.expert_parallel(sent, idxs, weights, case.experts, expert)
        how = case.how
        if how == "mixed":
            how = ("forward", "split", "async", "shared")[(step + case.seed) % 4]
        for rank in range(case.num_ranks):
            modes = results[rank][step][1]
            fits = case.steps[step][rank] <= case.decode_tokens
            is_decoded = (modes[0] if fits else modes[-1]) == "decode"
            want = (decoded if is_decoded else expected)[rank]
            if how == "shared":
                want = want + shared(xs[rank])
            assert_same_bits(results[rank][step][0], want, f"step {step} rank {rank}")
        modes = {tuple(results[rank][step][1]) for rank in range(case.num_ranks)}
        assert len(modes) == 1, f"step {step}: ranks took {modes}"


def random_steps(choose: random.Random, num_ranks: int, most: int, few: int, count: int) -> Any:
    """Steps of few tokens, of many, and of both at once."""
    steps = []
    for _ in range(count):
        kind = choose.choice(("few", "few", "many", "one", "any", "none"))
        largest = {"few": few, "many": most, "one": few, "any": most, "none": 0}[kind]
        tokens = [choose.randint(0, largest) for _ in range(num_ranks)]
        if kind == "one":
            tokens[choose.randrange(num_ranks)] = choose.randint(few, most)
        steps.append(tuple(tokens))
    return tuple(steps)
