"""The bench as a program: it checks, prints, and writes what it says. No figure is judged here."""

import json
import sys
from pathlib import Path

import pytest
import torch
import warm

import deep_comm
from deep_comm import _core, processes
from deep_comm.bench import __main__ as bench
from deep_comm.bench import measure, names, nodes, operations, options
from deep_comm.bench.report import Report
from deep_comm.bench.runner import Runner
from deep_comm.bench.scenarios import scenarios_of
from deep_comm.bench.workload import Workload, routing_of
from deep_comm.reference import get_dispatch_layout
from deep_comm.tune import __main__ as tune

BENCH = [sys.executable, "-m", "deep_comm.bench", "--device", "cpu"]
SMALL = ["--tokens", "6", "--hidden", "128", "--experts", "5", "--topk", "2"]
SHORT = ["--iterations", "1", "--rounds", "1", "--warmup", "0", "--deadline-s", "200"]


def run(command: list[str], folder: Path) -> str:
    done = warm.run(command, capture_output=True, text=True, timeout=280, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_bench_measures_every_combination_and_writes_json(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    command = [
        *BENCH, "--ranks", "2", *SMALL, *SHORT, "--dtype", "all", "--routing", "uniform,idle-rank",
    ]  # fmt: skip
    command += ["--sms", "auto,4", "--simulation-runs", "1", "--json", str(file)]
    output = run(command, tmp_path)
    assert output.count("normal mode on cpu: 2 ranks") == 4 and "runs/s" in output
    document = json.loads(file.read_text())
    lines = document["normal"]
    own = [line for line in lines if not line["is_rival"]]
    seen = {
        (line["routing"], line["dtype"], line["mode"], line["num_sms"], line["name"])
        for line in own
    }
    for routing in ("uniform", "idle-rank"):
        for dtype in ("bf16", "fp8"):
            for mode in ("direct", "ring"):
                for num_sms in (1, 4):
                    for name in names.MEANINGS:
                        is_there = (routing, dtype, mode, num_sms, name) in seen
                        wanted = "cast" not in name or dtype == "bf16"
                        wanted &= "column" not in name or dtype == "fp8"
                        if name == "combine in place":
                            wanted = (dtype, mode) == ("bf16", "direct")
                        assert is_there == wanted, name
    rivals = {line["name"] for line in lines if line["is_rival"]}
    assert rivals == {"gloo all_to_all_single", "gloo all_gather", "gloo reduce_scatter"}
    assert all(line["mean_us"] > 0 and line["p99_us"] >= line["p50_us"] for line in lines)
    assert all(
        line["host_us"] is None and line["fraction_of_limit"] is None
        for line in lines
        if "wire_bytes" in line
    )
    assert document["command"].endswith(str(file)) and document["limit"] is None
    assert len(document["peak_rss_bytes"]) == 2 and document["notes"] == []
    assert document["simulation"]["runs_per_s"] > 0
    last = output.splitlines()[-1]
    assert last.startswith(f"# deep_comm bench OK: {len(lines)} lines, 0 wrong, average busbw ")
    assert all(line["num_wrong"] == 0 for line in lines)


def test_bench_runs_under_torchrun(tmp_path: Path) -> None:
    command = [
        *warm.torchrun(2), "-m", *BENCH[2:], *SMALL, *SHORT, "--simulation-runs", "0", "--ops",
        "dispatch,combine",
    ]  # fmt: skip
    output = run([*command, "--plot", str(tmp_path / "plot.svg")], tmp_path)
    assert output.count("normal mode on cpu: 2 ranks") == 1
    assert "dispatch cached" not in output and "combine" in output
    assert "hidden 128, 5 experts, top-2" in (tmp_path / "plot.svg").read_text()


def test_the_quick_profile_runs(tmp_path: Path) -> None:
    command = [
        *BENCH, "--quick", "--ranks", "2", "--hidden", "128", *SHORT, "--simulation-runs", "0",
    ]  # fmt: skip
    output = run(command, tmp_path)
    assert output.count("normal mode on cpu: 2 ranks") == 5
    # The targets are about GPUs; a table of them on a host would be about nothing.
    assert "at most" not in output


WRONG = """
import sys, torch, deep_comm
from deep_comm.bench.__main__ import main
good = deep_comm.Buffer.{call}
def bad(*given, **named):
    result = good(*given, **named)
    if torch.distributed.get_rank() == 1:
        result[0].view(torch.int16)[0, 0] ^= 1
    return result
deep_comm.Buffer.{call} = bad
main(sys.argv[1:])
"""


@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_one_wrong_bit_on_one_rank_ends_the_run_before_it_is_timed(
    call: str, tmp_path: Path
) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(WRONG.format(call=call))
    command = [*warm.torchrun(2), str(script), "--device", "cpu", *SMALL, *SHORT]
    command += ["--ops", "combine", "--no-rivals"]
    done = warm.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode != 0
    assert f"{call} differs from the reference on ranks [1]" in done.stderr
    assert done.stdout.splitlines()[-1].startswith("# deep_comm bench FAILED: WrongResult: ")
    assert "wire MB" not in done.stdout


@pytest.mark.parametrize(
    "start",
    [[sys.executable, "-m", "deep_comm", "tune", "--ranks", "2"],
     [*warm.torchrun(2), "-m", "deep_comm.tune"]],
    ids=["starts ranks", "torchrun"],
)  # fmt: skip
def test_tune_writes_its_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: list[str]
) -> None:
    stored = tmp_path / "stored.json"  # which is not there yet
    monkeypatch.setenv("DEEP_COMM_TUNE_FILE", str(stored))
    command = [*start, "--device", "cpu", "--mode", "direct", "--sms", "auto,2,4"]
    output = run([*command, *SMALL, *SHORT], tmp_path)
    assert "tune: part 1 of 1" in output
    assert output.splitlines()[-1] == "# deep_comm tune OK: 3 choices in tune.json"
    document = json.loads((tmp_path / "tune.json").read_text())
    assert {choice["name"] for choice in document["choices"]} == set(tune.OPERATIONS.split(","))
    assert all(choice["num_sms"] in (1, 2, 4) for choice in document["choices"])
    assert all(choice["default_us"] > 0 for choice in document["choices"])
    assert document["machine"]["device"] == "cpu"
    machines = json.loads(stored.read_text())["machines"]
    assert set(machines) == {"host target x 2"}
    operations = [entry["operation"] for entry in machines["host target x 2"]["entries"]]
    assert sorted(operations) == ["combine", "dispatch"]
    assert deep_comm.tuning.read(torch.device("cpu"), 2) == machines["host target x 2"]["entries"]


def test_tune_sweeps_what_is_not_chosen() -> None:
    def swept(*given: str) -> list[tuple[object, ...]]:
        runs = map(options.parse, tune.sweeps(given, stores=False))
        return [(run.mode, run.sms, run.send, run.slots) for run in runs]

    direct = (("direct",), (None, *options.SM_SWEEP), (6,), (256,))
    ring = (("ring",), (None, 8, 16, 24), (4, 8, 16), (64, 128, 256))
    assert swept("--device", "cuda") == [direct, ring]
    assert swept("--device", "cuda", "--mode", "direct") == [direct]
    assert swept("--device", "cuda", "--mode=ring", "--send", "8") == [(*ring[:2], (8,), ring[3])]
    assert [run[1] for run in swept("--device", "cuda", "--sms", "4")] == [(4,), (4,)]
    on_host = (None, 2, 4, 8), (6,), (16, 64)
    assert swept("--device", "cpu", "--mode", "ring") == [(("ring",), *on_host)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mode", "layer"], "--mode: must be direct"),
        (["--hidden", "7"], "--hidden: must be a multiple of 8"),
        (["--json", "x"], "--json: of deep_comm bench alone"),
        (["--sms", "auto", "--ops", "combine"], "--sms: must name numbers to choose from"),
        (["--ops", "layout"], "--ops: must name eager calls of dispatch,"),
        (["--execution", "graph", "--device", "cuda"], "--ops: must name eager calls of"),
        ([], "the host target reads only a file that DEEP_COMM_TUNE_FILE names: set it; or give"),
    ],
)
def test_tune_refuses_what_leaves_nothing_to_choose_or_to_store(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is measured, so that what was stored earlier stays."""
    stored = ["--no-store"] if arguments else []
    with pytest.raises(SystemExit, match="2"):
        tune.parse([*stored, "--device", "cpu", *arguments])
    assert f"deep_comm tune: error: {words}" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["tune"], ["bench", "--mode", "layer", "--store"],
                                     ["bench", "--mode", "tp", "--store"]])  # fmt: skip
def test_what_nobody_would_read_is_not_measured(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def problem(*device: str) -> str:
        parse = tune.parse if command[0] == "tune" else options.parse
        try:
            parse([*command[1:], "--device", *device])
        except SystemExit:
            return capsys.readouterr().err.splitlines()[0]
        return ""

    name = "DEEP_COMM_TUNE_FILE"
    monkeypatch.delenv(name, raising=False)
    assert f"the host target reads only a file that {name} names: set it" in problem("cpu")
    assert problem("cuda") == ""  # in the cache folder
    monkeypatch.setenv(name, str(tmp_path / "typo" / "tune.json"))
    for device in ("cpu", "cuda"):
        assert f"{name}: {tmp_path}/typo/tune.json lies in" in problem(device)
    monkeypatch.setenv(name, str(tmp_path / "tune.json"))
    assert problem("cpu") == problem("cuda") == "" and not list(tmp_path.iterdir())


def test_two_tiers_are_measured_beside_one(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    command = [*BENCH, "--ranks", "4", "--ranks-per-node", "2", *SMALL, *SHORT, "--sms", "3"]
    command += ["--dtype", "all", "--ops", "dispatch,dispatch cached,combine", "--mode", "ring"]
    command += ["--no-rivals", "--rail-send", "2", "--simulation-runs", "0", "--json", str(file)]
    output = run(command, tmp_path)
    assert "exactly one row a (token, remote node)" in output
    document = json.loads(file.read_text())
    modes = {(line["mode"], line["num_sms"], line["dtype"]) for line in document["normal"]}
    assert modes >= {("two-tier", 4, "bf16"), ("two-tier", 4, "fp8")}  # two SMs are a channel
    ratios = {(ratio["workload"], ratio["operation"]): ratio for ratio in document["two_tier"]}
    assert len(ratios) == 2 * 3
    for ratio in ratios.values():
        assert ratio["ratio"] == ratio["two_tier_us"] / ratio["single_us"] > 0
    counts = document["rail"]
    assert len(counts) == 2 * 2 * 4  # dtypes, operations, ranks
    shape = Workload(4, 6, 128, 5, 2)
    routings = [routing_of(shape, rank).topk_idx for rank in range(4)]
    layouts = [get_dispatch_layout(topk_idx, 5, 4, 2) for topk_idx in routings]
    for each in counts:
        node = each["rank"] // 2
        if each["operation"] == "combine":  # sums for the tokens that came from the other node
            layout = layouts[(each["rank"] + 2) % 4]
            wanted = int(layout.num_tokens_per_rdma_rank[node])
        else:
            wanted = int(layouts[each["rank"]].num_tokens_per_rdma_rank[1 - node])
        assert each["rows"] == wanted > 0
        assert each["put_bytes"] == wanted * each["row_bytes"]


@pytest.mark.parametrize("num_wrong", [-1, 256])
def test_bytes_too_many_or_too_few_on_the_rail_end_the_run(
    num_wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a combine of this rank, whose node sends back three sums."""
    monkeypatch.setattr(measure, "gather", lambda value: [value])
    monkeypatch.setattr("deep_comm.bench.runner.gather", lambda value: [value])
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    chosen = options.parse(["--device", "cpu", "--ranks-per-node", "2", *SMALL])
    scenario = scenarios_of(chosen, 4)[-1]
    assert scenario.mode == names.TWO_TIER
    combine = operations.Operation(
        "combine", lambda _idx: None, lambda _result, _idx: True, None, rail_row_bytes=256
    )
    rows = nodes.rail_count(scenario, combine, 0, 2, 0)["rows"]
    for wrong, is_right in ((0, True), (num_wrong, False)):
        counted = iter([1000, 1000 + rows * 256 + wrong])
        monkeypatch.setattr(nodes, "put_bytes", lambda _buffer: next(counted))
        runner = Runner(chosen, torch.device("cpu"), print)
        runner.report = Report()
        if is_right:
            assert runner._count_rail(scenario, combine, 2, None) == rows * 256  # type: ignore
            continue
        with pytest.raises(measure.WrongResult, match="combine: bytes on the rail"):
            runner._count_rail(scenario, combine, 2, None)  # type: ignore


def test_wrong_ranks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "gather", lambda value: [True, value, True])
    measure.require_on_all_ranks(True, "dispatch")
    with pytest.raises(measure.WrongResult, match=r"combine .* ranks \[1\]"):
        measure.require_on_all_ranks(False, "combine")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--sms", "0"], ["--mode", "rings"], ["--tokens", "0"], ["--execution", "graph"],
        ["--layout", "packed"], ["--plot", "x.jpeg"], ["--mode", "nodes", "--layout", "packed"],
        ["--mode", "nodes,low-latency"], ["--mode", "low-latency", "--routing", "zipf"],
        ["--mode", "low-latency", "--tokens", "8", "--max-tokens", "7"],
        ["--mode", "low-latency", "--execution", "graph"],
        ["--mode", "low-latency", "--layout", "rows"], ["--mode", "layer", "--decode-tokens", "0"],
        ["--ranks", "0"], ["--hidden", "7"], ["--topk", "33"], ["--topk", "65", "--experts", "99"],
        ["--dtype", "fp8", "--hidden", "8"], ["--mode", "low-latency", "--hidden", "64"],
        ["--timeout-s", "0"], ["--deadline-s", "soon"], ["--warmup", "-1"],
        ["--json", "/no/such/folder/x.json"], ["--json", "/tmp"],
        ["--mode", "tp", "--trace", "x"], ["--sms", "257"], ["--mode", "tp", "--sms", "257"],
        ["--send", "300", "--slots", "4"], ["--send", "257"],
        ["--ranks", "2", "--rail", "simulated"],
        ["--mode", "low-latency", "--ranks", "2", "--rail", "simulated"],
        ["--ranks-per-node", "1", "--rail", "nvshmem"],
        ["--ranks-per-node", "1", "--rail", "software"],
        ["--mode", "tp", "--trace", "x", "--device", "cuda", "--ops", "all-gather"],
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those of other modes."""
    with pytest.raises(SystemExit):
        options.parse(["--device", "cpu", *arguments])
    said = capsys.readouterr().err
    assert any(flag in said for flag in arguments if flag.startswith("--")), said


def test_mode_tp_measures_products_and_collectives_and_stores_the_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, stored = tmp_path / "tp.json", tmp_path / "tune.json"
    stored.write_text('{"version": 1, "machines": {}}')
    monkeypatch.setenv("DEEP_COMM_TUNE_FILE", str(stored))
    output = run(
        [*BENCH, "--mode", "tp", "--ranks", "2", *SHORT, "--divide", "512", "--tokens", "8,16",
         "--mb", "0.001", "--store", "--json", str(file)],
        tmp_path,
    )  # fmt: skip
    assert "10 choices stored in" in output and "25 lines, 0 wrong" in output
    lines = json.loads(file.read_text())["tensor_parallel"]
    assert {(line["name"], line["who"]) for line in lines} == {
        *((name, way) for name in names.PRODUCTS for way in ("unfused", "decomposed")),
        ("all-gather", "kernel"), ("all-gather", "copy engines"), ("reduce-scatter", "kernel"),
        ("all-reduce", "one_shot"), ("all-reduce", "two_shot"),
    }  # fmt: skip
    (machine,) = json.loads(stored.read_text())["machines"].values()
    fastest = {
        (line["op"], line["depth"], line["columns"], line["rows"] // 2): line["who"]
        for line in sorted(lines, key=lambda line: -line["mean_us"])
        if line["depth"]
    }
    assert {
        (it["op"], it["depth"], it["columns"], it["rows"]): it["method"]
        for it in machine["products"]
    } == fastest


def test_a_mode_that_does_not_exist_is_told_all_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        options.parse(["--mode", "foo"])
    said = capsys.readouterr().err
    assert "'foo' is none of direct, ring (or 'all') and none of nodes, low-latency, layer" in said


@pytest.mark.parametrize(
    ("arguments", "num_ranks", "said"),
    [
        (["--device", "cuda"], 2, "torch finds no GPU here"),
        (["--device", "cpu"], 9, "--ranks: a node has at most 8"),
        (["--device", "cpu", "--ranks-per-node", "9"], 18, "--ranks-per-node: must be at most 8"),
        (["--device", "cpu", "--ranks-per-node", "3"], 4, "4 ranks are no nodes of 3"),
        (["--device", "cpu", "--mode", "nodes"], 4, "give --ranks-per-node"),
        (["--device", "cpu", "--rail", "simulated"], 4, "--rail: all ranks are one node"),
    ],
)
def test_ranks_that_cannot_be_started_are_refused(
    arguments: list[str], num_ranks: int, said: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    chosen = options.parse(arguments)
    with pytest.raises(SystemExit, match="2"):
        options.check_ranks(chosen, num_ranks)
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("deep_comm bench: error: ") and said in told[0] and len(told) == 2
    good = ["--device", "cpu", "--ranks-per-node", "2", "--rail", "simulated", "--sms", "256"]
    options.check_ranks(options.parse([*good, "--send", "8,64", "--slots", "16,64"]), 4)


def test_variables_are_refused_as_options_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(value: str, *arguments: str) -> str:
        monkeypatch.setenv("DEEP_COMM_RANKS_PER_NODE", value)
        with pytest.raises(SystemExit, match="2"):
            options.parse(["--device", "cpu", "--ranks", "4", *arguments])
        return capsys.readouterr().err

    assert "DEEP_COMM_RANKS_PER_NODE: 4 ranks are no nodes of 3" in refused("3")
    assert "DEEP_COMM_RANKS_PER_NODE must be a number of at least 1; got 'x'" in refused("x")
    assert "--mode nodes: all ranks are on one host" in refused("5", "--mode", "nodes")
    assert "--rail: all ranks are one node" in refused("5", "--rail", "simulated")
    options.parse(["--device", "cpu", "--ranks", "4"])  # one node of four
    monkeypatch.setenv("DEEP_COMM_RANKS_PER_NODE", "2")
    options.parse(["--device", "cpu", "--ranks", "4", "--mode", "nodes", "--rail", "simulated"])


def test_the_limits_of_the_options_are_those_of_the_kernels() -> None:
    assert _core.max_channels == options.MOST_SMS
    assert _core.max_topk == options.MOST_TOPK


@pytest.mark.parametrize(("reason", "elapsed_s"), [("exited with 1", 0.2), ("exited with 1", 0.05),
                                                   ("was killed by signal 9", 0.2)])  # fmt: skip
def test_a_deadline_that_has_passed_is_said(
    reason: str, elapsed_s: float, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def fail(_options: options.Options) -> None:
        now[0] += elapsed_s
        raise processes.RankFailed(0, reason)

    now = [5.0]
    monkeypatch.setattr(bench.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(bench, "_run", fail)
    with pytest.raises(processes.RankFailed):
        bench.main(["--device", "cpu", "--deadline-s", "0.1"])
    said = capsys.readouterr().out
    assert said.startswith(f"# deep_comm bench FAILED: RankFailed: rank 0 {reason}")
    is_late = (reason, elapsed_s) == ("exited with 1", 0.2)
    assert ("a deadline has passed (--deadline-s 0.1)" in said) == is_late


def test_ranks_that_are_no_nodes_are_refused() -> None:
    chosen = options.parse(["--device", "cpu", "--ranks-per-node", "3"])
    with pytest.raises(SystemExit, match="4 ranks are no nodes of 3"):
        scenarios_of(chosen, 4)
    with pytest.raises(SystemExit, match="give --ranks-per-node"):
        scenarios_of(options.parse(["--device", "cpu", "--mode", "nodes"]), 4)
