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
from deep_comm.bench import layer
from deep_comm.bench.layer import Line, Pair
from deep_comm.bench.measure import Timing
from deep_comm.bench.options import THRESHOLDS, TOKEN_SWEEP, Options, parse


def timing(mean_us: float) -> Timing:
    return Timing(mean_us, mean_us, mean_us, mean_us, 0.0, 3.0)


def pair(prefill: float | None, decode: float | None, auto: float | None = None) -> Pair:
    """With auto, that is timed in turn with the better mode."""
    made = Pair(*(None if value is None else timing(value) for value in (prefill, decode)))
    if auto is None:
        return made
    rival = min(value for value in (prefill, decode) if value is not None)
    rounds = [[value] * 4 for value in (rival, auto, rival)]
    return made.turned(([timing(value[0]) for value in rounds], rounds))


def line(tokens: int, prefill: float, decode: float | None, auto: float | None = None) -> Line:
    return Line(tokens, pair(prefill, decode, auto), Pair(), timing(3.0))


def options(*arguments: str) -> Options:
    return parse(["--mode", "layer", "--device", "cpu", *arguments])


def test_auto_is_compared_with_the_better_mode() -> None:
    assert pair(100.0, 50.0, 55.0).ratio == pytest.approx(1.1)
    assert pair(100.0, 50.0, 55.0).verdict == "MISSED"
    assert pair(100.0, None, 104.0).ratio == pytest.approx(1.04)
    assert pair(100.0, None, 104.0).verdict == "ok"
    made = pair(100.0, 50.0, 102.0).to_json()
    assert made["ratio"] == made["ratio_to_any"] == pytest.approx(2.04)
    assert made["rival"]["mean_us"] == 50.0 and made["judged"]["noise"]["low"] == 1.0
    assert pair(100.0, 50.0).ratio is None and Pair().verdict == "-"
    assert pair(100.0, 50.0).better == "decode" and pair(10.0, 50.0).better == "prefill"
    assert pair(100.0, None).better == "prefill"


def test_a_layer_that_was_built_for_more_is_no_rival_and_is_named() -> None:
    beyond = dataclasses.replace(pair(100.0, 50.0), decode_fits=False)
    assert beyond.better == "prefill"
    rounds = [[100.0], [102.0], [100.0]]
    beyond = beyond.turned(([timing(100.0), timing(102.0), timing(100.0)], rounds))
    assert beyond.ratio == pytest.approx(1.02) and beyond.ratio_to_any == pytest.approx(2.04)
    text = layer.verdict([Line(1024, beyond, Pair())], [], 128)
    assert "within 1.05" in text and "larger decode_tokens" in text and "at 1024 (2.04)" in text


def test_the_crossover_lies_where_the_lines_between_measured_sizes_meet() -> None:
    def of(*entries: tuple[int, float | None, float | None]) -> int:
        return layer.crossover([(tokens, pair(p, d)) for tokens, p, d in entries])

    assert of((4, 9, 5), (1, 9, 3), (16, 9, 8), (8, 9, 10)) == 4 + 3  # gains 4 us, then loses 1
    assert of((1, 2, 3)) == 0
    assert of((1, 2, 1), (2, 2, None)) == 1
    assert of((1, 2, 2), (2, 2, 3)) == 1
    assert of((1, 9, 3), (2, 9, 3)) == 2


def test_the_verdict_names_the_sizes_that_miss_and_those_left_out() -> None:
    good = layer.verdict([line(1, 9, 3, 3.1)], [], 128)
    assert "within 1.05" in good and "up to 1 tokens" in good and "NOT" not in good
    bad = layer.verdict([line(1, 9, 3, 3.1), line(2, 9, 3, 4.5)], [4], 128)
    assert "MISSED" in bad and "at 2 (eager 1.500); worst 1.500" in bad
    assert "NOT COMPLETE" in bad and "before 4" in bad
    assert "NOT COMPLETE" in layer.verdict([], [], 128)


def test_captured_steps_are_judged_too() -> None:
    captured = Line(1, pair(9, 3, 3), pair(5, 2, 2.5))
    text = layer.verdict([captured], [], 128)
    assert "at 1 (graph 1.250)" in text
    cells = layer.row(captured).split()
    assert cells == ["1", "9.0", "3.0", "3.0", "3.0", "1.000", "ok", "1.000", "5.0", "2.0", "2.0",
                     "2.5", "1.250", "MISSED", "1.000", "-", "3.0", "3.0"]  # fmt: skip
    assert (
        len(layer.row(None)) == len(layer.row(captured)) == len(layer.row(Line(1, Pair(), Pair())))
    )


def test_a_turn_holds_auto_against_the_rounds_around_it() -> None:
    # A machine that becomes twice as slow, and one disturbed round: the medians know of neither.
    rival, again = [10.0, 10.0, 20.0, 20.0, 20.0], [10.0, 10.2, 20.0, 60.0, 20.4]
    auto = [10.2, 10.3, 20.4, 40.0, 20.8]
    judged = layer.judge(rival, auto, again)
    assert judged["ratio"]["median"] == pytest.approx(1.02)
    assert judged["noise"]["median"] == judged["noise"]["high"] == pytest.approx(1.02)
    made = pair(100.0, 10.0).turned(
        ([timing(10.0), timing(90.0), timing(10.0)], [rival, auto, again])
    )
    assert made.ratio == judged["ratio"]["median"] and made.verdict == "ok"
    text = layer.verdict([Line(4, made, Pair())], [], 128)
    assert "4 tokens, eager: auto over its rival 1.020 (" in text and "itself 1.020 (" in text


def test_lists_and_defaults() -> None:
    assert options("--tokens", "3,5").tokens == (3, 5)
    assert options("--tokens", "sweep").tokens == TOKEN_SWEEP
    assert options("--quick").tokens == (1, 4, 16, 64)
    assert options().decode_tokens == 8
    assert options("--device", "cuda").decode_tokens == THRESHOLDS["default"]
    assert options("--decode-tokens", "measured").decode_tokens == THRESHOLDS["measured"]
    assert options("--device=cuda", "--quick").tokens == (1, 4, 16, 64, 256, 1024, 4096)
    assert parse(["--mode=layer"]).family == "layer" and parse([]).family == "normal"


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
        tmp_path, "--decode-tokens", "measured", "--store", "--json", str(file), "--plot", "x.svg",
        DEEP_COMM_TUNE_FILE=str(stored),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "decode is not the slower mode up to" in done.stdout
    document = json.loads(file.read_text())
    assert document["is_complete"] and document["left_out"] == []
    assert [entry["tokens"] for entry in document["lines"]] == [1, 3, 9]
    assert "layer: hidden 64, 6 experts, top-2" in (tmp_path / "x.svg").read_text()
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
    done = run_bench(tmp_path, "--size-deadline-s", "1", "--rounds", "100000")
    assert done.returncode != 0
    assert "Timeout (0:00:01)" in done.stderr and "_fixed" in done.stderr
    assert "a deadline has passed (--size-deadline-s 1)" in done.stdout.splitlines()[-1]
