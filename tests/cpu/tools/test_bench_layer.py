"""The bench of ExpertParallel: what it parses, computes and prints, and a run on the host
target."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm

from deep_comm import tuning
from deep_comm.bench import layer, layer_options, layer_report
from deep_comm.bench.layer_report import Judged, Line, Pair
from deep_comm.bench.measure import Timing


def timing(mean_us: float) -> Timing:
    return Timing(mean_us, mean_us, mean_us, mean_us, 0.0, 3.0)


def pair(prefill: float | None, decode: float | None, auto: float | None = None) -> Pair:
    return Pair(*(None if value is None else timing(value) for value in (prefill, decode, auto)))


def line(tokens: int, prefill: float, decode: float | None, auto: float | None = None) -> Line:
    return Line(tokens, pair(prefill, decode, auto), pair(None, None), timing(3.0))


def options(*arguments: str) -> layer.Options:
    return layer.parse(["--mode", "layer", "--device", "cpu", *arguments], "")


def test_auto_is_compared_with_the_better_mode() -> None:
    assert pair(100.0, 50.0, 55.0).ratio == pytest.approx(1.1)
    assert pair(100.0, 50.0, 55.0).verdict == "MISSED"
    assert pair(100.0, None, 104.0).ratio == pytest.approx(1.04)
    assert pair(100.0, None, 104.0).verdict == "ok"
    beyond = dataclasses.replace(pair(100.0, 50.0, 102.0), decode_fits=False)
    assert beyond.ratio == pytest.approx(1.02) and beyond.ratio_to_any == pytest.approx(2.04)
    assert beyond.to_json()["ratio_to_any"] == beyond.ratio_to_any
    text = layer_report.verdict([Line(1024, beyond, pair(None, None))], [], 128)
    assert "within 1.05" in text and "larger decode_tokens" in text and "at 1024 (2.04)" in text
    assert pair(100.0, 50.0).ratio is None and pair(None, None, 5.0).verdict == "-"
    assert pair(100.0, 50.0).better == "decode" and pair(10.0, 50.0).better == "prefill"
    assert pair(100.0, None).better == beyond.better == "prefill"


def test_what_was_timed_in_turn_with_auto_decides() -> None:
    turned = dataclasses.replace(pair(100.0, 50.0, 62.0), rival=timing(60.0))
    assert turned.ratio == pytest.approx(62 / 60) and turned.verdict == "ok"
    assert turned.to_json()["rival"]["mean_us"] == 60.0


def test_the_crossover_lies_where_the_lines_between_measured_sizes_meet() -> None:
    def of(*entries: tuple[int, float | None, float | None]) -> int:
        return layer_report.crossover([(tokens, pair(p, d)) for tokens, p, d in entries])

    assert of((4, 9, 5), (1, 9, 3), (16, 9, 8), (8, 9, 10)) == 4 + 3  # gains 4 us, then loses 1
    assert of((1, 2, 3)) == 0
    assert of((1, 2, 1), (2, 2, None)) == 1
    assert of((1, 2, 2), (2, 2, 3)) == 1
    assert of((1, 9, 3), (2, 9, 3)) == 2


def test_the_verdict_names_the_sizes_that_miss_and_those_left_out() -> None:
    good = layer_report.verdict([line(1, 9, 3, 3.1)], [], 128)
    assert "within 1.05" in good and "up to 1 tokens" in good and "NOT" not in good
    bad = layer_report.verdict([line(1, 9, 3, 3.1), line(2, 9, 3, 4.5)], [4], 128)
    assert "MISSED" in bad and "at 2 (eager 1.500); worst 1.500" in bad
    assert "NOT COMPLETE" in bad and "before 4" in bad
    assert "NOT COMPLETE" in layer_report.verdict([], [], 128)


def test_captured_steps_are_judged_too() -> None:
    captured = Line(1, pair(9, 3, 3), pair(5, 2, 2.5))
    text = layer_report.verdict([captured], [], 128)
    assert "at 1 (graph 1.250)" in text
    cells = layer_report.row(captured).split()
    assert cells == ["1", "9.0", "3.0", "-", "3.0", "1.000", "ok", "-", "5.0", "2.0", "-", "2.5",
                     "1.250", "MISSED", "-", "-", "3.0", "-"]  # fmt: skip


def test_a_turn_holds_auto_against_the_rounds_around_it() -> None:
    # A machine that becomes twice as slow, and one disturbed round: the medians know of neither.
    rival, again = [10.0, 10.0, 20.0, 20.0, 20.0], [10.0, 10.2, 20.0, 60.0, 20.4]
    auto = [10.2, 10.3, 20.4, 40.0, 20.8]
    judged = Judged.of(rival, auto, again)
    assert judged.ratio.median == pytest.approx(1.02)
    assert judged.noise.median == pytest.approx(1.02) and judged.noise.high == pytest.approx(1.02)
    judged_pair = dataclasses.replace(pair(100.0, 10.0, 90.0), rival=timing(10.0), judged=judged)
    assert judged_pair.ratio == judged.ratio.median and judged_pair.verdict == "ok"
    text = layer_report.verdict([Line(4, judged_pair, pair(None, None))], [], 128)
    assert "4 tokens, eager: auto over its rival 1.020 (" in text and "itself 1.020 (" in text
    assert judged_pair.to_json()["judged"]["noise"]["low"] == 1.0


def test_lists_and_defaults() -> None:
    assert options("--tokens", "3,5").tokens == (3, 5)
    assert options("--tokens", "sweep").tokens == layer_options.TOKEN_SWEEP
    assert options("--quick").tokens == (1, 4, 16, 64)
    assert options().decode_tokens == 8
    assert options("--decode-tokens", "measured").decode_tokens is None
    assert layer_options.is_asked_for(["--mode=layer"]) and not layer_options.is_asked_for(
        ["--mode", "ring"]
    )
    with pytest.raises(SystemExit):
        options("--decode-tokens", "0")


def run_bench(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return warm.run(
        [
            sys.executable, "-m", "deep_comm.bench", "--mode", "layer", "--device", "cpu",
            "--ranks", "2", "--tokens", "1,3,9", "--hidden", "64", "--experts", "6", "--topk", "2",
            *arguments,
        ],
        capture_output=True, text=True, timeout=200, check=False, cwd=folder,
        env={**os.environ, **variables},
    )  # fmt: skip


def test_a_run_checks_measures_writes_and_stores(tmp_path: Path) -> None:
    file, stored = tmp_path / "layer.json", tmp_path / "tune.json"
    stored.write_text(json.dumps({"version": tuning.FILE_VERSION, "machines": {}}))
    done = run_bench(
        tmp_path, "--decode-tokens", "measured", "--store", "--json", str(file),
        DEEP_COMM_TUNE_FILE=str(stored),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "decode is not the slower mode up to" in done.stdout
    document = json.loads(file.read_text())
    assert document["is_complete"] and document["left_out"] == []
    assert [entry["tokens"] for entry in document["lines"]] == [1, 3, 9]
    for entry in document["lines"]:
        assert min(entry["eager"][mode]["mean_us"] for mode in ("prefill", "decode", "auto")) > 0
        assert entry["eager"]["verdict"] in ("ok", "MISSED")
    (entry,) = json.loads(stored.read_text())["machines"]["host target x 2"]["layers"]
    assert entry["decode_tokens"] == document["decode_tokens"]
    assert f"decode_tokens {entry['decode_tokens']} stored in" in done.stdout


def test_no_size_is_begun_when_the_budget_is_spent(tmp_path: Path) -> None:
    file = tmp_path / "layer.json"
    done = run_bench(tmp_path, "--budget-s", "0.001", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "NOT COMPLETE: time was up before 3, 9" in done.stdout
    assert json.loads(file.read_text())["left_out"] == [3, 9]


def test_a_size_that_takes_too_long_ends_the_run(tmp_path: Path) -> None:
    done = run_bench(tmp_path, "--size-deadline-s", "1", "--iterations", "100000")
    assert done.returncode != 0
    assert "Timeout (0:00:01)" in done.stderr and "_fixed" in done.stderr
