"""The bench of ExpertParallel: what it parses, computes and prints, and a run on the host
target."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deep_comm.bench import layer
from deep_comm.bench.measure import Timing


def timing(mean_us: float) -> Timing:
    return Timing(mean_us, mean_us, mean_us, mean_us, 0.0, 3.0)


def line(tokens: int, prefill: float, decode: float | None, auto: float) -> layer.Line:
    late = None if decode is None else timing(decode)
    return layer.Line(tokens, timing(prefill), late, None, timing(auto), timing(auto))


def options(*arguments: str) -> layer.Options:
    return layer.parse(["--mode", "layer", "--device", "cpu", *arguments], "")


def test_auto_is_compared_with_the_better_mode() -> None:
    assert line(8, 100.0, 50.0, 55.0).ratio == pytest.approx(1.1)
    assert line(8, 100.0, None, 104.0).ratio == pytest.approx(1.04)


def test_the_crossover_is_the_last_size_before_decode_is_slower() -> None:
    lines = [line(4, 9, 5, 5), line(1, 9, 3, 3), line(16, 9, 8, 9), line(8, 9, 10, 9)]
    assert layer.crossover(lines) == 4
    assert layer.crossover([line(1, 2, 3, 2)]) == 0
    assert layer.crossover([line(1, 2, 1, 1), line(2, 2, None, 2)]) == 1


def test_the_verdict_names_the_sizes_that_miss() -> None:
    chosen = options()
    good = layer.ending(chosen, [line(1, 9, 3, 3.1)])
    assert "within 1.05" in good and "up to 1 tokens" in good
    bad = layer.ending(chosen, [line(1, 9, 3, 3.1), line(2, 9, 3, 4.5)])
    assert "MISSED" in bad and "at 2 tokens; worst 1.500" in bad


def test_lists_and_defaults() -> None:
    assert options("--tokens", "3,5").tokens == (3, 5)
    assert options("--tokens", "sweep").tokens == layer.TOKEN_SWEEP
    assert options("--quick").tokens == (1, 4, 16, 64)
    assert layer.is_asked_for(["--mode=layer"]) and not layer.is_asked_for(["--mode", "ring"])


def test_a_run_checks_measures_and_writes_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "layer.json"
    done = subprocess.run(
        [
            sys.executable, "-m", "deep_comm.bench", "--mode", "layer", "--device", "cpu",
            "--ranks", "2", "--tokens", "1,3,9", "--hidden", "64", "--experts", "6", "--topk", "2",
            "--decode-tokens", "3", "--json", str(file),
        ],
        capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "decode was the faster mode up to" in done.stdout
    document = json.loads(file.read_text())
    assert [entry["tokens"] for entry in document["lines"]] == [1, 3, 9]
    assert all(entry["auto"]["mean_us"] > 0 for entry in document["lines"])
