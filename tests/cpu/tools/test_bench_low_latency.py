"""The low-latency bench as a program: it checks, prints, and writes what it says."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import warm
from test_bench import BENCH, SHORT, SMALL, run

from deep_comm.bench import targets
from deep_comm.bench.line import Line
from deep_comm.bench.measure import Timing
from deep_comm.bench.workload import Volume, Workload

LOW_LATENCY = [*BENCH, "--mode", "low-latency", "--ranks", "2", *SMALL, *SHORT]
WRONG_CALL = """
import sys, torch, deep_comm
from deep_comm.bench.__main__ import main
good = deep_comm.Buffer.low_latency_{call}
def bad(*given, **named):
    result = good(*given, **named)
    if torch.distributed.get_rank() == 1:
        {spoil}
    return result
deep_comm.Buffer.low_latency_{call} = bad
if __name__ == "__main__":
    main(sys.argv[1:])
"""


def test_the_low_latency_bench_measures_every_combination(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    output = run([*LOW_LATENCY, "--tokens", "1,6", "--json", str(file)], tmp_path)
    assert output.count("low-latency mode on cpu: 2 ranks") == 12
    assert "at most 6 tokens" in output and "targets on" not in output
    lines = json.loads(file.read_text())["low_latency"]
    seen = {
        (line["num_tokens"], line["dtype"], line["layout"], line["name"], line["phases"])
        for line in lines
        if not line["is_rival"]
    }
    combinations = itertools.product(
        (1, 6), ("fp8", "bf16"), ("compact", "packed", "packed-late"),
        ("dispatch", "combine", "pair"), ("fused", "hooked"),
    )  # fmt: skip
    assert seen == set(combinations)
    rivals = {line["name"] for line in lines if line["is_rival"]}
    assert rivals == {"gloo all_gather", "gloo reduce_scatter", "gloo all_gather + reduce_scatter"}
    for line in lines:
        assert line["mean_us"] > 0 and line["floor_us"] is None and line["host_us"] is None
        assert (line["num_blocks"] is None) == line["is_rival"]


def test_the_low_latency_bench_sends_rows_of_four_bits(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    command = [*LOW_LATENCY, "--tokens", "6", "--dtype", "nvfp4", "--plot", "x.svg"]
    run([*command, "--json", str(file)], tmp_path)
    assert "low-latency mode: hidden 128, 5 experts" in (tmp_path / "x.svg").read_text()
    lines = json.loads(file.read_text())["low_latency"]
    assert {line["dtype"] for line in lines} == {"nvfp4"}
    assert {line["layout"] for line in lines if not line["is_rival"]} == {
        "compact", "packed", "packed-late"
    }  # fmt: skip


@pytest.mark.parametrize("nodes", [[], ["--ranks", "4", "--ranks-per-node", "2"]])
def test_the_low_latency_bench_sends_logarithms_home(tmp_path: Path, nodes: list[str]) -> None:
    file = tmp_path / "bench.json"
    command = [*LOW_LATENCY, *nodes, "--tokens", "6", "--dtype", "bf16", "--combine", "all"]
    command += ["--layout", "packed,compact", "--ops", "combine", "--json", str(file)]
    output = run(command, tmp_path)
    assert "sums against the error stated for LogFMT-10" in output
    document = json.loads(file.read_text())
    assert document["ranks_per_node"] == (2 if nodes else None)
    own = [line for line in document["low_latency"] if not line["is_rival"]]
    bytes_of: dict[tuple[str, ...], int] = {}
    for line in own:
        key = line["layout"], line["name"], line["phases"], line["combine_format"]
        bytes_of[key] = line["wire_bytes"]
    assert len(bytes_of) == len(own) == 2 * 2 * 2
    for layout in ("packed", "compact"):
        plain, short = (bytes_of[layout, "combine", "fused", it] for it in ("bf16", "logfmt"))
        assert 4 * short == 3 * plain > 0


@pytest.mark.parametrize("nodes", [[], ["--ranks", "4", "--ranks-per-node", "2"]])
def test_logarithms_that_are_wrong_end_the_run(tmp_path: Path, nodes: list[str]) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(WRONG_CALL.format(call="combine", spoil="result[0][0, 0] *= 1.06"))
    command = [*warm.torchrun(4 if nodes else 2), str(script), "--device", "cpu"]
    command += ["--mode", "low-latency", *SMALL, *SHORT, *nodes[2:], "--combine", "logfmt"]
    command += ["--dtype", "bf16", "--layout", "compact", "--ops", "combine", "--no-rivals"]
    done = warm.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode != 0
    assert "combine fused differs from the reference on ranks [1]" in done.stderr, done.stderr


def test_the_quick_low_latency_profile_runs_under_torchrun(tmp_path: Path) -> None:
    command = [*warm.torchrun(2), "-m", *BENCH[2:], "--mode", "low-latency", "--quick"]
    command += ["--hidden", "128", *SHORT]
    output = run([*command, "--experts", "7", "--topk", "3", "--max-tokens", "130"], tmp_path)
    assert output.count("low-latency mode on cpu: 2 ranks") == 15
    assert output.count("at most 130 tokens") == 15


@pytest.mark.parametrize("layout", ["compact", "packed"])
@pytest.mark.parametrize("spoiled", ["dispatch", "combine"])
def test_one_wrong_bit_in_low_latency_mode_ends_the_run(
    spoiled: str, layout: str, tmp_path: Path
) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(
        WRONG_CALL.format(call=spoiled, spoil="result[0].view(torch.uint8).view(-1)[0] ^= 1")
    )
    command = [*warm.torchrun(2), str(script), "--device", "cpu", "--mode", "low-latency"]
    command += [*SMALL, *SHORT, "--dtype", "bf16", "--layout", layout]
    command += ["--ops", spoiled, "--no-rivals"]
    done = warm.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode != 0
    assert f"{spoiled} fused differs from the reference on ranks [1]" in done.stderr, done.stderr
    assert "wire kB" not in done.stdout


def test_low_latency_targets_are_about_one_shape() -> None:
    def line(us: float, **changes: Any) -> Line:
        shape = Workload(4, changes.pop("num_tokens", 16), changes.pop("hidden", 7168), 256, 8,
                         changes.pop("dtype", "fp8"))  # fmt: skip
        timing = Timing(us, us, us, us, 0.0, host_us=us / 2)
        made = Line(shape, "pair", "graph", timing, Volume(1, 1), layout="compact",
                    phases="fused", num_sms=132, max_tokens=16)  # fmt: skip
        return dataclasses.replace(made, **changes)

    lines = [
        line(20.0), line(16.9), line(1.0, dtype="bf16"), line(1.0, hidden=4096),
        line(1.0, phases="hooked"), line(1.0, is_rival=True, layout="", phases="", name="gloo"),
        line(30.0, layout="packed"), line(44.0, execution="eager"),
        line(26.0, execution="eager", name="combine"), line(99.0, num_tokens=64),
    ]  # fmt: skip
    verdicts = {it["name"]: it for it in targets.judge(lines, 4, "low-latency")}
    met = {name: it["is_met"] for name, it in verdicts.items() if it["measured"]}
    assert met == {
        "pair in a graph, compact, 16 tokens": True,
        "pair in a graph, packed, 16 tokens": False,
        "pair in a graph, compact, 64 tokens": False,
        "eager pair, compact, 16 tokens": True,
        "host time of a call, 16 tokens": True,
    }
    assert verdicts["pair in a graph, compact, 16 tokens"]["measured"] == 16.9
    assert {it["name"] for it in targets.judge([], 4)}.isdisjoint(verdicts)
