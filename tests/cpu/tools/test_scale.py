"""The cost model counts what the real kernels send, keeps to its own bounds, and
docs/scale.md shows what it says.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import InternodeCase, Scales, make_inputs
from schedules import ALL_SEEDS

import deep_comm
from deep_comm import _core, simulate
from deep_comm.bench.workload import Workload, routing_of
from deep_comm.errors import ArgumentError
from deep_comm.ranks.topology import first_expert, num_local_experts
from deep_comm.scale import low_latency, tables
from deep_comm.scale.__main__ import main, updated
from deep_comm.scale.machine import H200, H800
from deep_comm.scale.queues import serve
from deep_comm.scale.routing import MAX_NODES_PER_TOKEN, ROUTINGS, Job
from deep_comm.scale.traffic import Posts, Traffic, Wire, count, count_job

PAGE = Path(__file__).resolve().parents[3] / "docs" / "scale.md"
SHAPES = [(2, 2), (2, 4), (4, 2), (3, 3), (8, 1), (3, 2)]
LOW_LATENCY_SHAPES = [*SHAPES, (8, 8)]
ROUTING_NAMES = ("random", "skewed", "holes", "one_expert", "duplicates")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small operations: more threads are slower, and other tests run beside."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


# ---- what is sent --------------------------------------------------------------------------------


def case_of(seed: int) -> InternodeCase:
    choose = random.Random(seed)
    num_nodes, ranks_per_node = SHAPES[seed % len(SHAPES)]
    num_ranks = num_nodes * ranks_per_node
    return InternodeCase(
        tuple(choose.choice((0, 1, 7, 20, 40)) for _ in range(num_ranks)),
        hidden=choose.choice((16, 48, 80)), experts=choose.choice((num_ranks, 2 * num_ranks + 1)),
        topk=choose.choice((1, 3, 4)), scales=choose.choice((None, Scales(3, torch.float32))),
        routing=choose.choice(ROUTING_NAMES), num_sms=choose.choice((2, 4, 6)), send_chunk=2,
        slots=6, rail_chunk=choose.choice((1, 2, 3)), rail_slots=choose.choice((6, 7)),
        num_qps=choose.choice((1, 4)), nvl_bytes=1 << 18, rdma_bytes=1 << 19,
        ranks_per_node=ranks_per_node, seed=seed,
    )  # fmt: skip


def counted(case: InternodeCase) -> list[Posts]:
    """What the simulated network counted: an uncached dispatch, a cached one, a combine."""

    def snapshot(group: Any) -> Posts:
        group.barrier()  # everybody's kernels have ended
        posts = torch.zeros(3, case.num_ranks, case.num_nodes, dtype=torch.int64)
        for traffic in group.simulation.rail_traffic() if group.rank() == 0 else ():
            numbers = (traffic.num_puts, traffic.num_put_bytes, traffic.num_signals)
            posts[:, traffic.rank, traffic.node] += torch.tensor(numbers)
        group.barrier()
        return posts

    def main(group: Any) -> list[Posts]:
        inputs = make_inputs(case, group.rank(), 0)
        x = inputs.x if inputs.scales is None else (inputs.x, inputs.scales)
        config = case.config()
        with deep_comm.Buffer(
            group, case.nvl_bytes, case.rdma_bytes, num_qps_per_rank=case.num_qps, device="cpu",
            ranks_per_node=case.ranks_per_node, timeout_s=60,
        ) as buffer:  # fmt: skip
            seen = [snapshot(group)]
            recv, _, weights, _, handle, _ = buffer.dispatch(
                x, topk_idx=inputs.topk_idx, topk_weights=inputs.topk_weights,
                num_experts=case.experts, config=config,
            )  # fmt: skip
            seen.append(snapshot(group))
            buffer.dispatch(x, handle=handle, config=config)
            seen.append(snapshot(group))
            y = recv[0] if isinstance(recv, tuple) else recv
            buffer.combine(y, handle, topk_weights=weights, config=config)
            seen.append(snapshot(group))
        return [after - before for before, after in zip(seen, seen[1:], strict=False)]

    posted = simulate.run(main, case.num_ranks, case.seed, timeout_s=60)[0]
    return [Posts(*numbers) for numbers in posted]


def traffic_of(case: InternodeCase, num_channels: int) -> Traffic:
    routings = [make_inputs(case, rank, 0).topk_idx for rank in range(case.num_ranks)]
    return count(routings, case.num_ranks, case.ranks_per_node, case.experts, num_channels)


def wire_of(case: InternodeCase, num_topk: int) -> Wire:
    scales = 0 if case.scales is None else case.scales.num * case.scales.dtype.itemsize
    row_bytes = case.hidden * case.dtype.itemsize
    config = case.config()
    assert config is not None
    return Wire.of(config, row_bytes, scales, num_topk, case.hidden * 2)


def notify_posts(traffic: Traffic, wire: Wire) -> Posts:
    """Counts to every other node in one put, with one signal."""
    first = [
        first_expert(node * traffic.ranks_per_node, traffic.num_experts, traffic.num_ranks)
        for node in range(traffic.num_nodes)
    ]
    num_experts = torch.diff(torch.tensor([*first, traffic.num_experts])).tolist()
    sizes = [
        _core.notify_bytes(wire.num_channels, traffic.ranks_per_node, num) for num in num_experts
    ]
    remote = traffic.is_remote.long()
    return Posts(remote, remote * torch.tensor(sizes), remote)


def combine_bounds(traffic: Traffic, wire: Wire) -> tuple[Posts, Posts]:
    """(fewest, most): a sum per row; how many sums a put holds depends on which are finished."""
    rows = traffic.to_node * traffic.is_remote[:, :, None]
    back = traffic.back(rows.sum(2))
    fewest = traffic.back((-(-rows // wire.batch)).sum(2))
    # At entry: where that node's sums have places, and that this rank has come.
    entry = 2 * traffic.is_remote.long()
    credits = (rows // min(wire.batch, wire.num_slots)).sum(2) + entry
    num_bytes = back * wire.combine_slot_bytes
    return Posts(fewest, num_bytes, fewest + credits), Posts(back, num_bytes, back + credits)


def dispatch_puts(
    traffic: Traffic, slot_bytes: int, hands_on: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [R, N], by rank and other node: puts and bytes of this engine's
    dispatch, counts included.

    Args:
        hands_on: bool [R], whether a rank sends a token once to a node,
            and not to every rank there.
    """
    num_ranks, num_local = traffic.num_ranks, traffic.ranks_per_node
    to_ranks = traffic.to_rank.view(num_ranks, -1, num_local).sum(2)
    rows = torch.where(hands_on[:, None], traffic.to_node.sum(2), to_ranks)
    counts = torch.tensor(
        [
            _core.low_latency_count_bytes(num_local_experts(rank, traffic.num_experts, num_ranks))
            for rank in range(num_ranks)
        ]
    )
    remote = traffic.is_remote.long()
    num_bytes = rows * slot_bytes + counts.view(-1, num_local).sum(1)
    return (rows + num_local) * remote, num_bytes * remote


def combine_puts(
    traffic: Traffic, row_bytes: int, num_topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [R, R], by rank and rank of another node: a sum back for every row, ahead
    of it the token's weights.
    """
    rows = traffic.to_rank * traffic.is_remote.repeat_interleave(traffic.ranks_per_node, 1).long()
    return rows + rows.t(), rows * 8 * num_topk + rows.t() * row_bytes


@pytest.mark.parametrize("seed", range(18))
def test_predicted_messages_and_bytes_are_those_of_the_simulated_network(seed: int) -> None:
    case = case_of(seed)
    uncached, cached, combined = counted(case)
    wire = wire_of(case, case.topk)
    traffic = traffic_of(case, wire.num_channels)
    told, moved = notify_posts(traffic, wire), traffic.dispatch_posts(wire)
    both = zip(vars(told).values(), vars(moved).values(), strict=True)
    assert_same(uncached, Posts(*(one + other for one, other in both)))
    assert_same(cached, traffic.dispatch_posts(wire_of(case, 0)))
    fewest, most = combine_bounds(traffic, wire)
    assert torch.equal(combined.num_put_bytes, fewest.num_put_bytes)
    assert (fewest.num_puts <= combined.num_puts).all() and (
        combined.num_puts <= most.num_puts
    ).all()
    assert (fewest.num_signals <= combined.num_signals).all()
    assert (combined.num_signals <= most.num_signals).all()


def assert_same(got: Posts, want: Posts) -> None:
    assert torch.equal(got.num_put_bytes, want.num_put_bytes)
    assert torch.equal(got.num_puts, want.num_puts)
    assert torch.equal(got.num_signals, want.num_signals)


def test_cases_reach_credits_and_several_puts() -> None:
    """Otherwise the comparison above would say nothing of them."""
    most_rows = most_slots = 0
    for seed in range(18):
        case = case_of(seed)
        wire = wire_of(case, case.topk)
        traffic = traffic_of(case, wire.num_channels)
        rows = traffic.to_node * traffic.is_remote[:, :, None]
        most_rows = max(most_rows, int((rows // wire.batch).max()))
        most_slots = max(most_slots, int((rows - wire.num_slots).max()))
    assert most_rows > 3 and most_slots > wire.batch


@pytest.mark.parametrize("seed", range(len(LOW_LATENCY_SHAPES)))
def test_predicted_low_latency_puts_are_those_of_the_simulated_network(seed: int) -> None:
    num_nodes, ranks_per_node = LOW_LATENCY_SHAPES[seed]
    num_ranks = num_nodes * ranks_per_node
    hidden, num_experts, num_topk = 512, 2 * num_ranks + seed % 3, 3
    max_tokens, hand_on = 6, 4  # both ways, since a rank decides for itself
    choose = random.Random(seed)
    num_tokens = [choose.choice((0, hand_on - 1, hand_on, max_tokens)) for _ in range(num_ranks)]
    routings = [
        torch.rand(num, num_experts, generator=torch.Generator().manual_seed(rank))
        .topk(num_topk)
        .indices
        for rank, num in enumerate(num_tokens)
    ]
    num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(
        max_tokens, hidden, num_ranks, num_experts, ranks_per_node=ranks_per_node
    )

    def snapshot(group: Any) -> torch.Tensor:
        group.barrier()
        posts = torch.zeros(2, num_ranks, num_ranks, dtype=torch.int64)
        for traffic in group.simulation.rail_traffic() if group.rank() == 0 else ():
            if traffic.node >= num_nodes:  # peers behind the nodes are the ranks of the group
                numbers = torch.tensor((traffic.num_puts, traffic.num_put_bytes))
                posts[:, traffic.rank, traffic.node - num_nodes] += numbers
        group.barrier()
        return posts

    def main(group: Any) -> list[torch.Tensor]:
        topk_idx = routings[group.rank()]
        x = torch.ones(len(topk_idx), hidden, dtype=torch.bfloat16)
        with deep_comm.Buffer(
            group, 0, num_bytes, low_latency_mode=True, num_qps_per_rank=2, device="cpu",
            ranks_per_node=ranks_per_node, timeout_s=60,
        ) as buffer:  # fmt: skip
            assert buffer.runtime.low_latency_hand_on_tokens == 8  # as docs/scale.md says
            buffer.runtime.low_latency_hand_on_tokens = hand_on
            seen = [snapshot(group)]
            recv, _, handle, _, _ = buffer.low_latency_dispatch(
                x, topk_idx, max_tokens, num_experts, use_fp8=True
            )
            seen.append(snapshot(group))
            y = torch.ones(recv[0].shape, dtype=torch.bfloat16)
            buffer.low_latency_combine(y, topk_idx, torch.ones(topk_idx.shape), handle)
            seen.append(snapshot(group))
        return [after - before for before, after in zip(seen, seen[1:], strict=False)]

    sent, back = simulate.run(main, num_ranks, seed, timeout_s=100)[0]
    traffic = count(routings, num_ranks, ranks_per_node, num_experts, 1)
    slot_bytes = _core.low_latency_slot_bytes(hidden, hidden // 128, num_topk)
    hands_on = torch.tensor(num_tokens) >= hand_on
    by_node = sent.view(2, num_ranks, num_nodes, ranks_per_node).sum(3)
    for got, wanted in (
        (by_node, dispatch_puts(traffic, slot_bytes, hands_on)),
        (back, combine_puts(traffic, 2 * hidden, num_topk)),
    ):
        assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
    assert sent[0].sum() > 0


def test_batches_that_do_not_fill_a_ring_are_refused() -> None:
    job = Job(16, 64, 256, 32, 4)
    wire = Wire(2, 5, 12, 4, 512, 512, 512)
    with pytest.raises(ArgumentError, match="multiple of 5"):
        count_job(job, 2).dispatch_posts(wire)


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 8])
def test_order_of_nodes_is_that_of_the_kernels(num_nodes: int) -> None:
    for channel in range(12):
        for step in range(num_nodes):
            assert _core.combine_node(channel, step, num_nodes) == (channel + step) % num_nodes
            for node in range(num_nodes):
                to = (node + channel + step) % num_nodes
                assert _core.dispatch_node(node, channel, step, num_nodes) == to


@pytest.mark.parametrize(("num_tokens", "num_channels"), [(4096, 12), (7, 3), (5, 8), (1, 1)])
def test_channels_are_those_of_the_kernels(num_tokens: int, num_channels: int) -> None:
    """Every token to a node of its own channel."""
    job = Job(16, num_tokens, 128, 16, 1)
    per_channel = count(
        [torch.full((num_tokens, 1), 15)] * 16, 16, 8, job.num_experts, num_channels
    )
    for channel in range(num_channels):
        begin, end = _core.channel_range(num_tokens, num_channels, channel)
        assert int(per_channel.to_node[0, 1, channel]) == end - begin


# ---- routings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", ROUTINGS)
def test_tokens_choose_distinct_experts(routing: str) -> None:
    job = Job(64, 200, num_experts=256, routing=routing)
    for topk_idx in job.routings():
        assert topk_idx.shape == (200, 8) and topk_idx.min() >= 0 and topk_idx.max() < 256
        assert (topk_idx.sort(1).values.diff(dim=1) > 0).all()
        if routing == "limited":
            nodes = (topk_idx // 32).sort(1).values
            assert ((nodes.diff(dim=1) > 0).sum(1) < MAX_NODES_PER_TOKEN).all()


@pytest.mark.parametrize("routing", ["uniform", "zipf"])
def test_popularity_is_that_of_the_bench(routing: str) -> None:
    """Sorted by popularity: which expert is how popular is random in both."""
    job = Job(8, 4096, num_experts=64, routing=routing)
    shape = Workload(8, 4096, 64, 64, 8, routing=routing)
    ours = torch.cat(list(job.routings())).flatten().bincount(minlength=64).sort().values
    others = [routing_of(shape, rank).topk_idx for rank in range(8)]
    theirs = torch.cat(others).flatten().bincount(minlength=64).sort().values
    assert torch.allclose(ours.double(), theirs.double(), rtol=0.06)


def test_limited_routing_is_that_of_scores() -> None:
    """The same law as scores for all experts, of which the best of the best nodes are taken."""
    job = Job(64, 8192, num_experts=256, routing="limited")
    drawn = next(iter(job.routings()))
    scores = torch.rand(8192, 8, 32, generator=torch.Generator().manual_seed(5))
    best = scores.amax(2).topk(MAX_NODES_PER_TOKEN, dim=1).indices
    kept = torch.zeros(8192, 8, dtype=torch.bool).scatter_(1, best, True)
    wanted = (scores * kept[:, :, None]).flatten(1).topk(8, dim=1).indices
    shares = []
    for topk_idx in (drawn, wanted):
        per_node = torch.nn.functional.one_hot(topk_idx // 32, 8).sum(1)
        shares.append(per_node.flatten().bincount(minlength=9).double() / per_node.numel())
        assert torch.allclose(
            topk_idx.flatten().bincount(minlength=256).double(),
            torch.tensor(256.0).double(),
            rtol=0.35,
        )
    assert torch.allclose(shares[0], shares[1], atol=0.01), shares


# ---- times ---------------------------------------------------------------------------------------


def test_queue_serves_first_come_first_served() -> None:
    free = torch.tensor([5.0, 0.0])
    ready = torch.tensor([[9.0, 1.0, 30.0], [2.0, 2.0, 4.0]])
    work = torch.tensor([[3.0, 6.0, 2.0], [0.0, 4.0, 0.0]])
    done, free = serve(free, ready, work)
    assert done[0].tolist() == [14.0, 11.0, 32.0] and done[1, 1] == 6.0
    assert free.tolist() == [32.0, 6.0]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("num_ranks", [8, 16, 40, 128])
@pytest.mark.parametrize("num_sms", [4, 24])
def test_times_lie_between_their_bounds(num_ranks: int, routing: str, num_sms: int) -> None:
    """No resource works faster than it can; together they are not slower
    than one after the other.
    """
    job = Job(num_ranks, 512, num_experts=320 if num_ranks == 40 else 256, routing=routing)
    for times in tables.normal_times(job, num_sms, H800):
        alone = (times.nic_us, times.nvlink_us, times.sm_us)
        assert times.total_us >= max(alone)
        steps_us = job.num_nodes * 4 * H800.nic_latency_us
        assert times.total_us <= H800.call_us + 2.5 * sum(alone) + steps_us


def test_quicker_machines_and_fewer_rows_take_less() -> None:
    def times(num_tokens: int, **rates: float) -> list[float]:
        job = Job(64, num_tokens, routing="limited")
        machine = H800.__class__("", **{"nic_gb_per_s": 50.0, "nvlink_gb_per_s": 140.0, **rates})
        return [each.total_us for each in tables.normal_times(job, 24, machine)]

    base = times(2048)
    for other in (times(1024), times(2048, nic_gb_per_s=100.0), times(2048, sm_gb_per_s=300.0)):
        assert all(less <= more for less, more in zip(other, base, strict=True))
    assert all(more > less for more, less in zip(times(2048, nic_gb_per_s=10.0), base, strict=True))


def test_low_latency_rows_follow_the_ways() -> None:
    job = Job(64, 128)
    traffic = count_job(job, 1)
    rows = {
        way: low_latency.dispatch(job, traffic, H200, way).rail_rows for way in low_latency.WAYS
    }
    assert rows["expert"] > rows["rank"] > rows["node"] > 0
    assert rows["expert"] == int(
        (traffic.selections * traffic.is_remote.repeat_interleave(8, 1)).sum(1).max()
    )
    with pytest.raises(ArgumentError, match="way"):
        low_latency.dispatch(job, traffic, H200, "pigeon")


def test_two_thousand_ranks_take_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    started = time.process_time()
    assert main(["job", "--ranks", "2048", "--tokens", "128", "--routing", "limited"]) == 0
    assert "dispatch" in capsys.readouterr().out
    assert time.process_time() - started < 60  # of the processor; about 10


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(num_ranks=0), "num_ranks must be an integer of at least 1"),
        (dict(num_ranks=12), "multiple of ranks_per_node"),
        (dict(num_ranks=16, routing="nearest"), "uniform, zipf, limited"),
        (dict(num_ranks=16, dtype="fp4"), "fp8 or bf16"),
        (dict(num_ranks=16, num_topk=300), "1..num_experts"),
        (dict(num_ranks=24, routing="limited"), "multiple of the 3 nodes"),
    ],
)
def test_impossible_jobs_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Job(**fields)


def test_the_command_says_why_a_job_is_impossible(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["job", "--ranks", "12"])
    assert ended.value.code == 2 and "multiple of ranks_per_node" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    ["--nic 0", "--nic nan", "--nic -1", "--nvlink 0", "--sms 0", "--sms 257", "--experts 0",
     "--hidden 7", "--hidden 24", "--tokens 0", "--topk 0", "--ranks 0", "--seed -1"],
)  # fmt: skip
def test_values_that_no_job_has_are_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["job", *given.split()])
    told = capsys.readouterr().err.splitlines()
    begin = f"python -m deep_comm.scale job: error: argument {given.split()[0]}: must be "
    assert len(told) == 2 and told[0].startswith(begin)
    least = ["--tokens", "1", "--hidden", "16", "--sms", "1", "--nic", "0.1", "--nvlink", "0.1"]
    assert main(["job", "--ranks", "2", "--experts", "2", "--topk", "1", *least]) == 0


# ---- the page ------------------------------------------------------------------------------------


def test_fitted_figures_are_met() -> None:
    fitted = [figure for figure in tables.FIGURES if figure.fitted]
    assert len(fitted) == 2  # as many as there are fitted parameters
    for figure in fitted:
        job, modelled = tables.modelled_us(figure)
        published = tables._published_us(figure, job)
        index = ("dispatch", "combine").index(figure.fitted)
        assert modelled[index] == pytest.approx(published[index], rel=0.01)


_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


def differences(written: str, made: str) -> list[str]:
    """Lines that differ by more than rounding: logarithms differ between
    processors in their last bit.
    """
    found = []
    for line, wanted in zip(written.splitlines(), made.splitlines(), strict=True):
        same = _NUMBER.sub("0", line) == _NUMBER.sub("0", wanted)
        for one, other in zip(_NUMBER.findall(line), _NUMBER.findall(wanted), strict=False):
            unit = 10.0 ** -len(one.partition(".")[2])
            same &= abs(float(one) - float(other)) <= max(1.01 * unit, 0.005 * abs(float(other)))
        if not same:
            found.append(f"{line}\nnow: {wanted}")
    return found


def test_page_shows_every_table_as_the_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting what 256 ranks and more send takes longest: every night."""
    page = PAGE.read_text()
    if not ALL_SEEDS:
        for name in ("SIZES", "COUNTED_SIZES", "SKEW_SIZES"):
            few = [num_ranks for num_ranks in getattr(tables, name) if num_ranks <= 128]
            monkeypatch.setattr(tables, name, few)
        page, num_left_out = re.subn(r"(?m)^\| (256|512|1024|2048) \|.*\n", "", page)
        assert num_left_out == 15
    for name in tables.TABLES:
        assert page.count(f"<!-- python -m deep_comm.scale {name} -->\n|") == 1, name
    assert not differences(page, updated(page)), (
        "run: python -m deep_comm.scale update docs/scale.md"
    )


def test_differences_are_noticed() -> None:
    assert not differences("| 16 | 1403 | +31 % |", "| 16 | 1405 | +31 % |")
    for other in ("| 16 | 1503 | +31 % |", "| 16 | 1403 | -31 % |", "| 16 | 1403 | fitted |"):
        assert differences("| 16 | 1403 | +31 % |", other)


def test_pages_that_cannot_be_rewritten_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- python -m deep_comm.scale foo -->\n")
    for path, words in ((tmp_path, "is not a file"), (page, "there is no table foo")):
        with pytest.raises(SystemExit, match="2"):
            main(["update", str(path)])
        assert words in capsys.readouterr().err
    assert page.read_text().endswith("foo -->\n")


def test_page_that_is_out_of_date_is_noticed() -> None:
    table = "<!-- python -m deep_comm.scale memory -->\n| a |\n| --- |\n| 1 |\n"
    assert updated(table) != table
    assert updated(updated(table) + "\nend\n") == updated(table) + "\nend\n"
