"""The same for dispatches whose host waits for the counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quick_calls import (
    CASTS,
    E,
    NormalSpy,
    R,
    T,
    form_of,
    inputs,
    layout_of,
    on_normal,
    require_same_dispatch,
    to_rank,
    wrong_guess,
)

import deep_comm
from deep_comm import simulate
from deep_comm.errors import BufferDestroyed


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


@pytest.mark.parametrize("config", [None, deep_comm.Config(2, 4, 16)])
@pytest.mark.parametrize("with_layout", [False, True])
@pytest.mark.parametrize("form", ["bf16", "fp8", "without-weights", "int32", "aligned", *CASTS])
def test_calls_that_wait_for_counts(form: str, with_layout: bool, config: Any) -> None:
    """Of other numbers of tokens than the first, and combines along their handles."""

    def body(buffer: Any, rank: int) -> None:
        spy, cast = NormalSpy(buffer), CASTS.get(form, {})

        def step(num_tokens: int) -> list[Any]:
            given, options = form_of(form, rank, num_tokens)
            if with_layout:
                options.update(layout_of(buffer, options["topk_idx"]))
                spy.made.pop()
            received = buffer.dispatch(given, config=config, **options)
            got = received[0][0] if isinstance(received[0], tuple) else received[0]
            rows = got.bfloat16().nan_to_num(1.0)
            sums = buffer.combine(rows, received[4], received[2], config=config)[:2]
            again = buffer.dispatch(given, handle=received[4], config=config, **cast)[0]
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
            require_same_dispatch(one, many)

    on_normal(body, num_direct_bytes=4 << 20)


def test_rows_that_a_native_step_could_not_move_are_moved() -> None:
    on_normal(
        lambda buffer, rank: wrong_guess(buffer, rank, 40, (3, 2), everything),
        num_direct_bytes=4 << 20,
    )


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_cast_rows_that_a_native_step_could_not_move_are_moved(cast: dict[str, bool]) -> None:
    """They are cast into scratch memory first, as rings want it."""

    def body(buffer: Any, rank: int) -> None:
        buffer.dispatch(**to_rank(1, 1), **cast)
        spy, engine = NormalSpy(buffer), buffer.runtime
        before = engine.num_launches
        arguments = to_rank(1, 40 if rank == 0 else 1)
        received = buffer.dispatch(**arguments, **cast)
        assert spy.made.pop() and engine.num_launches - before == 3
        spy.is_off = True
        require_same_dispatch(
            everything(received), everything(buffer.dispatch(**arguments, **cast))
        )

    on_normal(body, num_direct_bytes=4 << 20)


@pytest.mark.parametrize("seed", range(30))
def test_schedules_of_native_steps_that_guess_wrong(seed: int) -> None:
    def main(group: Any) -> None:
        with deep_comm.Buffer(
            group, 1 << 19, num_direct_bytes=1 << 18, device="cpu", timeout_s=20
        ) as buffer:
            wrong_guess(buffer, group.rank(), 9, (3, 2), everything)

    simulate.run(main, R, seed, timeout_s=60)


@pytest.mark.parametrize("cast", [{}, *CASTS.values()], ids=["plain", *CASTS])
def test_without_room_the_rows_take_the_rings(cast: dict[str, bool]) -> None:
    """One rank's region is full, the others' are not."""

    def body(buffer: Any, rank: int) -> None:
        arguments = {**to_rank(1, 12), **cast}
        want = everything(buffer.dispatch(**arguments))
        spy = NormalSpy(buffer)
        kept = None
        if rank == 1:
            region = buffer._context.region
            kept = region.allocate(region.num_free_bytes - 4096)
        for _ in range(2):
            received = buffer.dispatch(**arguments)
            assert spy.made.pop() == (rank == 0)
            require_same_dispatch(everything(received), want)
        del kept
        require_same_dispatch(everything(buffer.dispatch(**arguments)), want)
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
