"""Calls of different kinds on one Buffer, in orders that programs seldom choose."""

from __future__ import annotations

import functools
from typing import Any

import found_seeds
import mixed_calls
import pytest
import roundtrip
import torch
from layer_cases import expert
from run_by import run_by
from schedules import some_of

import deep_comm
from deep_comm import local, simulate
from deep_comm.errors import ArgumentError, UnsupportedError

H, E, K, M = 64, 4, 2, 4


def tokens(rank: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, H, generator=generator).bfloat16()
    idx = torch.rand(num_tokens, E, generator=generator).topk(K).indices
    return x, idx, torch.rand(num_tokens, K, generator=generator)


def layer_over(group: Any, ranks_per_node: int | None, **options: Any) -> Any:
    """A layer on a Buffer without a receive region."""
    num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(
        M + 1, H, group.size(), E, ranks_per_node=ranks_per_node
    )
    buffer = deep_comm.Buffer(
        group, 2 << 20, max(num_bytes, 2 << 20), low_latency_mode=True, num_direct_bytes=0,
        device="cpu", timeout_s=10, ranks_per_node=ranks_per_node,
    )  # fmt: skip
    return deep_comm.ExpertParallel(
        hidden=H, num_experts=E, num_topk=K, max_tokens=16, decode_tokens=M, buffer=buffer,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("ranks_per_node", [None, 1])
@pytest.mark.parametrize("kind", ["dispatch", "combine"])
@run_by(local.run, 2, timeout_s=60)
def test_a_low_latency_call_waits_for_no_counts_whatever_way_it_goes(
    group: Any, /, kind: str, ranks_per_node: int | None
) -> None:
    """While a dispatch of normal mode awaits its counts. One rank's argument is no bool."""
    x, idx, weights = tokens(group.rank(), M)
    with layer_over(group, ranks_per_node, mode="prefill") as layer, torch.no_grad():
        buffer = layer.buffer
        expected = layer(x, idx, weights, lambda batch: batch.map(expert))
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, M, E, use_fp8=False)
        sums = buffer.low_latency_combine(rows, idx, weights, handle)[0]
        no = 0 if group.rank() == 0 else False
        with layer.dispatch_async(x, idx, weights) as sent:
            if kind == "dispatch":
                again = buffer.low_latency_dispatch(x, idx, M, E, use_fp8=no)[0]
                assert again.shape == rows.shape
            else:
                again = buffer.low_latency_combine(rows, idx, weights, handle, use_logfmt=no)[0]
                assert torch.equal(again, sums)
        batch = sent.result()
        assert torch.equal(layer.combine(batch, batch.map(expert)), expected)
        buffer.destroy()


@pytest.mark.parametrize("mode", ["decode", "auto"])
@run_by(local.run, 3, timeout_s=60)
def test_decode_steps_are_refused_while_a_rank_is_absent(group: Any, /, mode: str) -> None:
    """By name and at once, though the layer was not told."""
    x, idx, weights = tokens(group.rank(), M)
    with layer_over(group, None, mode=mode) as layer, torch.no_grad():
        buffer = layer.buffer
        expected = [layer(x, idx, weights, lambda batch: batch.map(expert)) for _ in range(2)][1]
        batch = layer.dispatch(x, idx, weights)
        if group.rank() < 2:
            buffer.reset(without=[2])
            for call in (
                lambda: layer(x, idx, weights, lambda batch: batch.map(expert)),
                lambda: layer.combine(batch, batch.map(expert)),
            ):
                with pytest.raises(UnsupportedError, match=r"without ranks \[2\]"):
                    call()
        buffer.reset()
        layer.reset()
        assert torch.equal(layer(x, idx, weights, lambda batch: batch.map(expert)), expected)
        buffer.destroy()


@pytest.mark.parametrize("mode", ["decode", "auto"])
@run_by(local.run, 2, timeout_s=60)
def test_decode_steps_count_among_the_calls_that_a_waiting_hook_allows(
    group: Any, /, mode: str
) -> None:
    """One more of the kind, not two: the second would wait for the hook until its deadline."""
    x, idx, weights = tokens(group.rank(), M)
    with layer_over(group, None, mode=mode) as layer, torch.no_grad():
        buffer = layer.buffer
        expected = [layer(x, idx, weights, lambda batch: batch.map(expert)) for _ in range(2)][1]
        *_, handle, _, receive = buffer.low_latency_dispatch(
            x, idx, M, E, use_fp8=False, return_recv_hook=True
        )
        batch = layer.dispatch(x, idx, weights)
        for _ in range(2):
            with pytest.raises(ArgumentError, match="call the hook of an earlier one first"):
                layer.dispatch(x, idx, weights)
        receive()
        assert torch.equal(layer.combine(batch, batch.map(expert)), expected)

        _, _, receive = buffer.low_latency_combine(
            torch.zeros(E // 2, 2 * M, H, dtype=torch.bfloat16), idx, weights, handle,
            return_recv_hook=True,
        )  # fmt: skip
        batch = layer.dispatch(x, idx, weights)
        rows = batch.map(expert)
        assert torch.equal(layer.combine(batch, rows), expected)
        with pytest.raises(ArgumentError, match="call the hook of an earlier one first"):
            layer.combine(batch, rows)
        receive()
        assert torch.equal(layer(x, idx, weights, lambda batch: batch.map(expert)), expected)
        buffer.destroy()


@pytest.mark.parametrize("seed", some_of(range(60)))
def test_programs_of_calls_of_every_kind(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every third one outputs are poisoned."""
    monkeypatch.setenv("DEEP_COMM_POISON", "1" if seed % 3 == 0 else "0")
    # How long a row on its way is depends on whether there was room for it.
    monkeypatch.setattr(roundtrip, "verify_bytes", lambda *_: None)
    setting, operations = mixed_calls.draw(seed, 12)
    results = local.run(
        functools.partial(
            mixed_calls.run, seed=seed, setting=setting, operations=operations
        ),
        setting.num_ranks,
        timeout_s=120,
    )  # fmt: skip
    mixed_calls.verify(operations, results)


# More than four ranks take long.
SMALL = [seed for seed in some_of(range(3000, 3030)) if mixed_calls.draw(seed, 7)[0].num_ranks <= 4]


@pytest.mark.parametrize("seed", [*found_seeds.PROGRAMS, *SMALL])
def test_programs_under_a_schedule(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roundtrip, "verify_bytes", lambda *_: None)
    setting, operations = mixed_calls.draw(seed, 7)
    run = functools.partial(mixed_calls.run, seed=seed, setting=setting, operations=operations)
    results = simulate.run(run, setting.num_ranks, seed, timeout_s=120)
    mixed_calls.verify(operations, results)
