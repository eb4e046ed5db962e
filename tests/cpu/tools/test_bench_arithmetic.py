"""What the bench computes: bytes, percentiles, routings, expected results, choices, verdicts."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from payload import assert_same_bits

from deep_comm import Config, reference
from deep_comm.bench import (
    grouped,
    host_time,
    link,
    measure,
    normal,
    operations,
    options,
    payload,
    plot,
    report,
    targets,
    tune,
    workload,
)
from deep_comm.bench.expected import Expected
from deep_comm.bench.measure import Effort, Sample, Timing
from deep_comm.bench.workload import Volume, Workload
from deep_comm.topology import num_local_experts

SMALL = Workload(num_ranks=3, num_tokens=12, hidden=160, num_experts=7, num_topk=2)
HOST = torch.device("cpu")


# ---- bytes
# ------------------------------------------------------------------------------------------


def test_volume_is_that_of_the_busiest_rank_and_direction() -> None:
    rows = [[5, 1, 2], [3, 7, 0], [4, 6, 1]]
    # received 12, 14, 3; from others 7, 7, 2; to others 3, 3, 10
    assert workload.volume(rows, 100) == Volume(logical_bytes=1400, wire_bytes=1000)
    assert workload.volume(rows, 100, beside_bytes=4) == Volume(1400, 1040)


def test_bytes_of_a_row() -> None:
    assert (SMALL.row_bytes, SMALL.combine_row_bytes, SMALL.num_scales) == (320, 320, 0)
    fp8 = replace(SMALL, dtype="fp8")
    assert (fp8.row_bytes, fp8.combine_row_bytes, fp8.num_scales) == (160 + 8, 320, 2)


def test_uncached_rows_carry_index_expert_indices_and_weights() -> None:
    rows = workload.rows_between(SMALL)
    bare = workload.volume(rows, 320)
    cached = workload.dispatch_volume(SMALL, is_cached=True)
    uncached = workload.dispatch_volume(SMALL, is_cached=False)
    num_rows = bare.wire_bytes // 320
    assert cached.wire_bytes == num_rows * 324
    assert uncached.wire_bytes == num_rows * (320 + 4 + 2 * (8 + 4))
    assert cached.logical_bytes == uncached.logical_bytes == bare.logical_bytes
    assert workload.combine_volume(SMALL) == bare


def test_rate_is_bytes_by_mean_time() -> None:
    assert line("dispatch", 100.0).rate(34_200_000) == pytest.approx(342.0)


# ---- routing
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", workload.ROUTINGS)
def test_routings_choose_distinct_experts_and_weights_sum_to_one(routing: str) -> None:
    shape = replace(SMALL, routing=routing)
    for rank in range(3):
        made = workload.routing_of(shape, rank)
        again = workload.routing_of(shape, rank)
        assert_same_bits(made.topk_idx, again.topk_idx, "repeatable")
        assert made.topk_idx.shape == (shape.num_tokens_of(rank), 2)
        for chosen in made.topk_idx.tolist():
            taken = [expert for expert in chosen if expert >= 0]
            assert len(taken) == len(set(taken)) and all(expert < 7 for expert in taken)
        assert torch.allclose(made.topk_weights.sum(1), torch.ones(shape.num_tokens_of(rank)))


def test_all_to_one_sends_everything_to_rank_0() -> None:
    rows = workload.rows_between(replace(SMALL, routing="all-to-one"))
    assert rows == [[12, 0, 0]] * 3


def test_the_idle_rank_sends_nothing_and_still_receives() -> None:
    rows = workload.rows_between(replace(SMALL, routing="idle-rank"))
    assert rows[2] == [0, 0, 0] and rows[0][2] + rows[1][2] > 0


def test_zipf_has_favourites() -> None:
    shape = Workload(1, 4000, 16, 64, 1, routing="zipf")
    counts = torch.bincount(workload.routing_of(shape, 0).topk_idx.flatten(), minlength=64)
    ordered = counts.sort(descending=True).values
    total = sum(1 / n for n in range(1, 65))
    assert ordered[0] == pytest.approx(4000 / total, rel=0.15)
    assert ordered[0] > 5 * ordered[20]


# ---- expected results
# -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", workload.DTYPES)
@pytest.mark.parametrize("routing", workload.ROUTINGS)
def test_expected_results_are_those_of_the_reference(dtype: str, routing: str) -> None:
    shape = replace(SMALL, dtype=dtype, routing=routing)
    ranks = [Expected(shape, rank, HOST, 2) for rank in range(3)]
    for slot in range(2):
        dispatched = reference.dispatch(
            [rank.x(slot) for rank in ranks],
            [rank.topk_idx for rank in ranks],
            shape.num_experts,
            [rank.topk_weights for rank in ranks],
        )
        outputs = [rank.expert_output(slot) for rank in ranks]
        combined = reference.combine(outputs, dispatched)
        for rank, want, (total, _) in zip(ranks, dispatched, combined, strict=True):
            rows = rank.recv_x(slot)
            received, scales = rows if isinstance(rows, tuple) else (rows, None)
            assert_same_bits(received.view(torch.uint8), want.recv_x.view(torch.uint8), "rows")
            if scales is not None:
                assert want.recv_x_scales is not None
                assert_same_bits(scales, want.recv_x_scales, "scales")
            assert_same_bits(rank.combined(slot), total, "sum")
            assert rank.plan.num_recv_tokens_per_expert == want.num_recv_tokens_per_expert
        if dtype == "bf16":
            echoes = reference.combine([rank.recv_x(slot) for rank in ranks], dispatched)
            for rank, (total, _) in zip(ranks, echoes, strict=True):
                assert_same_bits(rank.echoed(slot), total, "echo")


@pytest.mark.parametrize("dtype", workload.DTYPES)
@pytest.mark.parametrize("routing", workload.ROUTINGS)
def test_grouped_results_are_those_of_the_reference(dtype: str, routing: str) -> None:
    shape = replace(SMALL, dtype=dtype, routing=routing)
    ranks = [Expected(shape, rank, HOST, 2) for rank in range(3)]
    dispatched = reference.dispatch(
        [rank.x(1) for rank in ranks],
        [rank.topk_idx for rank in ranks],
        shape.num_experts,
        [rank.topk_weights for rank in ranks],
    )
    rows = []
    for rank, plain in zip(ranks, dispatched, strict=True):
        num_local = num_local_experts(rank.rank, shape.num_experts, shape.num_ranks)
        want = reference.expand(plain, num_local, grouped.ALIGNMENT)
        mine = rank.grouped()
        payload_rows: Any = want.recv_x
        if want.recv_x_scales is not None:
            payload_rows = want.recv_x, want.recv_x_scales
        counts = want.expert_offsets.diff().tolist()
        result = (payload_rows, want.recv_topk_idx, want.recv_topk_weights, counts, None, None)
        assert mine.dispatch_is_right(result, 1)
        assert mine.num_rows == len(want.recv_x) <= grouped.most_rows(shape) or routing != "uniform"
        assert want.recv_topk_weights is not None
        for spoiled in (want.recv_topk_idx, want.recv_topk_weights, want.recv_x):
            if int(plain.num_recv_tokens) == 0:
                break
            place = int((want.recv_topk_idx >= 0).nonzero()[-1])
            spoiled.view(torch.uint8).view(len(spoiled), -1)[place, 0] ^= 1
            assert not mine.dispatch_is_right(result, 1)
            spoiled.view(torch.uint8).view(len(spoiled), -1)[place, 0] ^= 1
        rows.append(reference.reduce_experts(mine.outputs(1), want, want.recv_topk_weights))
    for rank, (total, _) in zip(ranks, reference.combine(rows, dispatched), strict=True):
        assert_same_bits(rank.grouped().combined(1), total, "sum")


def test_rows_differ_by_source_token_slot_and_salt_and_are_finite() -> None:
    tokens = torch.arange(40)
    rows = [
        payload.bf16_rows(payload.row_keys(rank, tokens, slot, salt), 96)
        for rank, slot, salt in itertools.product(range(3), range(3), range(3))
    ]
    everything = torch.cat(rows)
    assert torch.isfinite(everything.float()).all()
    assert len(everything.view(torch.int16).unique(dim=0)) == len(everything)
    values = everything.float().abs()
    assert values.min() >= 2**-7 and values.max() < 2 and (everything < 0).any()


def test_same_bits_sees_the_sign_of_zero_and_the_dtype() -> None:
    zero = torch.zeros(2, 3)
    assert payload.same_bits(zero, zero.clone())
    assert not payload.same_bits(zero, -zero)
    assert not payload.same_bits(zero, zero.view(torch.int32))
    assert not payload.same_bits(zero, zero[:1])


# ---- times
# ------------------------------------------------------------------------------------------


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert measure.percentile(values, 0.5) == 50
    assert measure.percentile(values, 0.99) == 99
    assert measure.percentile(values, 1.0) == 100
    assert measure.percentile([7.0], 0.5) == measure.percentile([7.0], 0.99) == 7.0
    assert measure.percentile([1.0, 9.0], 0.99) == 9.0


def test_a_call_takes_as_long_as_its_slowest_rank() -> None:
    samples = [
        Sample([10, 30, 20], calls_us=[1, 8, 3, 4], hosts_us=[5, 6, 7], firsts_us=[90, 50, 70]),
        Sample([14, 28, 21], calls_us=[2, 1, 9, 4], hosts_us=[1, 1, 2], firsts_us=[60, 95, 80]),
    ]
    timing = measure.summarise(samples, with_host=True)
    assert timing == Timing(
        mean_us=21, best_us=14, p50_us=4, p99_us=9, spread_us=2, host_us=6, fastest_host_us=1,
        first_us=90,
    )  # fmt: skip
    assert measure.summarise(samples, with_host=False).host_us is None


def test_host_time_outlasts_a_slow_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stretch of six turns takes twice as long on one rank; the largest turn says so."""
    rounds = iter([12.0] * 5 + [24.0] * 6 + [30.0] + [13.0] * 3)
    pauses: list[float] = []
    monkeypatch.setattr(host_time, "host_round", lambda _work, _calls, _clock: (next(rounds), 99.0))
    monkeypatch.setattr(host_time, "gather", lambda own: [own, [10.0] * len(own)])
    monkeypatch.setattr(host_time.time, "sleep", pauses.append)
    (found,) = host_time.in_turns([lambda _call: None], 200, torch.device("cpu"))
    assert found == host_time.HostTime(slowest_us=13.0, fastest_us=10.0, largest_us=30.0)
    assert len(pauses) == host_time.NUM_TURNS - 1 and sum(pauses) > 0.9
    timing = found.put_into(Timing(1, 1, 1, 1, 0, host_us=24.0))
    assert (timing.host_us, timing.largest_host_us, timing.mean_us) == (13.0, 30.0, 1)
    said = host_time.describe_largest("host time", [timing, Timing(1, 1, 1, 1, 0, host_us=5.0)])
    assert "by form: 13.0 µs" in said and said.endswith("rank 30.0")
    assert host_time.in_turns([], 200, torch.device("cpu")) == []
    assert host_time.describe_largest("host time", []) == ""


class FakeClock:
    """Each call takes 10 us, a mark 1 us, a flush 100 us."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_starts = self.num_flushes = 0

    def start_together(self, *, flush: bool) -> None:
        self.num_starts += 1
        self.num_flushes += flush
        self.now += 100 * flush

    def mark(self) -> float:
        self.now += 1
        return self.now

    def finish(self) -> None:
        pass

    def between_us(self, begin: Any, end: Any) -> float:
        return end - begin


@pytest.mark.parametrize("flush", [False, True])
def test_samples_hold_rounds_and_single_calls(flush: bool) -> None:
    clock, calls = FakeClock(), []

    def work(call: int) -> None:
        calls.append(call)
        clock.now += 10

    effort = Effort(num_warmup=2, num_calls=5, num_rounds=3, num_single_calls=7, flush_l2=flush)
    sample = measure.take_sample(work, effort, clock, calls_per_work=2)
    assert len(sample.means_us) == len(sample.hosts_us) == 3
    if flush:
        assert sample.means_us == [5.5] * 3 and sample.calls_us == [5.5] * 15
        assert clock.num_flushes == clock.num_starts == 15
        assert len(calls) == 2 + 15
    else:
        assert sample.means_us == [5.1] * 3 and sample.calls_us == [5.5] * 7
        assert clock.num_flushes == 0 and clock.num_starts == 4
        assert sample.firsts_us == [5.5] * 3
        assert calls == [0, 1, *range(6), *range(6), *range(6), *range(7)]


# ---- reports
# ----------------------------------------------------------------------------------------


def line(name: str, mean_us: float, **changes: Any) -> normal.Measured:
    fields: dict[str, Any] = {
        "workload": Workload(4, 4096, 7168, 256, 8),
        "name": name,
        "mode": "direct",
        "sms": "24",
        "num_sms": 24,
        "config": (6, 256),
        "execution": "eager",
        "timing": Timing(mean_us, mean_us, mean_us, mean_us, 0.0, 15.0),
        "volume": Volume(200_000_000, 150_000_000),
        "host_waits": False,
        "is_rival": False,
        "limit_fraction": 0.9,
    }
    return normal.Measured(**{**fields, **changes})


def verdict_of(lines: list[normal.Measured], name: str, num_ranks: int = 4) -> targets.Verdict:
    (verdict,) = (v for v in targets.judge(lines, num_ranks) if v.target.name == name)
    return verdict


def test_targets_look_at_the_lines_that_they_are_about() -> None:
    fp8 = Workload(4, 4096, 7168, 256, 8, "fp8")
    rival = {"mode": "", "sms": "", "num_sms": None, "config": None, "is_rival": True}
    lines = [
        line("dispatch cached", 480.0),
        line("dispatch cached", 450.0, num_sms=64, sms="64"),
        line("dispatch cached", 300.0, execution="graph"),
        line("dispatch cached", 200.0, workload=fp8),
        line("dispatch cached", 610.0, mode="ring"),
        line("dispatch", 520.0),
        line("dispatch", 400.0, num_sms=64, sms="64"),
        line("NCCL all_to_all_single", 540.0, **rival),
    ]
    cached = verdict_of(lines, "dispatch BF16 cached, 4096 tokens, <= 24 SMs")
    assert (cached.measured, cached.limit, cached.is_met) == (480.0, 490, True)
    assert verdict_of(lines, "dispatch BF16 cached, any SMs").measured == 450.0
    assert verdict_of(lines, "dispatch FP8 cached, <= 24 SMs").measured == 200.0
    assert verdict_of(lines, "ring mode: dispatch BF16 cached, <= 24 SMs").measured == 610.0
    ratio = verdict_of(lines, "the same / NCCL all_to_all_single")
    assert ratio.measured == pytest.approx(480 / 540) and ratio.is_met
    extra = verdict_of(lines, "uncached extra (layout, counts, host wait), <= 24 SMs")
    assert (extra.measured, extra.is_met) == (40.0, False)
    host = verdict_of(lines, "host time of an eager call without host wait")
    assert (host.measured, host.is_met) == (15.0, True)


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    verdicts = targets.judge([], 4)
    assert all(verdict.is_met is None for verdict in verdicts)
    table = targets.table(verdicts)
    assert "not measured" in table and "missed" not in table
    assert "no target" in targets.table(targets.judge([], 2))
    skewed = Workload(4, 4096, 7168, 256, 8, routing="zipf")
    assert all(v.measured is None for v in targets.judge([line("combine", 1.0, workload=skewed)], 4)
               if v.target.unit == "us" and "host" not in v.target.name)  # fmt: skip


def test_the_table_has_a_row_per_line_and_marks_host_waits() -> None:
    text = report.table(
        [line("dispatch", 500.0, host_waits=True), line("layout", 9.0, volume=None, mode="ring")]
    )
    header, first, second = text.splitlines()
    assert header.split()[:3] == ["operation", "mode", "SMs"]
    cells = first.split()
    assert cells[:5] == ["dispatch", "direct", "24", "eager", "500.0"]
    assert "15.0w" in cells and cells[-4:] == ["150.00", "300.00", "400.00", "90.0"]
    assert "24 (6/256)" in second and second.split()[-4:] == ["-"] * 4


def test_tune_takes_the_fewest_sms_within_two_percent() -> None:
    lines = [
        line("dispatch cached", time_us, num_sms=num_sms, config=(6, 256)).to_json()
        for num_sms, time_us in ((8, 530.0), (16, 489.0), (24, 480.0), (64, 481.0))
    ]
    lines.append(line("dispatch cached", 500.0, num_sms=20, config=None).to_json())
    lines.append(line("layout", 8.0, volume=None).to_json())
    (choice,) = tune.choose(lines)
    assert (choice["num_sms"], choice["mean_us"]) == (16, 489.0)
    assert (choice["best_us"], choice["default_us"]) == (480.0, 500.0)
    assert "Config(16, 6, 256)" in tune.describe([choice])
    assert tune.choose([]) == []


def test_plots_take_the_quickest_line_at_each_point() -> None:
    lines = [
        line("combine", 500.0, num_sms=8),
        line("combine", 400.0, num_sms=8, config=None),
        line("combine", 300.0),
        line("combine", 100.0, workload=Workload(4, 128, 7168, 256, 8)),
        line("layout", 3.0, volume=None),
    ]
    num_tokens, rates = plot.rate_over_sms(lines)
    assert num_tokens == 4096
    assert rates == {"combine bf16 direct eager": [(8, 375.0), (24, 500.0)]}
    times = plot.time_over_tokens(lines)
    assert times == {"combine bf16 direct eager": [(128, 100.0), (4096, 300.0)]}


# ---- the command line
# -------------------------------------------------------------------------------


def test_lists_are_multiplied_and_auto_stands_once() -> None:
    configs = options.configs_of((None, 8, 24), (4, 16), (8, 64))
    assert configs[0] is None and len(configs) == 1 + 2 * 2 * 2
    assert Config(8, 8, 8) in configs and Config(24, 16, 64) in configs
    chosen = options.parse(
        ["--device", "cuda", "--tokens", "sweep", "--sms", "sweep", "--routing", "all"], "command"
    )
    scenarios = chosen.scenarios_of(4)
    assert len(scenarios) == len(options.TOKEN_SWEEP) * len(workload.ROUTINGS) * 2 * 2
    assert {len(s.configs) for s in scenarios} == {1 + len(options.SM_SWEEP)}
    assert all(s.executions == ("eager", "graph") for s in scenarios)
    assert sum(s.with_rivals for s in scenarios) == len(scenarios) // 2


def test_the_quick_profile_asks_for_every_line_that_targets_need() -> None:
    scenarios = options.parse(["--device", "cuda", "--quick"], "command").scenarios_of(4)
    lines = [
        line(
            name,
            1.0,
            workload=scenario.workload,
            mode=scenario.mode,
            num_sms=20 if config is None else config.num_sms,
            config=config,
        )
        for scenario in scenarios
        for config in scenario.configs
        for name in scenario.names
    ]
    for scenario in scenarios:
        if scenario.with_rivals:
            rival = {"mode": "", "num_sms": None, "config": None, "is_rival": True}
            name = "NCCL all_to_all_single"
            lines.append(line(name, 1.0, workload=scenario.workload, **rival))
    assert all(verdict.measured is not None for verdict in targets.judge(lines, 4))
    assert all(set(scenario.names) <= set(operations.NAMES) for scenario in scenarios)


# ---- the link limit
# ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_every_rank_pushes_the_same_number_of_rows_to_every_other(num_ranks: int) -> None:
    for rank in range(num_ranks):
        peers, rows = link.push_order(rank, num_ranks, 5)
        found = sorted(zip(peers.tolist(), rows.tolist(), strict=True))
        others = [peer for peer in range(num_ranks) if peer != rank]
        assert found == [(peer, row) for peer in others for row in range(5)]


def test_the_limit_is_the_best_push() -> None:
    limit = link.LinkLimit(14336, {8: 331.0, 24: 348.0, 132: 340.0}, 392.0)
    assert limit.gb_per_s == 348.0 and limit.to_json()["gb_per_s"] == 348.0
    assert link.fraction(174.0, limit) == pytest.approx(0.5) and link.fraction(1.0, None) is None
    assert "331 / 348 / 340 GB/s with 8 / 24 / 132 blocks" in limit.describe()
