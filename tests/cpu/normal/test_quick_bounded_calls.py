"""The same for dispatches with a bound of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quick_calls import CASTS, E, K, NormalSpy, R, T, form_of, inputs, layout_of, on_normal

import deep_comm
from deep_comm.errors import ArgumentError, BufferDestroyed


@pytest.mark.parametrize("config", [None, deep_comm.Config(2, 4, 16)])
@pytest.mark.parametrize("with_layout", [False, True])
@pytest.mark.parametrize(
    "form", ["bf16", "fp8", "without-weights", "int32", "aligned-zeros", *CASTS]
)
def test_calls_with_a_bound_of_rows(form: str, with_layout: bool, config: Any) -> None:
    """And combine along their handles, which no call has seen before."""

    def body(buffer: Any, rank: int) -> None:
        given, options = form_of(form, rank, (T, 0)[rank])
        options.update(num_worst_tokens=R * T + 3, config=config)
        idx = options["topk_idx"]
        if form == "aligned-zeros":
            options.update(expert_alignment=4, zero_tail=True)
        spy = NormalSpy(buffer)

        def step() -> list[torch.Tensor]:
            layout = layout_of(buffer, idx)
            known = {**layout, "num_experts": None} if with_layout else {}
            got, recv_idx, recv_weights, counts, handle, event = buffer.dispatch(
                given, **{**options, **known}
            )
            assert counts == [] and event.event is None
            assert (recv_weights is None) == ("topk_weights" not in options)
            num_rows = int(handle.num_recv_tokens_tensor)
            parts = list(got) if isinstance(got, tuple) else [got]
            if form == "aligned-zeros":
                assert not parts[0][num_rows:].any()
            else:
                parts = [part[:num_rows] for part in parts]
            rows = (got[0] if isinstance(got, tuple) else got).bfloat16().nan_to_num(1.0)
            rows[num_rows:] = 1.0
            sums, weight_sums, _ = buffer.combine(rows, handle, recv_weights, config=config)
            assert (weight_sums is None) == (recv_weights is None)
            others = [recv_idx] if recv_weights is None else [recv_idx, recv_weights, weight_sums]
            assert handle.num_recv_tokens is None and handle.num_experts == E
            assert (handle.num_topk, handle.num_recv_rows) == (K, R * T + 3)
            fields = [*handle, handle.num_recv_tokens_per_expert, handle.num_recv_tokens_per_rank]
            return [*layout.values(), *parts, sums, *others, *fields]

        step()
        assert spy.made == [True, False, False]  # layouts need no call before
        spy.made.clear()
        one = step()
        assert spy.made == [True] * 3
        spy.is_off = True
        many = step()
        for number, (got, want) in enumerate(zip(one, many, strict=True)):
            assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
            assert torch.equal(got.float(), want.float()), number

    on_normal(body, num_direct_bytes=4 << 20)


def test_bounded_calls_in_doubt_are_left_to_python() -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)
        layout = layout_of(buffer, idx)
        per_expert, mask = layout["num_tokens_per_expert"], layout["is_token_in_rank"]

        def dispatch(x: Any = x, idx: Any = idx, weights: Any = weights, **given: Any) -> Any:
            given = {"num_experts": E, "num_worst_tokens": T, **given}
            return buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **given)

        for _ in range(2):
            dispatch()
            dispatch(**layout)
        spy = NormalSpy(buffer)
        dispatch()
        dispatch(**layout)
        buffer.get_dispatch_layout(idx, E)
        assert spy.made == [True] * 3
        spy.made.clear()
        launched = buffer._context.engine.num_launches
        free = buffer._context.region.num_free_bytes
        for wrong in (
            dict(x=x[:-1]), dict(idx=idx[:-1]), dict(idx=idx.float()), dict(idx=idx.t()),
            dict(weights=weights.double()), dict(weights=weights[:, :-1]), dict(idx=None),
            dict(num_experts="6"), dict(num_worst_tokens=-1), dict(num_worst_tokens=1.0),
            dict(expert_alignment=0), dict(x=x.t()),
            dict(layout, num_experts=E + 1), dict(layout, is_token_in_rank=None),
            dict(layout, is_token_in_rank=mask.int()), dict(layout, num_tokens_per_rank=None),
            dict(layout, num_tokens_per_expert=per_expert.long()), dict(num_experts=1 << 40),
        ):  # fmt: skip
            with pytest.raises((ArgumentError, TypeError)):
                dispatch(**wrong)
        for wrong in ((idx.float(), E), (idx, 0), (idx, "6"), (None, E), (idx.t(), E)):
            with pytest.raises(ArgumentError):
                buffer.get_dispatch_layout(*wrong)
        assert not any(spy.made)
        assert buffer._context.engine.num_launches == launched
        assert buffer._context.region.num_free_bytes == free
        bad = idx.clone()
        bad[1, 1] = E
        with pytest.raises(deep_comm.ExpertIndexError):
            dispatch(idx=bad)
        with pytest.raises(deep_comm.CapacityError):
            dispatch(num_worst_tokens=T - 1)
        with pytest.raises(deep_comm.CapacityError):
            dispatch(num_worst_tokens=T - 1)
        with pytest.raises(deep_comm.ExpertIndexError):
            buffer.get_dispatch_layout(bad, E)
        spy.made.clear()
        assert torch.equal(dispatch()[0], x)
        held = []  # until the region is full: then through the rings, into torch's memory
        while spy.made[-1]:
            held.append(dispatch())
        assert all(torch.equal(rows[0], x) for rows in held)
        first = held[0]
        assert torch.equal(first[4].recv_src_idx, torch.arange(T, dtype=torch.int32))
        assert len(held) > 3
        buffer.destroy()
        with pytest.raises(BufferDestroyed):
            dispatch()
        with pytest.raises(BufferDestroyed):
            buffer.get_dispatch_layout(idx, E)

    on_normal(body, 1, num_direct_bytes=1 << 20)
