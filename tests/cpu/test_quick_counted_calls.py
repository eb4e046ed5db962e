"""The same for dispatches whose host waits for the counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quick_calls import E, H, K, NormalSpy, R, T, inputs, on_normal

import deep_comm
from deep_comm import simulate
from deep_comm.errors import BufferDestroyed


def to_rank(rank: int, num_tokens: int) -> dict[str, Any]:
    """All tokens to one expert of ``rank``."""
    x = torch.arange(num_tokens * H).view(num_tokens, H).bfloat16()
    idx = torch.full((num_tokens, K), -1)
    idx[:, 0] = rank * (E // R)
    return dict(x=x, topk_idx=idx, topk_weights=torch.ones(num_tokens, K), num_experts=E)


def everything(received: tuple[Any, ...]) -> list[Any]:
    """What a dispatch returned, as tensors and plain values."""
    rows, recv_idx, recv_weights, per_expert, handle, event = received
    assert event.event is None
    parts = list(rows) if isinstance(rows, tuple) else [rows]
    fields = [
        handle.num_recv_tokens, handle.max_num_tokens, handle.num_experts, handle.num_topk,
        handle.rank, handle.num_tokens, handle.num_recv_rows, handle.num_channels, per_expert,
    ]  # fmt: skip
    counts = handle.num_recv_tokens_tensor, handle.num_recv_tokens_per_rank
    on_device = handle.num_recv_tokens_per_expert
    return [*parts, recv_idx, recv_weights, *handle, *counts, on_device, *fields]


def require_same(one: list[Any], many: list[Any]) -> None:
    for number, (got, want) in enumerate(zip(one, many, strict=True)):
        if not isinstance(want, torch.Tensor):
            assert got == want and type(got) is type(want), number
            continue
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
        assert torch.equal(got.float(), want.float()), number


@pytest.mark.parametrize("config", [None, deep_comm.Config(2, 4, 16)])
@pytest.mark.parametrize("with_layout", [False, True])
@pytest.mark.parametrize("form", ["bf16", "fp8", "without-weights", "int32", "aligned"])
def test_calls_that_wait_for_counts(form: str, with_layout: bool, config: Any) -> None:
    """Of other numbers of tokens than the first, and combines along their handles."""

    def body(buffer: Any, rank: int) -> None:
        idx_dtype = torch.int32 if form == "int32" else torch.int64
        spy = NormalSpy(buffer)

        def step(num_tokens: int) -> list[Any]:
            x, idx, weights = inputs(rank, num_tokens, idx_dtype)
            given: Any = x
            if form == "fp8":
                given = x.to(torch.float8_e4m3fn), torch.rand(len(x), 2, generator=generator())
            options: dict[str, Any] = dict(config=config, topk_idx=idx, num_experts=E)
            if form != "without-weights":
                options["topk_weights"] = weights
            if form == "aligned":
                options.update(expert_alignment=4)
            if with_layout:
                per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(idx, E)
                options.update(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert,
                               is_token_in_rank=mask)  # fmt: skip
                spy.made.pop()
            received = buffer.dispatch(given, **options)
            got = received[0][0] if isinstance(received[0], tuple) else received[0]
            rows = got.bfloat16().nan_to_num(1.0)
            sums = buffer.combine(rows, received[4], received[2], config=config)[:2]
            again = buffer.dispatch(given, handle=received[4], config=config)[0]
            again = again[0] if isinstance(again, tuple) else again
            assert torch.equal(again.float(), got.float())
            return [*everything(received), *sums]

        step((T, 0)[rank])
        assert spy.made == [False] * 3
        for tokens in ((T, 0), (3, T), (0, 0), (T, T), (2 * T, 1)):
            spy.made.clear()
            one = step(tokens[rank])
            # Where nothing comes to this rank and nothing had been expected, too.
            assert spy.made[0] and all(spy.made[1:]), spy.made
            spy.is_off = True
            many = step(tokens[rank])
            spy.is_off = False
            require_same(one, many)

    on_normal(body, num_direct_bytes=4 << 20)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def _wrong_guess(buffer: Any, rank: int, most: int) -> None:
    """Rank 1 has one token and gets ``most`` more: nobody could tell it before."""
    engine, free = buffer.runtime, buffer._context.region.num_free_bytes
    buffer.dispatch(**to_rank(1, 1))
    spy = NormalSpy(buffer)
    # Notify, a dispatch that left at once, the one that moved; then as it should be.
    for launches in (3, 2):
        before = engine.num_launches
        arguments = to_rank(1, most if rank == 0 else 1)
        received = buffer.dispatch(**arguments)
        assert engine.num_launches - before == launches
        assert spy.made.pop()
        got = everything(received)
        assert len(received[0]) == (most + 1 if rank == 1 else 0)
        if rank == 1:
            assert torch.equal(received[0][:most], to_rank(1, most)["x"])
            assert received[3] == [most + 1, 0, 0]
        assert received[4].num_recv_tokens == len(received[0])
        assert received[4].max_num_tokens == most
        again = buffer.dispatch(arguments["x"], handle=received[4])[0]
        assert torch.equal(again, received[0])
        assert torch.equal(buffer.combine(again, received[4])[0], arguments["x"])
        spy.is_off = True
        require_same(got, everything(buffer.dispatch(**arguments)))
        spy.is_off = False
        spy.made.clear()
        del received, got, again
    assert buffer._context.region.num_free_bytes == free


def test_rows_that_a_native_step_could_not_move_are_moved() -> None:
    on_normal(lambda buffer, rank: _wrong_guess(buffer, rank, 40), num_direct_bytes=4 << 20)


@pytest.mark.parametrize("seed", range(30))
def test_schedules_of_native_steps_that_guess_wrong(seed: int) -> None:
    def main(group: Any) -> None:
        with deep_comm.Buffer(
            group, 1 << 19, num_direct_bytes=1 << 18, device="cpu", timeout_s=20
        ) as buffer:
            _wrong_guess(buffer, group.rank(), 9)

    simulate.run(main, R, seed, timeout_s=60)


def test_without_room_the_rows_take_the_rings() -> None:
    """One rank's region is full, the others' are not."""

    def body(buffer: Any, rank: int) -> None:
        arguments = to_rank(1, 12)
        want = everything(buffer.dispatch(**arguments))
        spy = NormalSpy(buffer)
        kept = None
        if rank == 1:
            region = buffer._context.region
            kept = region.allocate(region.num_free_bytes - 4096)
        for _ in range(2):
            received = buffer.dispatch(**arguments)
            assert spy.made.pop() == (rank == 0)
            require_same(everything(received), want)
        del kept
        require_same(everything(buffer.dispatch(**arguments)), want)
        assert spy.made.pop()

    on_normal(body, num_direct_bytes=1 << 18)


def test_counted_calls_in_doubt_are_left_to_python() -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)

        def dispatch(**given: Any) -> Any:
            given = {"x": x, "topk_idx": idx, "topk_weights": weights, "num_experts": E, **given}
            return buffer.dispatch(**given)

        dispatch()
        spy = NormalSpy(buffer)
        dispatch()
        assert spy.made == [True]
        launched, free = buffer.runtime.num_launches, buffer._context.region.num_free_bytes
        spy.made.clear()
        for wrong in (
            dict(x=x[:-1]), dict(topk_idx=idx[:-1]), dict(topk_idx=idx.float()),
            dict(topk_weights=weights.double()), dict(topk_idx=None), dict(num_experts="6"),
            dict(num_experts=None), dict(expert_alignment=0), dict(num_worst_tokens=None),
            dict(num_worst_tokens=-3),
        ):  # fmt: skip
            with pytest.raises((deep_comm.ArgumentError, TypeError)):
                dispatch(**wrong)
        assert not any(spy.made)
        assert buffer.runtime.num_launches == launched
        assert buffer._context.region.num_free_bytes == free
        bad = idx.clone()
        bad[1, 1] = E
        spy.made.clear()
        for _ in range(2):
            with pytest.raises(deep_comm.ExpertIndexError):
                dispatch(topk_idx=bad if rank == 0 else idx)
            assert torch.equal(dispatch()[4].send_head, dispatch()[4].send_head)
        assert all(spy.made)
        assert buffer._context.region.num_free_bytes == free
        buffer.destroy()
        with pytest.raises(BufferDestroyed):
            dispatch()

    on_normal(body, num_direct_bytes=1 << 20)
