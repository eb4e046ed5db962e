"""Options of low-latency calls: what they give, which exclude each other, and in which order
streams run them."""

from __future__ import annotations

import itertools
from typing import Any

import fake_cuda
import pytest
import torch
from low_latency import LowLatencyCase, run_case, verify
from run_by import run_by
from small_calls import E, H, K, M, R, T, Told, inputs, on_ranks, on_streams

import deep_comm
from deep_comm import _core, local
from deep_comm.errors import ArgumentError, BufferTooSmall
from deep_comm.events import TensorsEvent
from deep_comm.reference.low_latency import rows_of_scale_tiles

COMBINES: dict[str, dict[str, bool]] = {
    "plain": {},
    "zero_copy": dict(zero_copy=True),
    "one_rounding": dict(one_rounding=True),
    "zero_copy-one_rounding": dict(zero_copy=True, one_rounding=True),
}


@pytest.mark.parametrize("mode", ["plain", "async", "hook"])
@pytest.mark.parametrize(
    ("form", "compact"),
    # Compact rows have been reduced already.
    [*((form, False) for form in COMBINES), ("plain", True), ("zero_copy", True)],
)
def test_options_of_combine_give_the_same_sums(form: str, compact: bool, mode: str) -> None:
    """In the first call and in later ones."""
    options = COMBINES[form]
    case = LowLatencyCase(
        (T, T - 1), M, hidden=H, experts=E, topk=K, use_fp8=True, compact=compact, calls=3,
        mode=mode, **options,
    )  # fmt: skip
    verify(case, local.run(lambda group: run_case(group, case, timeout_s=20), R, timeout_s=120))


@pytest.mark.parametrize("ranks_per_node", [None, 1])
@pytest.mark.parametrize("tokens", [(5, 0, 3), (4, 4, 4), (0, 0, 0)])
def test_global_indices_are_valid_ones_of_another_rank_where_nothing_is_selected(
    tokens: tuple[int, ...], ranks_per_node: int | None
) -> None:
    """Also in rows past the received ones; the third rank has fewer experts than the first."""
    case = LowLatencyCase(
        tokens, 6, experts=7, topk=4, routing="holes", compact=True, global_topk_idx=True,
        weights_ahead=True, mode="hook", ranks_per_node=ranks_per_node,
    )  # fmt: skip
    results = local.run(lambda group: run_case(group, case, timeout_s=20), 3, timeout_s=120)
    verify(case, results)
    for rank, calls in enumerate(results):
        for got in calls:
            local_ids = torch.arange(7)[[slice(0, 3), slice(3, 5), slice(5, 7)][rank]]
            idx, is_given = got.recv_topk_idx, got.recv_topk_weights != 0
            assert bool((torch.isin(idx, local_ids) == is_given).all())
            assert 0 <= int(idx.min()) <= int(idx.max()) < 7
            assert not is_given[got.num_recv_tokens :].any()


@pytest.mark.parametrize("way", ["sync", "async", "hook"])
@pytest.mark.parametrize("compact", [False, True])
def test_logfmt_gives_the_same_sums_however_it_is_called(compact: bool, way: str) -> None:
    how = {"sync": {}, "async": dict(async_finish=True), "hook": dict(return_recv_hook=True)}[way]

    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank, T - rank)
        generator = torch.Generator().manual_seed(rank)
        sums = []
        for options in ({}, how, how):
            stats = torch.zeros(E // R, dtype=torch.int32)
            waits = torch.zeros(2, R, dtype=torch.int64)
            _, count, handle, event, hook = buffer.low_latency_dispatch(
                x, idx, M, E, stats, waits[0], compact=compact, **options
            )
            finish(event, hook, options)
            rows = torch.randn(handle.rows_shape, generator=generator.manual_seed(rank)).bfloat16()
            combined, event, hook = buffer.low_latency_combine(
                rows, idx, weights, handle, use_logfmt=True, combine_wait_recv_cost_stats=waits[1],
                **options,
            )  # fmt: skip
            finish(event, hook, options)
            assert torch.equal(stats, count)
            sums.append(combined)
        exact = buffer.low_latency_combine(rows, idx, weights, handle)[0]
        assert all(torch.equal(each, sums[0]) for each in sums)
        assert not torch.equal(exact, sums[0])  # it was rounded
        assert torch.allclose(exact.float(), sums[0].float(), rtol=0.05, atol=0.1)

    def finish(event: Any, hook: Any, options: dict[str, bool]) -> None:
        assert (hook is not None) == ("return_recv_hook" in options)
        assert (event.event is not None) == ("async_finish" in options)
        if hook is not None:
            hook()
        if event.event is not None:
            event.current_stream_wait()

    on_ranks(body)


@run_by(on_ranks)
def test_a_global_scale_may_have_any_shape(buffer: Any, rank: int, /) -> None:
    x, idx, _ = inputs(rank)

    def parts(**options: Any) -> list[torch.Tensor]:
        (rows, scales), count, *_ = buffer.low_latency_dispatch(
            x, idx, M, E, use_nvfp4=True, **options
        )
        scales = rows_of_scale_tiles(scales.view(torch.uint8), rows.shape[1])
        return [
            part[expert, :number]
            for part in (rows, scales)
            for expert, number in enumerate(count.tolist())
        ]

    want = parts(x_global_scale=torch.tensor(2.5))
    for shape in ((1,), (1, 1)):
        got = parts(x_global_scale=torch.full(shape, 2.5))
        assert all(map(torch.equal, got, want))
    assert not all(map(torch.equal, parts(), want))  # it was not left out


@run_by(on_ranks, 1)
def test_options_that_exclude_each_other_are_named(buffer: Any, rank: int, /) -> None:
    x, idx, weights = inputs(rank)
    for _ in range(2):  # of a form that is known, too
        handle = buffer.low_latency_dispatch(x, idx, M, E)[2]
    rows = torch.ones(handle.rows_shape, dtype=torch.bfloat16)
    launched = buffer._context.engine.num_launches
    with pytest.raises(ArgumentError, match="x_global_scale"):
        buffer.low_latency_dispatch(x, idx, M, E, x_global_scale=torch.ones(1))
    with pytest.raises(ArgumentError, match="async_finish"):
        buffer.low_latency_dispatch(x, idx, M, E, async_finish=True, return_recv_hook=True)
    with pytest.raises(ArgumentError, match="global_topk_idx needs compact"):
        buffer.low_latency_dispatch(x, idx, M, E, global_topk_idx=True)
    with pytest.raises(ArgumentError, match="global_topk_idx.*needs two ranks that have experts"):
        buffer.low_latency_dispatch(x, idx, M, E, compact=True, global_topk_idx=True)

    def combine(**options: Any) -> Any:
        return buffer.low_latency_combine(rows, idx, weights, handle, **options)

    with pytest.raises(ArgumentError, match="async_finish"):
        combine(async_finish=True, return_recv_hook=True)
    with pytest.raises(ArgumentError, match="zero_copy"):
        combine(zero_copy=True)  # there is no buffer yet
    buffer.get_next_low_latency_combine_buffer(handle)
    with pytest.raises(ArgumentError, match="use_logfmt"):
        combine(zero_copy=True, use_logfmt=True)
    with pytest.raises(ArgumentError, match="use_logfmt"):
        combine(one_rounding=True, use_logfmt=True)
    compact = buffer.low_latency_dispatch(x, idx, M, E, compact=True)[2]
    with pytest.raises(ArgumentError, match="one_rounding"):
        buffer.low_latency_combine(rows[0], idx, weights, compact, one_rounding=True)
    assert buffer._context.engine.num_launches == launched + 1


@run_by(local.run, 1, timeout_s=60)
def test_one_rounding_without_room_is_refused(group: local.ThreadGroup, /) -> None:
    x, idx, weights = inputs(0)
    sizes = dict(num_ranks=1, num_max_tokens=M, hidden=H, num_topk=K, num_experts=E)
    sizes.update(num_blocks=3, is_internode=False, can_shrink=False)
    exact = max(
        _core.Engine.low_latency_region_bytes(**sizes, format=name) for name in ("fp8", "bfloat16")
    )
    with deep_comm.Buffer(
        group, 0, exact, low_latency_mode=True, device="cpu", timeout_s=20
    ) as buffer:
        for _ in range(2):
            handle = buffer.low_latency_dispatch(x, idx, M, E)[2]
        rows = torch.ones(handle.rows_shape, dtype=torch.bfloat16)
        with pytest.raises(BufferTooSmall, match="num_rdma_bytes"):
            buffer.low_latency_combine(rows, idx, weights, handle, one_rounding=True)


@pytest.mark.parametrize("current", [fake_cuda.COMPUTE, fake_cuda.COMM])
@run_by(on_streams)
def test_asynchronous_calls_run_on_the_communication_stream(
    buffer: Any, log: fake_cuda.Log, told: Told, /, current: int
) -> None:
    """Events keep what they read and write (test_tensors_event.py)."""
    x, idx, weights = inputs(0)
    stats = torch.zeros(E, dtype=torch.int32)
    log.current = current
    is_elsewhere = current != fake_cuda.COMM
    for _ in range(2):
        log.clear()
        payload, _, handle, event, _ = buffer.low_latency_dispatch(
            x, idx, M, E, stats, topk_weights=weights, async_finish=True
        )
        event.current_stream_wait()
        rows = torch.ones(handle.rows_shape, dtype=torch.bfloat16)
        combined, event, _ = buffer.low_latency_combine(rows, idx, None, handle, async_finish=True)
        event.current_stream_wait()
        orders = [("order", current, fake_cuda.COMM)] if is_elsewhere else []
        want = []
        for name in ("low_latency_dispatch", "low_latency_combine"):
            want += orders + [
                (name, fake_cuda.COMM), ("record", fake_cuda.COMM),
                ("mark", fake_cuda.COMM), ("wait", current),
            ]  # fmt: skip
        assert list(log) == want
        assert told == []
    assert torch.isfinite(combined).all() and len(payload) == 2


@run_by(on_streams)
def test_tensors_of_a_captured_asynchronous_call_are_torchs_allocators_to_keep(
    buffer: Any, log: fake_cuda.Log, told: Told, /
) -> None:
    """An event of a capture cannot be asked whether it has passed."""
    x, idx, _ = inputs(0)
    for is_capturing in (True, False, True):
        told.clear()
        log.capturing.clear()
        if is_capturing:
            log.capturing.add(log.current)
        payload, _, handle, event, _ = buffer.low_latency_dispatch(x, idx, M, E, async_finish=True)
        event.current_stream_wait()
        tensors = {each.data_ptr() for each in (*payload, handle.metadata, x, idx)}
        assert {address for address, _ in told} == (tensors if is_capturing else set())
        assert isinstance(event.event, TensorsEvent) != is_capturing
    log.capturing.clear()


@run_by(on_ranks, 1)
def test_forms_of_every_option_are_counted(buffer: Any, rank: int, /) -> None:
    """One plan serves every kind of combine of its shape; nothing grows with calls."""
    x, idx, weights = inputs(rank)
    handle = buffer.low_latency_dispatch(x, idx, M, E)[2]
    buffer.get_next_low_latency_combine_buffer(handle)
    rows = torch.ones(handle.rows_shape, dtype=torch.bfloat16)
    for use_logfmt, async_finish in itertools.product((False, True), repeat=2):
        buffer.low_latency_combine(
            rows, idx, weights, handle, use_logfmt=use_logfmt, async_finish=async_finish
        )
    assert buffer._low_latency.num_forms == 1
