"""Low-latency dispatch and combine on the host target, bit for bit, over shapes and options."""

import dataclasses
import random
from typing import Any

import fake_cuda
import forked
import pytest
import torch
from cases import verify_each
from low_latency import (
    LowLatencyCase,
    Pair,
    Range,
    check_logfmt,
    inputs_of,
    on_case,
    open_buffer,
    pairs_amid_normal_calls,
    run_case,
    run_pairs,
    verify,
)
from on_buffers import on_buffers
from schedules import on_threads, run_seeds

import deep_comm
from deep_comm import local, simulate
from deep_comm._core import low_latency_available_blocks as available_blocks

pytestmark = pytest.mark.usefixtures("poison")


RANGE = Range(
    max_tokens=(1, 2, 7, 16, 40), hidden=(8, 24, 128, 1160, 2048),
    hidden_fp8=(128, 384, 640, 1152, 2048), experts=(1, 3, 8, 19, 32), topk=(1, 2, 8, 33, 64),
    modes=("plain", "plain", "hook", "late", "async"),
)  # fmt: skip


def sampled_case(seed: int) -> LowLatencyCase:
    choose = random.Random(seed)
    return RANGE.draw(choose, choose.choice((1, 2, 3, 4, 5, 8)), calls=3, seed=seed)


def test_every_rank_gets_its_rows_and_sums() -> None:
    run_seeds(range(120), sampled_case, run_case, verify, on_threads)


@pytest.mark.parametrize(
    "case",
    [
        LowLatencyCase((9, 0, 16), 16, hidden=256, topk=3, use_fp8=True, calls=3),
        *(
            LowLatencyCase(
                (9, 0, 16, 5), 16, hidden=256, topk=3, use_fp8=True, calls=30, ranks_per_node=2,
                compact=compact, weights_ahead=compact,
            )
            for compact in (False, True)
        ),
    ],
    ids=["a node", "nodes", "nodes-compact"],
)  # fmt: skip
def test_ranks_may_be_processes(case: LowLatencyCase) -> None:
    verify(case, forked.run(run_case, case.num_ranks, case, timeout_s=100))


@pytest.mark.parametrize(("tokens", "ranks_per_node"), [((5, 8), None), ((5, 8, 3, 0), 2)])
def test_low_latency_and_normal_calls_mix_in_any_order(
    tokens: tuple[int, ...], ranks_per_node: int | None
) -> None:
    case = LowLatencyCase(
        tokens, 8, hidden=256, topk=3, use_fp8=True, calls=4, ranks_per_node=ranks_per_node
    )
    results = on_buffers(
        lambda buffer: pairs_amid_normal_calls(buffer, case), case.num_ranks, 1 << 20,
        max(case.num_bytes, 1 << 20), low_latency_mode=True, ranks_per_node=ranks_per_node,
    )  # fmt: skip
    verify(case, results)


@pytest.mark.parametrize(
    ("ranks_per_node", "fill"), [(None, None), (None, 0), (None, 0xFF), (2, None), (2, 0)]
)
def test_shapes_may_change_and_the_region_serve_as_workspace_from_call_to_call(
    ranks_per_node: int | None, fill: int | None
) -> None:
    """Halves keep their places, so that a call finds its own half, whatever came before. Anything
    else that is written there is cleaned before the next call."""
    cases = 2 * [
        dataclasses.replace(case, calls=3, ranks_per_node=ranks_per_node)
        for case in (
            LowLatencyCase((3, 7, 0, 4), 8, hidden=512, topk=4, mode="hook"),
            LowLatencyCase((30, 12, 5, 9), 32, hidden=128, topk=2, use_fp8=True),
            LowLatencyCase((1, 2, 2, 1), 2, hidden=1024, topk=8, compact=True),
        )
    ]
    num_bytes = max(case.num_bytes for case in cases)

    def main(buffer: deep_comm.Buffer) -> list:
        results = []
        region = buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True)
        assert region.numel() == num_bytes
        for case in cases:
            results.append(run_pairs(buffer, case))
            if fill is not None:
                buffer.group.barrier()
                region.fill_(fill)
                buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.experts)
                assert not region.any()
                buffer.group.barrier()  # the others' next rows come here
        return results

    results = on_buffers(
        main, 4, 0, num_bytes, low_latency_mode=True, ranks_per_node=ranks_per_node
    )
    verify_each(verify, cases, results)


KEYS = (0x7FA57F93, 0xFFFFFFFF, 0x00000000, 0x80008000, 0x7FA5C963, 0x0000FFFF, 0xFFFFFFFE)


def words(shape: tuple[int, ...], value: int) -> torch.Tensor:
    """bfloat16 of this shape; every pair of elements has these bits."""
    signed = value - (1 << 32) if value >= 1 << 31 else value
    pairs = torch.full((*shape[:-1], shape[-1] // 2), signed, dtype=torch.int32)
    return pairs.view(torch.bfloat16)


@pytest.mark.parametrize("ranks_per_node", [None, 1])
@pytest.mark.parametrize("compact", [False, True])
def test_rows_of_any_bits_arrive(compact: bool, ranks_per_node: int | None) -> None:
    """Also those whose words are, on their way, the zero that stands for not yet."""
    num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(
        8, 128, 2, 2, ranks_per_node=ranks_per_node
    )

    def main(group: Any) -> list[torch.Tensor]:
        with deep_comm.Buffer(
            group, 0, num_bytes, True, device="cpu", ranks_per_node=ranks_per_node
        ) as buffer:
            return received_by(buffer)

    def received_by(buffer: deep_comm.Buffer) -> list[torch.Tensor]:
        x = torch.cat([words((1, 128), value) for value in KEYS])
        idx = torch.full((len(KEYS), 1), 1 - buffer.rank)
        weights = words((len(KEYS), 2), 0x7FA5C963).view(torch.float32)
        for given in (torch.zeros(len(KEYS), 1), weights):
            rows, _, handle, _, _ = buffer.low_latency_dispatch(
                x, idx, 8, 2, use_fp8=False, topk_weights=given, compact=compact
            )
            ahead = handle.recv_topk_weights if compact else handle.recv_weights[1 - buffer.rank]
            assert_same(ahead[: len(KEYS)].view(-1, 1), given)
        received = [rows.view(-1, 128)[: len(KEYS)].view(torch.int32).clone()]
        fp8 = buffer.low_latency_dispatch(x, idx, 8, 2, compact=compact)[0][0]
        received.append(fp8.view(-1, 128)[: len(KEYS)].float())
        ones = torch.ones(len(KEYS), 1)
        handle = buffer.low_latency_dispatch(
            x, idx, 8, 2, use_fp8=False, topk_weights=ones, compact=compact
        )[2]
        for value in KEYS:
            out = buffer.low_latency_combine(words(handle.rows_shape, value), idx, ones, handle)[0]
            received.append(out)
        return received

    by_rank = local.run(main, 2, timeout_s=60)
    if ranks_per_node is not None:
        by_rank += simulate.run(main, 2, 3, timeout_s=60)
    for received in by_rank:
        for row, value in zip(received[0], KEYS, strict=True):
            # One pair of signalling NaNs has its first made quiet, as its conversion would; between
            # nodes it may.
            quiet = value if value != 0x7FA57F93 else 0x7FE57F93
            allowed = {quiet} if ranks_per_node is None else {quiet, value}
            assert {int(word) & 0xFFFFFFFF for word in row} <= allowed, hex(value)
        for row, value in zip(received[1], KEYS, strict=True):
            want = words((1, 128), value).float()[0]
            # Beside a NaN, and only there, other elements of a block are not the issue here.
            assert torch.equal(row.isnan(), want.isnan()), hex(value)
        for got, value in zip(received[2:], KEYS, strict=True):
            want = words((len(KEYS), 128), value).float() + 0.0
            assert_same(got.float(), want)


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got.isnan(), want.isnan())
    bits = [part.nan_to_num().contiguous().view(torch.int32) for part in (got, want)]
    assert torch.equal(*bits)


def test_statistics_add_up() -> None:
    case = LowLatencyCase((5, 8), 8, hidden=128, experts=6, topk=3)

    def main(buffer: deep_comm.Buffer) -> tuple:
        total = torch.zeros(3, dtype=torch.int32)
        waited = torch.zeros(2, dtype=torch.int64)
        pair = Pair(buffer, case, 0)
        counts = torch.zeros(3, dtype=torch.int32)
        for _ in range(3):
            _, count, handle, _, _ = buffer.low_latency_dispatch(
                pair.x, pair.idx, 8, 6, total, waited, False
            )
            counts += count
        rows = torch.zeros(handle.rows_shape, dtype=torch.bfloat16)
        buffer.low_latency_combine(
            rows, pair.idx, pair.weights, handle, combine_wait_recv_cost_stats=waited
        )
        return total, counts, waited

    for total, counts, waited in on_case(main, case):
        assert torch.equal(total, counts) and int(total.sum()) > 0
        assert bool((waited >= 0).all())


def test_many_pairs_in_a_row() -> None:
    case = LowLatencyCase((1, 3), 4, hidden=16, experts=4, calls=400)
    verify(case, local.run(lambda group: run_case(group, case), 2, timeout_s=100))


def test_the_handle_unpacks_as_a_tuple_of_five() -> None:
    case = LowLatencyCase((4, 4), 4)

    def main(buffer: deep_comm.Buffer) -> None:
        pair = Pair(buffer, case, 0)
        pair.dispatch()
        src_info, layout_range, max_tokens, hidden, experts = pair.handle
        assert src_info.shape == (4, 8) and layout_range.shape == (4, 2)
        assert (max_tokens, hidden, experts) == (4, 128, 8) == pair.handle[2:]

    on_case(main, case)


def test_memory_grows_with_tokens_and_ranks_not_with_experts() -> None:
    hint = deep_comm.Buffer.get_low_latency_rdma_size_hint
    assert hint(128, 7168, 8, 256) <= 96 << 20
    assert hint(128, 7168, 8, 256) == hint(128, 7168, 8, 8)
    assert hint(128, 7168, 8, 256) < 2.1 * hint(128, 7168, 4, 256)


# ---- long runs ---------------------------------------------------------------------------------

LAST = 0xFFFFFFFF


def pairs_from(group: Any, case: LowLatencyCase, sequence: int) -> list:
    """All calls of a case, as if ``sequence`` operations of each kind had run before."""
    with open_buffer(group, case, timeout_s=60) as buffer:
        group.barrier()
        assert buffer.runtime is not None
        buffer.runtime.set_low_latency_sequence(sequence)
        group.barrier()
        return run_pairs(buffer, case)


@pytest.mark.parametrize("mode", ["plain", "hook", "late"])
@pytest.mark.parametrize("before_wrap", range(5))
def test_numbers_of_operations_wrap_around(before_wrap: int, mode: str) -> None:
    case = LowLatencyCase((3, 0, 5), 5, hidden=64, experts=5, topk=3, calls=6, mode=mode)
    verify(case, local.run(lambda g: pairs_from(g, case, LAST - before_wrap), 3, timeout_s=60))


@pytest.mark.parametrize("seed", range(12))
def test_numbers_of_operations_wrap_around_under_every_schedule(seed: int) -> None:
    case = LowLatencyCase(
        (3, 0, 2), 3, hidden=32, experts=4, calls=6, seed=seed, mode=("hook", "late")[seed % 2]
    )
    sequence = LAST - seed % 4
    verify(case, simulate.run(lambda g: pairs_from(g, case, sequence), 3, seed, timeout_s=60))


@pytest.mark.parametrize("seed", range(4))
def test_numbers_of_operations_between_nodes_wrap_around(seed: int) -> None:
    case = LowLatencyCase((3, 2, 4, 1), 4, hidden=64, ranks_per_node=2, calls=8)
    verify(case, simulate.run(lambda g: pairs_from(g, case, LAST - 3), 4, seed, timeout_s=60))


@pytest.mark.parametrize(
    ("sequence", "num_pairs"), [(4, 900), (0x7FFFFFFF - 200, 400), (LAST - 200, 400)]
)
def test_hundreds_of_pairs_in_a_row(sequence: int, num_pairs: int) -> None:
    case = LowLatencyCase((1, 2), 2, hidden=16, experts=2, topk=1, calls=1)

    def main(buffer: deep_comm.Buffer) -> list:
        buffer.group.barrier()
        assert buffer.runtime is not None
        buffer.runtime.set_low_latency_sequence(sequence)
        buffer.group.barrier()
        pair = Pair(buffer, case, 0)
        for number in range(num_pairs):
            pair.x.fill_(number % 128)
            pair.dispatch()
            assert pair.rows is None or bool((pair.payload[0, 0] == number % 128).all())
            pair.combine()
        pair.x.copy_(inputs_of(case, buffer.rank, 0)[0])
        pair.dispatch()
        pair.combine()
        return [pair.received()]

    verify(case, on_case(main, case, timeout_s=60))


# ---- LogFMT ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, 4.0, 20.0, 60.0])
@pytest.mark.parametrize("variant", ["packed", "late", "compact"])
@pytest.mark.parametrize("ranks_per_node", [None, 2])
def test_logfmt_stays_within_its_stated_error(
    ranks_per_node: int | None, variant: str, scale: float
) -> None:
    case = LowLatencyCase(
        (5, 0, 8, 3), 8, hidden=1168, experts=7, topk=3, weights_ahead=variant == "packed",
        compact=variant == "compact", ranks_per_node=ranks_per_node,
    )  # fmt: skip
    check_logfmt(case, scale)


def test_logfmt_of_zeros_and_of_what_is_not_finite() -> None:
    num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(4, 64, 1, 1)

    def main(buffer: deep_comm.Buffer) -> list[torch.Tensor]:
        x, idx, ones = torch.ones(1, 64).bfloat16(), torch.zeros(1, 1).long(), torch.ones(1, 1)
        handle = buffer.low_latency_dispatch(x, idx, 4, 1, use_fp8=False)[2]
        results = []
        for value in (0.0, -0.0, 1e-38, 3e38, float("inf"), float("-inf"), float("nan")):
            rows = torch.full(handle.rows_shape, 1.5).bfloat16()
            rows[..., 16:32] = 0.0
            rows[..., 20] = value
            rows[..., 32:48] = value
            results.append(buffer.low_latency_combine(rows, idx, ones, handle, True)[0][0])
        return results

    *finite, inf, minus_inf, nan = on_buffers(main, 1, 0, num_bytes, low_latency_mode=True)[0]
    for value, got in zip((0.0, -0.0, 1e-38, 3e38), finite, strict=True):
        assert bool((got[:16] == 1.5).all() and (got[48:] == 1.5).all())
        want = torch.full((16,), value).bfloat16().float()
        assert torch.allclose(got[32:48].float(), want, rtol=1e-2, atol=0.0)
        assert bool((got[16:20] == 0).all() and (got[21:32] == 0).all())
    for got in (inf, minus_inf, nan):
        assert bool(got[16:48].isnan().all()) and bool((got[:16] == 1.5).all())


def test_logfmt_needs_whole_pieces_on_all_ranks() -> None:
    case = LowLatencyCase((2, 2), 2, hidden=24)

    def main(buffer: deep_comm.Buffer) -> None:
        pair = Pair(buffer, case, 0)
        pair.dispatch()
        rows = torch.zeros(pair.handle.rows_shape, dtype=torch.bfloat16)
        with pytest.raises(deep_comm.ArgumentError, match="multiple of 16"):
            buffer.low_latency_combine(rows, pair.idx, pair.weights, pair.handle, True)
        with pytest.raises(deep_comm.ArgumentError, match="zero_copy"):
            buffer.low_latency_combine(
                rows, pair.idx, pair.weights, pair.handle, True, zero_copy=True
            )

    on_case(main, case)


def test_destroy_waits_for_calls_on_streams_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Low-latency kernels run on any stream: the Buffer's own one says nothing about them."""
    happened: list[str] = []
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device: happened.append(f"{device} is idle")
    )

    def fn(group):
        buffer = deep_comm.Buffer(
            group, 0, deep_comm.Buffer.get_low_latency_rdma_size_hint(4, 128, 1, 4),
            low_latency_mode=True, device="cpu", timeout_s=20,
        )  # fmt: skip
        context = buffer._context
        monkeypatch.setattr(context.backend, "is_synchronous", False)
        close = context.heap.close
        monkeypatch.setattr(
            context.heap, "close", lambda: (happened.append("memory is free"), close())
        )
        buffer.destroy()

    local.run(fn, 1, timeout_s=60)
    assert happened == ["cpu is idle", "memory is free"]


def test_a_failure_is_forgotten_when_no_kernel_can_report_it_again() -> None:
    def fn(group):
        num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(4, 128, 1, 4)
        buffer = deep_comm.Buffer(group, 0, num_bytes, low_latency_mode=True, device="cpu")
        x = torch.zeros(2, 128, dtype=torch.bfloat16)
        idle = ("synchronize device",)
        log.clear()
        buffer.low_latency_dispatch(x, torch.tensor([[0], [99]]), 4, 4, use_fp8=False)
        assert idle not in log  # nobody has looked yet
        with pytest.raises(deep_comm.ExpertIndexError):
            buffer.check()
        assert log.count(idle) == 1
        buffer.low_latency_dispatch(x, torch.tensor([[0], [1]]), 4, 4, use_fp8=False)
        buffer.destroy()

    with fake_cuda.installed() as log:
        local.run(fn, 1, timeout_s=60)


def test_blocks_are_a_multiple_of_eight_unless_somebody_names_a_number() -> None:
    """Tokens are mostly a power of two; blocks that get none cost time."""
    assert [available_blocks(num_sms, None) for num_sms in (132, 114, 78, 8, 7, 3, 1)] == [
        128, 112, 72, 8, 7, 3, 1,
    ]  # fmt: skip
    assert [available_blocks(132, wanted) for wanted in (1, 100, 131, 500)] == [1, 100, 131, 132]
