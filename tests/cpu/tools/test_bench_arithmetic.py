"""What the bench computes: bytes, percentiles, routings, expected results, choices, verdicts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from payload import assert_same_bits

from deep_comm import Config, reference
from deep_comm.bench import link, measure, operations, options, payload, report, targets
from deep_comm.bench.expected import ALIGNMENT, Expected, cast
from deep_comm.bench.line import Line
from deep_comm.bench.measure import Sample, Timing
from deep_comm.bench.names import MEANINGS, ROUTINGS, Effort
from deep_comm.bench.scenarios import MAX_TWO_TIER_SMS, configs_of, scenarios_of
from deep_comm.bench.workload import (
    Volume,
    Workload,
    mean_volume,
    plan_of,
    routing_of,
    volume,
)
from deep_comm.reference import low_latency as reference_low_latency
from deep_comm.tune import choices as tune

SMALL = Workload(num_ranks=3, num_tokens=12, hidden=160, num_experts=7, num_topk=2)
HOST = torch.device("cpu")


# ---- bytes ---------------------------------------------------------------------------------------


def test_volume_is_that_of_the_busiest_rank_and_direction() -> None:
    rows = [[5, 1, 2], [3, 7, 0], [4, 6, 1]]
    # received 12, 14, 3; from others 7, 7, 2; to others 3, 3, 10
    assert volume(rows, 100) == Volume(logical_bytes=1400, wire_bytes=1000)
    assert volume(rows, 100, beside_bytes=4) == Volume(1400, 1040)
    plans = [volume(plan_of(SMALL, idx).rows_between(), 10) for idx in range(2)]
    mean = mean_volume(SMALL, 10, num_routings=2)
    assert mean.wire_bytes == sum(it.wire_bytes for it in plans) // 2


def test_bytes_of_a_row() -> None:
    assert (SMALL.row_bytes, SMALL.combine_row_bytes, SMALL.num_scales) == (320, 320, 0)
    fp8 = replace(SMALL, dtype="fp8", combine_format="logfmt")
    assert (fp8.row_bytes, fp8.combine_row_bytes, fp8.num_scales) == (160 + 8, 240, 2)
    assert replace(SMALL, dtype="nvfp4").row_bytes == 80 + 4 * 3


def test_new_routing_sends_index_expert_indices_and_weights(monkeypatch: Any) -> None:
    calls = object.__new__(operations.NormalCalls)
    calls._shape, calls._ranks_per_node = SMALL, None
    bare = mean_volume(SMALL, 320)
    num_rows = bare.wire_bytes // 320
    for name, row_bytes in (
        ("dispatch cached", 320 + 4), ("dispatch", 320 + 4 + 2 * (8 + 4)), ("combine", 320),
        ("dispatch cached + combine", 324 + 320),
    ):  # fmt: skip
        moved, _ = calls._moved(name)
        assert moved.wire_bytes == num_rows * row_bytes, name
        assert moved.logical_bytes == bare.logical_bytes * (2 if "+" in name else 1)


def test_rate_is_bytes_by_mean_time() -> None:
    assert line("dispatch", 100.0).rate(34_200_000) == pytest.approx(342.0)


# ---- routing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings_choose_distinct_experts_and_weights_sum_to_one(routing: str) -> None:
    shape = replace(SMALL, routing=routing)
    for rank in range(3):
        made, again = routing_of(shape, rank), routing_of(shape, rank)
        assert_same_bits(made.topk_idx, again.topk_idx, "repeatable")
        assert made.topk_idx.shape == (shape.num_tokens_of(rank), 2)
        for chosen in made.topk_idx.tolist():
            taken = [expert for expert in chosen if expert >= 0]
            assert len(taken) == len(set(taken)) and all(expert < 7 for expert in taken)
        assert torch.allclose(made.topk_weights.sum(1), torch.ones(shape.num_tokens_of(rank)))


def test_routings_are_what_they_are_called() -> None:
    assert plan_of(replace(SMALL, routing="all-to-one")).rows_between() == [[12, 0, 0]] * 3
    rows = plan_of(replace(SMALL, routing="idle-rank")).rows_between()
    assert rows[2] == [0, 0, 0] and rows[0][2] + rows[1][2] > 0
    shape = Workload(1, 4000, 16, 64, 1, routing="zipf")
    counts = torch.bincount(routing_of(shape, 0).topk_idx.flatten(), minlength=64)
    ordered = counts.sort(descending=True).values
    total = sum(1 / n for n in range(1, 65))
    assert ordered[0] == pytest.approx(4000 / total, rel=0.15)
    assert ordered[0] > 5 * ordered[20]


# ---- expected results ----------------------------------------------------------------------------


def ranks_of(shape: Workload, low_latency: bool = False) -> list[Expected]:
    return [Expected(shape, rank, HOST, 2, low_latency=low_latency) for rank in range(3)]


def dispatched(ranks: list[Expected]) -> list[reference.Dispatched]:
    routings = [rank.routings[1] for rank in ranks]
    return reference.dispatch(
        [rank.x[1] for rank in ranks], [it.topk_idx for it in routings], SMALL.num_experts,
        [it.topk_weights for it in routings],
    )  # fmt: skip


def with_scales(rows: torch.Tensor, scales: torch.Tensor | None) -> Any:
    return rows if scales is None else (rows, scales)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_expected_results_are_those_of_the_reference(dtype: str, routing: str) -> None:
    shape = replace(SMALL, dtype=dtype, routing=routing)
    ranks = ranks_of(shape)
    want = dispatched(ranks)
    outputs = []
    for rank, received in zip(ranks, want, strict=True):
        rows = rank.rows(0)
        got = with_scales(received.recv_x, received.recv_x_scales)
        assert rank.rows_are_right(got, rows, 1)
        assert rows.counts == received.num_recv_tokens_per_expert
        for name in ("topk_idx", "topk_weights"):
            assert_same_bits(getattr(rows, name), getattr(received, f"recv_{name}"), name)
        if len(received.recv_x):
            received.recv_x.view(torch.uint8)[-1, 0] ^= 1
            assert not rank.rows_are_right(got, rows, 1)
            received.recv_x.view(torch.uint8)[-1, 0] ^= 1
        outputs.append(rank.outputs(rows, 1, len(received.recv_x)))
    for rank, (total, _) in zip(ranks, reference.combine(outputs, want), strict=True):
        assert_same_bits(rank.combined(1, "rank"), total, "sum")
    if dtype == "bf16":
        echoes = reference.combine([received.recv_x for received in want], want)
        for rank, (total, _) in zip(ranks, echoes, strict=True):
            assert_same_bits(rank.combined(1, "echo"), total, "echo")


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_expanded_results_are_those_of_the_reference(dtype: str, routing: str) -> None:
    shape = replace(SMALL, dtype=dtype, routing=routing)
    ranks = ranks_of(shape)
    received, outputs = dispatched(ranks), []
    for rank, plain in zip(ranks, received, strict=True):
        want = reference.expand(plain, len(rank.experts), ALIGNMENT)
        rows = rank.expert_rows(0)
        assert rank.rows_are_right(with_scales(want.recv_x, want.recv_x_scales), rows, 1)
        assert rows.counts == want.expert_offsets.diff().tolist()
        assert_same_bits(rows.topk_idx, want.recv_topk_idx, "experts")
        assert want.recv_topk_weights is not None
        assert_same_bits(rows.topk_weights, want.recv_topk_weights, "weights")
        x = rank.outputs(rows, 1, len(want.recv_x))
        outputs.append(reference.reduce_experts(x, want, want.recv_topk_weights))
    for rank, (total, _) in zip(ranks, reference.combine(outputs, received), strict=True):
        assert_same_bits(rank.combined(1, "experts"), total, "sum")


def test_low_latency_inputs_have_routings_of_their_own_and_are_cast() -> None:
    shape = replace(SMALL, hidden=256, dtype="fp8")
    ranks = ranks_of(shape, low_latency=True)
    want = reference_low_latency.low_latency_dispatch(
        [rank.x[1] for rank in ranks], [rank.routings[1].topk_idx for rank in ranks], 12, 7,
        use_fp8=True, compact=True,
    )  # fmt: skip
    for rank, received in zip(ranks, want, strict=True):
        got = with_scales(received.recv_x, received.recv_scales)
        assert rank.rows_are_right(got, rank.rows(1), 1)
        assert rank.rows(1).counts == received.recv_count.tolist()
        assert not torch.equal(rank.routings[0].topk_idx, rank.routings[1].topk_idx)


def test_rows_differ_by_token_input_and_maker() -> None:
    expected = ranks_of(SMALL)[0]
    rows = [expected.all_rows(idx) for idx in range(2)]
    makers = torch.cat([cast(rows[0], "bf16"), rows[1]])
    assert len(makers.view(torch.int16).unique(dim=0)) == 2 * SMALL.total_tokens
    of_experts = expected.expert_rows(0)
    outputs = expected.outputs(of_experts, 0, len(of_experts.topk_idx))[of_experts.places]
    assert len(outputs.view(torch.int16).unique(dim=0)) == len(of_experts.origin)


def test_same_bits_sees_the_sign_of_zero_and_the_dtype() -> None:
    zero = torch.zeros(2, 3)
    assert payload.same_bits(zero, zero.clone())
    assert not payload.same_bits(zero, -zero)
    assert not payload.same_bits(zero, zero.view(torch.int32))
    assert not payload.same_bits(zero, zero[:1])
    by_column = torch.arange(6.0).view(3, 2).t()
    assert payload.same_bits(payload.row_bytes(by_column).view(torch.float32), by_column)


# ---- times ---------------------------------------------------------------------------------------


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
    monkeypatch.setattr(measure, "host_round", lambda _work, _calls, _clock: next(rounds))
    monkeypatch.setattr(measure, "gather", lambda own: [own, [10.0] * len(own)])
    monkeypatch.setattr(measure.time, "sleep", pauses.append)
    (found,) = measure.host_turns([lambda _call: None], 200, HOST)
    assert found == {"host_us": 13.0, "fastest_host_us": 10.0, "largest_host_us": 30.0}
    assert len(pauses) == measure.NUM_TURNS - 1 and sum(pauses) > 0.9
    assert measure.host_turns([], 200, HOST) == []
    turned = line("combine", 9.0, timing=Timing(9, 9, 9, 9, 0, **found))
    text = report._host_times(options.parse([]), report.Report(lines=[turned]))
    assert "by form: 13.0 µs" in text and text.endswith("rank 30.0\n")
    assert report._host_times(options.parse([]), report.Report(lines=[line("combine", 9.0)])) == ""


class FakeClock(measure.Clock):
    """Each call takes 10 us, a mark 1 us, a flush 100 us."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_starts = self.num_flushes = 0

    def start_together(self, *, flush: bool = False) -> None:
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
    (sample,) = measure.take_samples([work], effort, clock, calls_per_work=2)
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


def test_rounds_of_several_works_take_turns() -> None:
    made: list[str] = []
    works = [lambda call, name=name: made.append(name) for name in "ab"]
    effort = Effort(num_warmup=1, num_calls=2, num_rounds=2, num_single_calls=1, num_host_calls=3)
    samples = measure.take_samples(works, effort, FakeClock())
    # A call that finds the other work's state, one that leads in, and the round.
    assert "".join(made) == "ab" + 2 * (4 * "a" + 4 * "b") + "a" + 6 * "a" + "b" + 6 * "b"
    assert [len(it.means_us) for it in samples] == [len(it.hosts_us) for it in samples] == [2, 2]


# ---- reports -------------------------------------------------------------------------------------


def line(name: str, mean_us: float, **changes: Any) -> Line:
    fields: dict[str, Any] = {
        "workload": Workload(4, 4096, 7168, 256, 8), "execution": "eager",
        "timing": Timing(mean_us, mean_us, mean_us, mean_us, 0.0, 15.0),
        "volume": Volume(200_000_000, 150_000_000), "mode": "direct", "sms": "24", "num_sms": 24,
        "config": (6, 256), "limit": 1e3 / 3,
    }  # fmt: skip
    return Line(name=name, **{**fields, **changes})


RIVAL = {"mode": "", "sms": "", "num_sms": None, "config": None, "is_rival": True}


def test_targets_look_at_the_lines_that_they_are_about() -> None:
    fp8 = Workload(4, 4096, 7168, 256, 8, "fp8")
    lines = [
        line("dispatch cached", 480.0), line("dispatch cached", 450.0, num_sms=64, sms="64"),
        line("dispatch cached", 300.0, execution="graph"),
        line("dispatch cached", 200.0, workload=fp8), line("dispatch cached", 610.0, mode="ring"),
        line("dispatch cached", 1.0, mode="two-tier"), line("dispatch", 520.0),
        line("dispatch", 400.0, num_sms=64, sms="64"),
        line("NCCL all_to_all_single", 540.0, **RIVAL),
    ]  # fmt: skip
    found = {it["name"]: it for it in targets.judge(lines, 4)}
    cached = found["dispatch BF16 cached, 4096 tokens, <= 24 SMs"]
    assert (cached["measured"], cached["at_most"], cached["is_met"]) == (480.0, 490, True)
    measured = {name: it["measured"] for name, it in found.items()}
    assert measured["dispatch BF16 cached, any SMs"] == 450.0
    assert measured["dispatch FP8 cached, <= 24 SMs"] == 200.0
    assert measured["ring mode: dispatch BF16 cached, <= 24 SMs"] == 610.0
    assert measured["the same / NCCL all_to_all_single"] == pytest.approx(480 / 540)
    extra = found["uncached extra (layout, counts, host wait), <= 24 SMs"]
    assert (extra["measured"], extra["is_met"]) == (40.0, False)
    host = found["host time of an eager call without host wait"]
    assert (host["measured"], host["is_met"]) == (15.0, True)


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    verdicts = targets.judge([], 4)
    assert all(verdict["is_met"] is None for verdict in verdicts)
    table = targets.table(verdicts)
    assert "not measured" in table and "missed" not in table
    assert "no target" in targets.table(targets.judge([], 2))
    skewed = Workload(4, 4096, 7168, 256, 8, routing="zipf")
    assert all(it["measured"] is None
               for it in targets.judge([line("combine", 1.0, workload=skewed)], 4)
               if it["unit"] == "us" and "host" not in it["name"])  # fmt: skip


def test_the_table_has_a_row_per_line_and_marks_host_waits() -> None:
    text = report.table(
        [line("dispatch", 500.0, host_waits=True), line("layout", 9.0, volume=None, mode="ring")]
    )
    header, first, second = text.splitlines()
    assert header.split()[:3] == ["operation", "mode", "SMs"] and "rail" not in header
    cells = first.split()
    assert cells[:6] == ["dispatch", "direct", "24", "eager", "200000000", "500.0"]
    # wire MB, algbw, busbw, % limit, #wrong
    assert "15.0w" in cells and cells[-5:] == ["150.00", "400.00", "300.00", "90.0", "0"]
    assert "24 (6/256)" in second and second.split()[-5:] == ["-"] * 4 + ["0"]
    between = line("combine", 1000.0, mode="two-tier", rail_bytes=45_000_000, rail_limit=50.0)
    assert report.table([between]).split()[-3:] == ["45.00", "45.00", "90.0"]


def test_the_low_latency_table() -> None:
    shape = Workload(4, 16, 7168, 256, 8, "fp8", combine_format="logfmt")
    made = line(
        "pair", 20.0, workload=shape, mode="", sms="", config=None, layout="compact",
        phases="hooked", max_tokens=16, volume=Volume(1, 3_000_000),
        kernels_us={"a": 1.0, "b": 2.25},
    )  # fmt: skip
    header, cells = report.table([made]).splitlines()
    assert header.split()[:4] == ["operation", "layout", "dtype", "phases"]
    assert cells.split()[:8] == ["pair", "compact", "fp8,", "logfmt", "hooked", "eager", "24", "16"]
    assert cells.split()[-8:] == ["3000.0", "0.00", "150.00", "9.0", "0", "1.0", "+", "2.2"]
    found = made.to_json()
    assert found["num_blocks"] == 24 and found["floor_us"] == pytest.approx(9.0)


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


def test_the_limit_is_the_best_push() -> None:
    limit = link.LinkLimit(14336, {8: 331.0, 24: 348.0, 132: 340.0}, 392.0)
    assert limit.gb_per_s == 348.0 and limit.to_json()["gb_per_s"] == 348.0
    assert "331 / 348 / 340 GB/s with 8 / 24 / 132 blocks" in limit.describe()
    half = line("combine", 1000.0, volume=Volume(1, 174_000_000), limit=limit.gb_per_s).to_json()
    assert half["fraction_of_limit"] == pytest.approx(0.5)
    assert line("combine", 1.0, limit=None).to_json()["fraction_of_limit"] is None


def test_rows_are_bytes_whatever_their_strides() -> None:
    """torch calls a tensor of one element contiguous, and cannot view it as smaller elements."""
    one = torch.ones(1, 2).bfloat16()[:, 0]
    assert one.is_contiguous() and one.stride() == (2,)
    assert payload.row_bytes(one[:, None]).tolist() == [[0x80, 0x3F]]
    assert payload.same_bits(one, one.clone()) and not payload.same_bits(one, 2 * one)
    none = one[:0]
    assert payload.same_bits(none, none.clone()) and not payload.same_bits(none, none.float())


# ---- scenarios -----------------------------------------------------------------------------------


def test_lists_are_multiplied_and_auto_stands_once() -> None:
    given = ["--device", "cuda", "--send", "4,16", "--slots", "8,64"]
    configs = configs_of(options.parse(given), 4, (None, 8, 24))
    assert configs[0] is None and len(configs) == 1 + 2 * 2 * 2
    assert Config(8, 8, 8) in configs and Config(24, 16, 64) in configs
    chosen = options.parse(
        ["--device", "cuda", "--tokens", "sweep", "--sms", "sweep", "--routing", "all"]
    )
    scenarios = scenarios_of(chosen, 4)
    num_configs, num_workloads = 1 + len(options.SM_SWEEP), 8 * len(ROUTINGS) * 2
    assert len(scenarios) == num_workloads * 2 * num_configs
    assert {it.calls[1][2] for it in scenarios} == {"graph"}
    assert sum(it.with_rivals for it in scenarios) == num_workloads


def test_two_tiers_get_configs_of_their_own() -> None:
    chosen = options.parse(["--device", "cuda", "--ranks-per-node", "2", "--rail-send", "32"])
    configs = configs_of(chosen, 4, (None, 3), two_tier=True)
    assert configs[0] is None and configs[1] is not None and configs[1].num_sms == 4
    assert configs[1].num_max_rdma_chunked_send_tokens == 32
    by_mode = {it.mode: it for it in scenarios_of(chosen, 4)}
    assert set(by_mode) == {"direct", "ring", "two-tier"}
    assert by_mode["two-tier"].ranks_per_node == 2 and by_mode["direct"].ranks_per_node is None
    assert {execution for *_, execution in by_mode["two-tier"].calls} == {"eager"}
    # On several hosts there is no single tier.
    assert {it.mode for it in scenarios_of(chosen, 4, 2)} == {"two-tier"}
    assert MAX_TWO_TIER_SMS == 24


def test_the_quick_profile_asks_for_every_line_that_targets_need() -> None:
    scenarios = scenarios_of(options.parse(["--device", "cuda", "--quick"]), 4)
    lines = []
    for it in scenarios:
        num_sms = 20 if it.config is None else it.config.num_sms
        how = {"workload": it.workload, "mode": it.mode, "num_sms": num_sms}
        lines += [line(name, 1.0, **how) for name, _, execution in it.calls if execution == "eager"]
        assert {name for name, *_ in it.calls} <= set(MEANINGS)
        if it.with_rivals:
            lines.append(line("NCCL all_to_all_single", 1.0, **{**how, **RIVAL}))
    assert all(verdict["measured"] is not None for verdict in targets.judge(lines, 4))
    found = scenarios_of(options.parse(["--device", "cuda", "--mode", "low-latency", "--quick"]), 4)
    names = [
        f"{name}, {it.mode}, {it.workload.num_tokens}" for it in found for name, *_ in it.calls
    ]
    for layout in targets.PAIRS_US:
        assert all(f"pair, {layout}, {num_tokens}" in names for num_tokens in (1, 16, 64, 128))
