"""Low-latency dispatch and combine on the host target, bit for bit, over shapes and options."""

import random

import pytest
import torch
from low_latency import LowLatencyCase, Pair, run_case, run_pairs, verify

import deep_comm
from deep_comm import local, processes

ROUTINGS = ("random", "skewed", "holes", "one_expert", "none", "duplicates")


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_POISON", "1")


def sampled_case(seed: int) -> LowLatencyCase:
    choose = random.Random(seed)
    num_ranks = choose.choice((1, 2, 3, 4, 5, 8))
    max_tokens = choose.choice((1, 2, 7, 16, 40))
    use_fp8 = choose.random() < 0.5
    round_scale = use_fp8 and choose.random() < 0.6
    compact = choose.random() < 0.4
    return LowLatencyCase(
        tuple(choose.choice((0, 1, max_tokens // 2, max_tokens)) for _ in range(num_ranks)),
        max_tokens,
        hidden=choose.choice((128, 384, 640, 1152, 2048) if use_fp8 else (8, 24, 128, 1160, 2048)),
        experts=choose.choice((1, 3, 8, 19, 32)),
        topk=choose.choice((1, 2, 8, 33, 64)),
        routing=choose.choice(ROUTINGS),
        idx_dtype=choose.choice((torch.int64, torch.int32)),
        use_fp8=use_fp8,
        round_scale=round_scale,
        use_ue8m0=round_scale and choose.random() < 0.5,
        compact=compact,
        weights_ahead=choose.random() < 0.4,
        one_rounding=not compact and choose.random() < 0.35,
        mode=choose.choice(("plain", "plain", "hook", "late", "async")),
        zero_copy=choose.random() < 0.3,
        calls=3,
        seed=seed,
    )


@pytest.mark.parametrize("first_seed", range(0, 120, 20))
def test_every_rank_gets_its_rows_and_sums(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 20):
        case = sampled_case(seed)
        try:
            results = local.run(
                lambda group, case=case: run_case(group, case), case.num_ranks, timeout_s=60
            )
            verify(case, results)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {case}: {error}") from error


def test_ranks_may_be_processes() -> None:
    case = LowLatencyCase((9, 0, 16), 16, hidden=256, topk=3, use_fp8=True, calls=3)
    verify(case, processes.run(run_case, 3, case, timeout_s=100))


def test_low_latency_and_normal_calls_mix_in_any_order() -> None:
    case = LowLatencyCase((5, 8), 8, hidden=256, topk=3, use_fp8=True, calls=4)

    def main(group: local.ThreadGroup) -> list:
        results = []
        with deep_comm.Buffer(
            group, 1 << 20, case.num_bytes, low_latency_mode=True, device="cpu"
        ) as buffer:
            x = torch.full((6, 64), 1.0 + buffer.rank, dtype=torch.bfloat16)
            idx, ones = torch.arange(6).unsqueeze(1) % 2, torch.ones(6, 1)
            for call in range(case.calls):
                pair = Pair(buffer, case, call)
                received = buffer.dispatch(
                    x, topk_idx=idx, topk_weights=ones, num_experts=2
                )
                pair.dispatch()
                combined = buffer.combine(received[0], received[4])[0]
                assert torch.equal(combined, x)
                pair.combine()
                results.append(pair.received())
        return results

    verify(case, local.run(main, 2, timeout_s=60))


def test_shapes_may_change_from_call_to_call() -> None:
    """Halves keep their places, so that a call finds its own half, whatever came before."""
    cases = [
        LowLatencyCase((3, 7), 8, hidden=512, topk=4, calls=3, mode="hook"),
        LowLatencyCase((30, 12), 32, hidden=128, topk=2, use_fp8=True, calls=3),
        LowLatencyCase((1, 2), 2, hidden=1024, topk=8, compact=True, calls=3),
    ]

    def main(group: local.ThreadGroup) -> list:
        num_bytes = max(case.num_bytes for case in cases)
        with deep_comm.Buffer(group, 0, num_bytes, low_latency_mode=True, device="cpu") as buffer:
            return [run_pairs(buffer, case) for case in (*cases, *cases)]

    results = local.run(main, 2, timeout_s=60)
    for number, case in enumerate((*cases, *cases)):
        verify(case, [ranks[number] for ranks in results])


def test_zeroing_the_region_between_calls_breaks_nothing() -> None:
    case = LowLatencyCase((5, 8, 2), 8, hidden=256, topk=3, use_fp8=True, calls=1)

    def main(group: local.ThreadGroup) -> list:
        results = []
        with deep_comm.Buffer(
            group, 0, case.num_bytes, low_latency_mode=True, device="cpu"
        ) as buffer:
            region = buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True)
            assert region.numel() == case.num_bytes
            for fill in (0, 0, 255, 0, 1):
                results.append(run_pairs(buffer, case))
                group.barrier()
                region.fill_(fill)
                group.barrier()
                buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.experts)
        return results

    results = local.run(main, 3, timeout_s=60)
    for number in range(5):
        verify(case, [ranks[number] for ranks in results])


def test_statistics_add_up() -> None:
    case = LowLatencyCase((5, 8), 8, hidden=128, experts=6, topk=3)

    def main(group: local.ThreadGroup) -> tuple:
        with deep_comm.Buffer(
            group, 0, case.num_bytes, low_latency_mode=True, device="cpu"
        ) as buffer:
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

    for total, counts, waited in local.run(main, 2, timeout_s=60):
        assert torch.equal(total, counts) and int(total.sum()) > 0
        assert bool((waited >= 0).all())


def test_out_is_written_in_place() -> None:
    case = LowLatencyCase((5, 8), 8)

    def main(group: local.ThreadGroup) -> bool:
        with deep_comm.Buffer(
            group, 0, case.num_bytes, low_latency_mode=True, device="cpu"
        ) as buffer:
            pair = Pair(buffer, case, 0)
            pair.dispatch()
            out = torch.empty(pair.x.shape, dtype=torch.bfloat16)
            rows = torch.ones(pair.handle.rows_shape, dtype=torch.bfloat16)
            weights = torch.full(pair.weights.shape, 0.5)
            result, _, _ = buffer.low_latency_combine(
                rows, pair.idx, weights, pair.handle, out=out
            )
            return result is out and bool((out == 1).all())

    assert local.run(main, 2, timeout_s=60) == [True, True]


def test_many_pairs_in_a_row() -> None:
    case = LowLatencyCase((1, 3), 4, hidden=16, experts=4, calls=400)
    verify(case, local.run(lambda group: run_case(group, case), 2, timeout_s=100))


def test_the_handle_unpacks_as_a_tuple_of_five() -> None:
    case = LowLatencyCase((4, 4), 4)

    def main(group: local.ThreadGroup) -> None:
        with deep_comm.Buffer(
            group, 0, case.num_bytes, low_latency_mode=True, device="cpu"
        ) as buffer:
            pair = Pair(buffer, case, 0)
            pair.dispatch()
            src_info, layout_range, max_tokens, hidden, experts = pair.handle
            assert src_info.shape == (4, 8) and layout_range.shape == (4, 2)
            assert (max_tokens, hidden, experts) == (4, 128, 8) == pair.handle[2:]

    local.run(main, 2, timeout_s=60)


def test_memory_grows_with_tokens_and_ranks_not_with_experts() -> None:
    hint = deep_comm.Buffer.get_low_latency_rdma_size_hint
    assert hint(128, 7168, 8, 256) <= 96 << 20
    assert hint(128, 7168, 8, 256) == hint(128, 7168, 8, 8)
    assert hint(128, 7168, 8, 256) < 2.1 * hint(128, 7168, 4, 256)
