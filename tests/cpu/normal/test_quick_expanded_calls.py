"""Expanded dispatches and their combines in one native step give what they give step by step."""

from __future__ import annotations

import copy
import dataclasses
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

CONFIGS = [None, deep_comm.Config(2, 4, 16)]


def everything(received: tuple[Any, ...]) -> list[Any]:
    """What an expanded dispatch returned, as tensors and plain values; rows without a token, which
    hold anything, as zeros."""
    rows, recv_idx, recv_weights, per_expert, handle, event = received
    assert event.event is None
    expansion = handle.expansion
    taken = torch.zeros(expansion.num_rows, dtype=torch.bool)
    num_tokens = int(handle.num_recv_tokens_tensor)
    places = expansion.recv_rows[:num_tokens].flatten()
    taken[places[places >= 0].long()] = True
    outputs = [*(rows if isinstance(rows, tuple) else (rows,)), recv_idx]
    if recv_weights is not None:
        outputs.append(recv_weights)
    shapes = [(part.shape, part.stride(), part.dtype) for part in outputs]
    return [
        *(part[taken] for part in outputs), *shapes, per_expert, *handle,
        expansion.expert_offsets, expansion.expert_counts,
        expansion.recv_rows, expansion.send_row, expansion.num_expanded, expansion.num_rows,
        expansion.expert_alignment, handle.num_recv_tokens, handle.max_num_tokens,
        handle.num_recv_rows, handle.num_output_rows, handle.num_topk,
    ]  # fmt: skip


def step(buffer: Any, given: Any, options: dict[str, Any], zero_padding: bool) -> list[Any]:
    """A dispatch, a cached one, and the combines along them."""
    received = buffer.dispatch(given, expand=True, zero_padding=zero_padding, **options)
    rows, recv_weights, handle = received[0], received[2], received[4]
    config = options["config"]
    if zero_padding:
        taken = torch.zeros(handle.expansion.num_rows, dtype=torch.bool)
        places = handle.expansion.recv_rows.flatten()
        taken[places[places >= 0].long()] = True
        for part in rows if isinstance(rows, tuple) else (rows,):
            assert not part[~taken].float().any()
    cast = {name: options[name] for name in CASTS["cast-ue8m0"] if name in options}
    again = buffer.dispatch(given, handle=handle, config=config, zero_padding=True, **cast)[0]
    got = (rows[0] if isinstance(rows, tuple) else rows).float().nan_to_num(1.0)
    got = got.clamp(-100, 100).bfloat16()
    sums = [buffer.combine(got, handle, config=config)[0]]
    if recv_weights is not None:
        sums += buffer.combine(got, handle, recv_weights, config=config)[:2]
        sums += buffer.combine(got, handle, recv_weights, config=config, apply_weights=True)[:1]
    again = [*again] if isinstance(again, tuple) else [again]  # its padding is zeros
    return [*everything(received), *again, *sums]


FORMS = ["bf16", "fp8", "without-weights", "int32", "aligned", "layout", *CASTS]


@pytest.mark.parametrize("zero_padding", [False, True])
@pytest.mark.parametrize("bound", [0, 90])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("form", FORMS)
def test_expanded_calls_of_other_numbers_of_tokens(
    form: str, config: Any, bound: int, zero_padding: bool
) -> None:
    def body(buffer: Any, rank: int) -> None:
        spy = NormalSpy(buffer)
        weighted = form != "without-weights"

        def run(num_tokens: int) -> list[Any]:
            given, options = form_of(form, rank, num_tokens)
            options.update(config=config, num_worst_tokens=bound)
            if form == "layout":
                options.update(layout_of(buffer, options["topk_idx"]))
                spy.made.pop()
            return step(buffer, given, options, zero_padding)

        run((T, 1)[rank])
        run((2 * T, 1)[rank])
        for tokens in ((T, 1), (3, T), (T, T), (2 * T, 1)):
            spy.made.clear()
            one = run(tokens[rank])
            assert all(spy.made) and len(spy.made) == (5 if weighted else 3), spy.made
            spy.is_off = True
            many = run(tokens[rank])
            spy.is_off = False
            require_same_dispatch(one, many)

    on_normal(body, num_direct_bytes=4 << 20)


def test_rows_that_a_native_step_could_not_move_are_moved() -> None:
    on_normal(
        lambda buffer, rank: wrong_guess(buffer, rank, 40, (5, 4), everything, expand=True),
        num_direct_bytes=4 << 20,
    )


@pytest.mark.parametrize("seed", range(20))
def test_schedules_of_native_steps_that_guess_wrong(seed: int) -> None:
    def main(group: Any) -> None:
        with deep_comm.Buffer(
            group, 1 << 19, num_direct_bytes=1 << 18, device="cpu", timeout_s=20
        ) as buffer:
            wrong_guess(buffer, group.rank(), 9, (5, 4), everything, expand=True)

    simulate.run(main, R, seed, timeout_s=60)


def test_a_bound_that_is_exceeded_is_an_error_as_ever() -> None:
    def body(buffer: Any, rank: int) -> None:
        arguments = to_rank(1, 12)
        spy = NormalSpy(buffer)
        for _ in range(2):
            buffer.dispatch(**arguments, expand=True, num_worst_tokens=40)
        assert spy.made == [False, True]
        for _ in range(2):
            if rank == 1:
                with pytest.raises(deep_comm.CapacityError):
                    buffer.dispatch(**arguments, expand=True, num_worst_tokens=20)
            else:
                buffer.dispatch(**arguments, expand=True, num_worst_tokens=20)
        received = buffer.dispatch(**arguments, expand=True, num_worst_tokens=24)
        assert int(received[4].num_recv_tokens_tensor) == (24 if rank == 1 else 0)

    on_normal(body, num_direct_bytes=1 << 20)


def test_copies_of_handles_have_all_their_tensors() -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)
        options = dict(topk_idx=idx, topk_weights=weights, num_experts=E, expand=True)
        spy = NormalSpy(buffer)
        for is_one_step in (False, True):
            rows, _, row_weights, _, handle, _ = buffer.dispatch(x, **options)
            assert spy.made == [is_one_step]
            want = buffer.combine(rows, handle, row_weights, apply_weights=True)[0]
            expansion = handle.expansion
            for other in (
                dataclasses.replace(handle, expansion=copy.copy(expansion)),
                dataclasses.replace(handle, expansion=dataclasses.replace(expansion)),
                copy.deepcopy(handle),
            ):
                assert torch.equal(other.expansion.recv_rows, expansion.recv_rows)
                assert torch.equal(other.expansion.send_row, expansion.send_row)
                got = buffer.combine(rows, other, row_weights, apply_weights=True)[0]
                assert torch.equal(got, want)
                assert torch.equal(buffer.dispatch(x, handle=other)[0], rows)
            with pytest.raises(AttributeError):
                _ = expansion.no_such_field
            spy.made.clear()
            del rows, row_weights, handle, expansion, other

    on_normal(body, num_direct_bytes=4 << 20)


def test_expanded_calls_in_doubt_are_left_to_python() -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)
        plain = buffer.dispatch(x, topk_idx=idx, num_experts=E)[4]

        def dispatch(**given: Any) -> Any:
            options = dict(topk_idx=idx, topk_weights=weights, num_experts=E, expand=True)
            return buffer.dispatch(**{"x": x, **options, **given})

        for _ in range(2):
            rows, _, row_weights, _, handle, _ = dispatch()
            buffer.combine(rows, handle, row_weights, apply_weights=True)
            buffer.dispatch(x, handle=handle)
        spy = NormalSpy(buffer)
        launched, free = buffer.runtime.num_launches, buffer._context.region.num_free_bytes
        for call in (
            lambda: dispatch(zero_tail=True),
            lambda: dispatch(expand=False, zero_padding=True),
            lambda: dispatch(topk_idx=None, topk_weights=None),
            lambda: dispatch(topk_idx=idx[:-1]),
            lambda: dispatch(expert_alignment=0),
            lambda: buffer.dispatch(x, handle=plain, expand=True),
            lambda: buffer.dispatch(x, handle=plain, zero_padding=True),
            lambda: buffer.dispatch(x[:-1], handle=handle),
            lambda: buffer.combine(rows[:-1], handle),
            lambda: buffer.combine(rows, handle, weights),
            lambda: buffer.combine(rows, handle, row_weights[:-1], apply_weights=True),
            lambda: buffer.combine(rows, handle, apply_weights=True),
            lambda: buffer.combine(x, plain, weights, apply_weights=True),
        ):
            with pytest.raises(deep_comm.DeepCommError):
                call()
        assert not any(spy.made)
        assert buffer.runtime.num_launches == launched
        assert buffer._context.region.num_free_bytes == free
        bad = idx.clone()
        bad[1, 1] = E
        with pytest.raises(deep_comm.ExpertIndexError):
            dispatch(topk_idx=bad if rank == 0 else idx)
        assert torch.equal(dispatch()[0], rows)

    on_normal(body, num_direct_bytes=2 << 20)
