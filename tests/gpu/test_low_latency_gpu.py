"""tests/cpu/test_low_latency.py on GPUs, and CUDA graphs; every rank is a process."""

import random

import gpu_pool
import low_latency
import pytest
import torch
from low_latency import LowLatencyCase, Pair, inputs_of, run_pairs, verify

import deep_comm

POISON = {"DEEP_COMM_POISON": "1"}
ROUTINGS = ("random", "skewed", "holes", "one_expert", "none", "duplicates")


def run(fn, num_ranks: int, *args: object) -> list:
    return gpu_pool.shared().run(
        fn, num_ranks, *args, backend="gloo", devices=range(num_ranks), variables=POISON,
        timeout_s=280,
    )  # fmt: skip


def require(num_ranks: int) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} CUDA devices")


def sampled_case(seed: int, num_ranks: int) -> LowLatencyCase:
    choose = random.Random(seed * 8 + num_ranks)
    max_tokens = choose.choice((1, 16, 128, 300))
    use_fp8 = choose.random() < 0.5
    compact = choose.random() < 0.4
    round_scale = use_fp8 and choose.random() < 0.5
    return LowLatencyCase(
        tuple(choose.choice((0, 1, max_tokens // 2, max_tokens)) for _ in range(num_ranks)),
        max_tokens,
        hidden=choose.choice((128, 2048, 7168) if use_fp8 else (8, 1160, 7168)),
        experts=choose.choice((3, 19, 64)),
        topk=choose.choice((1, 4, 8)),
        routing=choose.choice(ROUTINGS),
        use_fp8=use_fp8,
        round_scale=round_scale,
        use_ue8m0=round_scale and choose.random() < 0.5,
        compact=compact,
        weights_ahead=choose.random() < 0.4,
        one_rounding=not compact and choose.random() < 0.35,
        mode=choose.choice(("plain", "hook", "late", "async")),
        zero_copy=choose.random() < 0.3,
        calls=2,
        seed=seed,
    )


def run_cases(group, cases: list[LowLatencyCase]) -> list:
    device = torch.device("cuda", group.rank())
    num_bytes = max(case.num_bytes for case in cases)
    with deep_comm.Buffer(
        group, 0, num_bytes, low_latency_mode=True, device=device, timeout_s=60
    ) as buffer:
        return [run_pairs(buffer, case) for case in cases]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.gpu
def test_every_rank_gets_its_rows_and_sums(num_ranks: int) -> None:
    require(num_ranks)
    cases = [sampled_case(seed, num_ranks) for seed in range(24)]
    results = run(run_cases, num_ranks, cases)
    for number, case in enumerate(cases):
        try:
            verify(case, [ranks[number] for ranks in results])
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def replay_graphs(group, case: LowLatencyCase) -> list:
    """Two graphs of one and two pairs, and eager pairs, in turn; inputs change between replays."""
    device = torch.device("cuda", group.rank())
    results = []
    with deep_comm.Buffer(
        group, 0, case.num_bytes, low_latency_mode=True, device=device, timeout_s=60
    ) as buffer:
        pairs = [Pair(buffer, case, 0) for _ in range(3)]
        for pair in pairs:  # what is made on first use, before the capture
            for stage in (pair.dispatch, pair.combine):
                hook = stage()
                if hook is not None:
                    hook()
        graphs = []
        torch.cuda.synchronize()
        group.barrier()
        for part in (pairs[:1], pairs[1:]):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for pair in part:
                    for stage in (pair.dispatch, pair.combine):
                        hook = stage()
                        if hook is not None:
                            hook()
            graphs.append((graph, part))
        for call in range(case.calls):
            eager = Pair(buffer, case, call)
            x, idx, weights = inputs_of(case, buffer.rank, call)
            for pair in pairs:
                pair.x.copy_(x)
                pair.idx.copy_(idx)
                pair.weights.copy_(weights)
                pair.call = call
            graph, part = graphs[call % 2]
            graph.replay()
            torch.cuda.synchronize()
            results.append([pair.received() for pair in part][-1])
            if call % 3 == 0:
                for stage in (eager.dispatch, eager.combine):
                    hook = stage()
                    if hook is not None:
                        hook()
        buffer.check()
    return results


@pytest.mark.parametrize("mode", ["plain", "hook"])
@pytest.mark.gpu
def test_graphs_and_eager_calls_alternate(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The rows that combine gets are those of call 0: they are inputs of the capture.
    case = LowLatencyCase(
        (32, 32), 32, hidden=1024, experts=16, topk=4, use_fp8=True, mode=mode, calls=10
    )
    results = run(replay_graphs, 2, case)
    rows = low_latency.expert_rows
    monkeypatch.setattr(low_latency, "expert_rows", lambda case, rank, call: rows(case, rank, 0))
    verify(case, results)


def many_pairs(group, case: LowLatencyCase, num_pairs: int) -> list:
    device = torch.device("cuda", group.rank())
    with deep_comm.Buffer(
        group, 0, case.num_bytes, low_latency_mode=True, device=device, timeout_s=60
    ) as buffer:
        pair = Pair(buffer, case, 0)
        for _ in range(num_pairs):
            pair.dispatch()
            pair.combine()
        torch.cuda.synchronize()
        buffer.check()
        return [pair.received()]


@pytest.mark.gpu
def test_ten_thousand_pairs_in_a_row() -> None:
    case = LowLatencyCase((16, 9), 16, hidden=512, experts=8, topk=4, calls=1)
    verify(case, run(many_pairs, 2, case, 10_000))
