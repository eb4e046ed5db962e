"""test_low_latency.py on GPUs, and CUDA graphs; every rank is a process."""

import dataclasses
import random

import low_latency
import pytest
import torch
from cases import verify_each
from gpu_cases import on_gpus, run
from graph_bodies import captured
from low_latency import LowLatencyCase, Pair, Range, open_buffer, run_on_gpu, verify

import deep_comm
from deep_comm.reference import low_latency as reference_low_latency

RANGE = Range(
    max_tokens=(1, 16, 128, 300), hidden=(8, 1160, 7168), hidden_fp8=(128, 2048, 7168),
    experts=(3, 19, 64), topk=(1, 4, 8),
)  # fmt: skip


def sampled_case(seed: int, num_ranks: int) -> LowLatencyCase:
    return RANGE.draw(random.Random(seed * 8 + num_ranks), num_ranks, calls=2, seed=seed)


def check(cases: list[LowLatencyCase]) -> None:
    verify_each(verify, cases, run(run_on_gpu, cases[0].num_ranks, cases, 60.0))


@on_gpus(2, 4, 8)
def test_rows_of_four_bits(num_ranks: int) -> None:
    cases = [
        dataclasses.replace(
            sampled_case(500 + seed, num_ranks), use_fp8=False, round_scale=False, use_ue8m0=False,
            use_nvfp4=True, hidden=(64, 2048, 7168, 1088)[seed % 4],
        )
        for seed in range(12)
    ]  # fmt: skip
    check(cases)


@on_gpus(2, 3, 4, 8)
def test_every_rank_gets_its_rows_and_sums(num_ranks: int) -> None:
    cases = [sampled_case(seed, num_ranks) for seed in range(24)]
    check(cases)


def replay_graphs(group, case: LowLatencyCase) -> list:
    """Two graphs of one and two pairs, and eager pairs, in turn; inputs change between replays."""
    device = torch.device("cuda", group.rank())
    results = []
    with open_buffer(group, case, device=device, timeout_s=60) as buffer:
        pairs = [Pair(buffer, case, 0) for _ in range(3)]
        for pair in pairs:  # what is made on first use, before the capture
            pair.run()
        graphs = []
        torch.cuda.synchronize()
        group.barrier()
        for part in (pairs[:1], pairs[1:]):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for pair in part:
                    pair.run()
            graphs.append((graph, part))
        for call in range(case.calls):
            eager = Pair(buffer, case, call)
            for pair in pairs:
                pair.become(call, with_rows=False)
            graph, part = graphs[call % 2]
            graph.replay()
            torch.cuda.synchronize()
            results.append([pair.received() for pair in part][-1])
            if call % 3 == 0:
                eager.run()
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
    with open_buffer(group, case, device=device, timeout_s=60) as buffer:
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


def alternate_graphs(group, case: LowLatencyCase) -> list:
    """A graph for each number of tokens, replayed in turn with new rows, routings and expert rows;
    between them eager pairs and normal calls."""
    device = torch.device("cuda", group.rank())
    results = []
    with deep_comm.Buffer(
        group, 64 << 20, case.num_bytes, low_latency_mode=True, device=device, timeout_s=60
    ) as buffer:
        pairs = [Pair(buffer, case, number) for number in range(case.num_ranks)]
        for pair in pairs:
            pair.run()  # what is made on first use, before the capture
        graphs = [captured(pair.run, group)[0] for pair in pairs]
        normal = torch.full((6, 64), 1.0 + buffer.rank, dtype=torch.bfloat16, device=device)
        normal_idx = (torch.arange(6, device=device) % case.num_ranks).unsqueeze(1)
        for call in range(case.calls):
            pair = pairs[call % case.num_ranks]
            pair.become(call)
            graphs[call % case.num_ranks].replay()
            torch.cuda.synchronize()
            results.append(pair.received())
            if call % 3 == 1:
                Pair(buffer, case, call).run()
            if call % 4 == 2:
                received = buffer.dispatch(
                    normal, topk_idx=normal_idx, topk_weights=torch.ones(6, 1, device=device),
                    num_experts=case.num_ranks,
                )  # fmt: skip
                assert torch.equal(buffer.combine(received[0], received[4])[0], normal)
        buffer.check()
    return results


@pytest.mark.parametrize("variant", ["packed", "hook", "compact", "late_weights"])
@on_gpus(2, 4)
def test_graphs_of_other_token_counts_alternate(num_ranks: int, variant: str) -> None:
    case = LowLatencyCase(
        (32, 9, 0, 17)[:num_ranks], 32, hidden=1024, experts=16, topk=4, use_fp8=True,
        mode="hook" if variant == "hook" else "plain", compact=variant == "compact",
        weights_ahead=variant != "late_weights", calls=16,
    )  # fmt: skip
    verify(case, run(alternate_graphs, num_ranks, case))


def log_combine(group, hidden: int) -> list:
    device = torch.device("cuda", group.rank())
    num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(16, hidden, 2, 4)
    with deep_comm.Buffer(group, 0, num_bytes, low_latency_mode=True, device=device) as buffer:
        generator = torch.Generator().manual_seed(5)  # the same rows on both ranks
        x = torch.zeros(16, hidden, dtype=torch.bfloat16, device=device)
        idx = torch.tensor([[0, 2]], device=device).repeat(16, 1)  # one expert of each rank
        weights = torch.tensor([[0.5, 0.25]], device=device).repeat(16, 1)
        handle = buffer.low_latency_dispatch(x, idx, 16, 4, topk_weights=weights)[2]
        shape = handle.rows_shape
        rows = torch.exp2(torch.rand(*shape, generator=generator) * 20 - 10) * (
            torch.randint(0, 2, shape, generator=generator) * 2 - 1
        )
        rows = rows.to(torch.bfloat16)
        combined = buffer.low_latency_combine(rows.to(device), idx, None, handle, True)[0]
        own = rows[0, 16 * buffer.rank : 16 * buffer.rank + 16].float()
        partials = [0.5 * own, 0.25 * own]
        bound = sum(reference_low_latency.logfmt_bound(part) for part in partials) * 1.001
        bound += (partials[0] + partials[1]).abs() * 2.0**-8
        off = (combined.cpu().float() - partials[0] - partials[1]).abs()
        return [bool((off <= bound).all())]


@pytest.mark.gpu
def test_logfmt_stays_within_its_stated_error() -> None:
    assert run(log_combine, 2, 7168) == [[True], [True]]
