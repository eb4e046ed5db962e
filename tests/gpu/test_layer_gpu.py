"""tests/cpu/layer on GPUs, and CUDA graphs; every rank is a process."""

import random
import time

import pytest
import torch
from cases import ROUTINGS
from gpu_cases import run as on_gpus
from layer_cases import (
    Experts,
    LayerCase,
    build,
    expert,
    inputs,
    random_steps,
    reference_sums,
    run,
    verify,
)
from payload import assert_same_bits

from deep_comm.reference import layer as reference_layer


def device_of(group) -> torch.device:
    return torch.device("cuda", group.rank())


def sampled(seed: int, num_ranks: int, mode: str) -> LayerCase:
    choose = random.Random(seed * 8 + num_ranks)
    few = choose.choice((1, 16, 64))
    most = few if mode == "decode" else few + choose.choice((1, 200, 1000))
    dtype = torch.bfloat16
    if mode == "prefill":
        dtype = choose.choice((torch.bfloat16, torch.float16, torch.float32))
    return LayerCase(
        random_steps(choose, num_ranks, most, few, 8 if mode == "auto" else 2), max_tokens=most,
        decode_tokens=few, hidden=choose.choice((64, 1024, 7168)),
        experts=choose.choice((3, 8, 19)), topk=choose.choice((1, 2, 6)),
        routing=choose.choice(ROUTINGS), idx_dtype=choose.choice((torch.int64, torch.int32)),
        dtype=dtype, mode=mode, alignment=choose.choice((1, 16, 128)),
        bounded=mode == "prefill" and choose.random() < 0.4,
        how=choose.choice(("forward", "split", "async", "shared", "mixed")), seed=seed,
    )  # fmt: skip


def run_cases(group, cases: list[LayerCase]) -> list:
    return [run(group, case, device_of(group)) for case in cases]


@pytest.mark.parametrize("mode", ["prefill", "decode", "auto"])
@pytest.mark.gpu
def test_every_rank_gets_its_sums(num_ranks: int, mode: str) -> None:
    for ranks in sorted({2, num_ranks}):
        cases = [sampled(seed, ranks, mode) for seed in range(10)]
        results = on_gpus(run_cases, ranks, cases)
        for number, case in enumerate(cases):
            try:
                verify(case, [results[rank][number] for rank in range(ranks)])
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("mode", ["prefill", "decode", "auto"])
@pytest.mark.gpu
def test_ranks_of_two_logical_nodes_get_their_sums(num_ranks: int, mode: str) -> None:
    ranks = num_ranks - num_ranks % 2
    choose = random.Random(7)
    cases = []
    for seed in range(3):
        most = 16 if mode == "decode" else 200
        steps = random_steps(choose, ranks, most, 16, 6 if mode == "auto" else 2)
        cases.append(
            LayerCase(
                steps, most, 16, hidden=1024, experts=3 * ranks + 1, topk=4, mode=mode, how="mixed",
                routing=ROUTINGS[seed], ranks_per_node=ranks // 2, seed=seed,
            )
        )  # fmt: skip
    results = on_gpus(run_cases, ranks, cases)
    for number, case in enumerate(cases):
        verify(case, [results[rank][number] for rank in range(ranks)])


def replay(group, case: LayerCase, mode: str) -> list[torch.Tensor]:
    """A graph captured at step 0, replayed with the inputs of every step."""
    device = device_of(group)
    results = []
    with build(group, case, device) as layer, torch.no_grad():
        parts = [part.to(device) for part in inputs(case, group.rank(), 0)]

        def compute(batch) -> torch.Tensor:
            # By device counts alone, as a captured kernel must; the experts of layer_cases.expert.
            row = torch.arange(batch.x.shape[0], device=device)
            local = torch.searchsorted(batch.offsets[1:].long(), row, right=True)
            idx = batch.first_expert + local.clamp(max=batch.num_local_experts - 1)
            factor = 1.0 + ((idx * 37) % 11) / 8
            rows = batch.x.float() * factor.unsqueeze(1) - (idx % 3).unsqueeze(1)
            return rows.to(batch.x.dtype)

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            bounded = mode == "prefill"
            for _ in range(2):
                layer(*parts, compute, mode=mode, bounded=bounded)
        torch.cuda.synchronize()
        torch.distributed.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(*parts, compute, mode=mode)
        for step in range(len(case.steps)):
            for part, new in zip(parts, inputs(case, group.rank(), step), strict=True):
                part.copy_(new)
            graph.replay()
            torch.cuda.synchronize()
            results.append(y.cpu())
        layer.buffer.check()
    return results


@pytest.mark.parametrize("mode", ["decode", "auto", "prefill"])
@pytest.mark.gpu
def test_a_captured_step_follows_its_inputs(num_ranks: int, mode: str) -> None:
    tokens = tuple(16 - rank for rank in range(num_ranks))
    # Where auto may exceed decode_tokens, a captured step is a decode step all the same.
    max_tokens = 64 if mode == "auto" else 16
    case = LayerCase(
        (tokens,) * 6, max_tokens, 16, hidden=1024, experts=4 * num_ranks, topk=4,
        mode="auto" if mode == "auto" else mode,
    )  # fmt: skip
    results = on_gpus(replay, num_ranks, case, "decode" if mode == "auto" else mode)
    for step in range(len(case.steps)):
        for rank, want in enumerate(reference_sums(case, step)):
            assert_same_bits(results[rank][step], want, f"step {step} rank {rank}")


def gradients(group, case: LayerCase) -> list:
    device = device_of(group)
    results = []
    with build(group, case, device) as layer:
        for step in range(len(case.steps)):
            x, idx, weights = (part.to(device) for part in inputs(case, group.rank(), step))
            x.requires_grad_()
            weights.requires_grad_()
            with layer.dispatch_async(x, idx, weights) as sent:
                pass
            batch = sent.result()
            y = layer.combine_async(batch, batch.x * 1.5).result()
            y.backward(torch.cos(torch.arange(y.numel(), device=device)).view_as(y).to(y.dtype))
            results.append((x.grad.cpu(), weights.grad.cpu()))
    return results


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.gpu
def test_gradients_are_those_of_the_reference(num_ranks: int, dtype: torch.dtype) -> None:
    steps = ((100, 0, 37, 64, 1, 2, 3, 4)[:num_ranks], (5, 200, 1, 0, 9, 9, 9, 9)[:num_ranks])
    case = LayerCase(steps, 256, 16, hidden=512, experts=19, topk=5, dtype=dtype, mode="prefill")
    results = on_gpus(gradients, num_ranks, case)
    for step in range(len(steps)):
        for rank in range(num_ranks):
            x, idx, weights = inputs(case, rank, step)
            grad = torch.cos(torch.arange(x.numel()).float()).view_as(x).to(dtype)
            want_x, want_weights = reference_layer.gradients(
                grad, x, idx, weights, case.experts, num_ranks,
                lambda idx, rows: rows * 1.5, lambda idx, rows: rows * 1.5,
            )  # fmt: skip
            got_x, got_weights = results[rank][step]
            # cos on a GPU may differ in its last bit, before it is rounded.
            torch.testing.assert_close(got_x, want_x, rtol=1e-2, atol=1e-2)
            torch.testing.assert_close(got_weights, want_weights, rtol=1e-2, atol=0.5)


def dispatches_beside_a_late_rank(group, case: LayerCase) -> list:
    """(seconds in dispatch_async, y) of each step; rank 0 comes 300 ms late."""
    device = device_of(group)
    results = []
    with build(group, case, device) as layer, torch.no_grad():
        for step in range(len(case.steps)):
            x, idx, weights = (part.to(device) for part in inputs(case, group.rank(), step))
            torch.cuda.synchronize()
            torch.distributed.barrier(group)
            if group.rank() == 0:
                time.sleep(0.3)
            began = time.perf_counter()
            sent = layer.dispatch_async(x, idx, weights)
            took = time.perf_counter() - began
            busy = x.float() @ x.float().T  # its memory is free, and in use, when rows come
            del busy
            batch = sent.result()
            y = layer.combine(batch, batch.map(expert))
            results.append((took, y.cpu()))
        layer.buffer.check()
    return results


def case_of_late_ranks(num_ranks: int, ranks_per_node: int | None = None) -> LayerCase:
    steps = ((300,) * num_ranks, tuple(range(num_ranks)), (1500,) * num_ranks)
    return LayerCase(
        steps, 1500, 16, hidden=512, experts=4 * num_ranks, topk=4, mode="prefill",
        ranks_per_node=ranks_per_node,
    )  # fmt: skip


def verify_late_ranks(case: LayerCase, results: list, most_s: float) -> None:
    """``most_s``: that a call may take whose rank is not late."""
    for step in range(len(case.steps)):
        for rank, want in enumerate(reference_sums(case, step)):
            took, y = results[rank][step]
            assert_same_bits(y, want, f"step {step} rank {rank}")
            # The first call loads kernels.
            assert rank == 0 or step == 0 or took < most_s, f"step {step} rank {rank}: {took} s"


@pytest.mark.gpu
def test_a_dispatch_returns_while_a_rank_is_late(num_ranks: int) -> None:
    case = case_of_late_ranks(num_ranks)
    results = on_gpus(dispatches_beside_a_late_rank, num_ranks, case)
    verify_late_ranks(case, results, most_s=0.2)


def long_mixed_run(group, case: LayerCase, num_rounds: int, words: str) -> list[str]:
    device = device_of(group)
    choose = random.Random(group.rank())
    with build(group, case, device) as layer, torch.no_grad():
        told = layer._steps._host_counters
        assert told is not None
        if words == "lost" and group.rank() == 1:
            told.set_exchange(7)  # those of other exchanges, for ever
        parts = [
            [part.to(device) for part in inputs(case, group.rank(), step)]
            for step in range(len(case.steps))
        ]
        first = [layer(*p, Experts()) for p in parts]
        for _ in range(num_rounds):
            again = []
            for p in parts:
                if words == "late" and choose.random() < 0.1:
                    time.sleep(1e-3)  # longer than anybody looks
                again.append(layer(*p, lambda batch: batch.map(expert)))
        torch.cuda.synchronize()
        layer.buffer.check()
        same = all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    return [str(same), str(layer.rule.num_changes)]


@pytest.mark.parametrize("words", ["in time", "late", "lost"])
@pytest.mark.gpu
def test_hundreds_of_steps_of_disagreeing_ranks(num_ranks: int, words: str) -> None:
    steps = random_steps(random.Random(3), num_ranks, 300, 32, 20)
    case = LayerCase(steps, 300, 32, hidden=256, experts=8, topk=2)
    results = on_gpus(long_mixed_run, num_ranks, case, 50 if words == "in time" else 15, words)
    assert all(result == results[0] and result[0] == "True" for result in results), results
