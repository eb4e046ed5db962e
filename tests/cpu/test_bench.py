"""The benchmark checks before it times and counts bytes as it says. No figure is judged here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from payload import assert_same_bits

from deep_comm import reference
from deep_comm.bench import workload as workloads
from deep_comm.bench.workload import Workload

SMALL = Workload(num_ranks=3, num_tokens=12, hidden=32, num_experts=7, num_topk=2)


def test_expected_sum_is_that_of_the_reference() -> None:
    inputs = [workloads.make_inputs(SMALL, rank) for rank in range(3)]
    dispatched = reference.dispatch([i.x for i in inputs], [i.topk_idx for i in inputs], 7)
    combined = reference.combine([d.recv_x for d in dispatched], dispatched)
    for rank in range(3):
        rows, total = workloads.expected_results(SMALL, rank)
        assert_same_bits(rows, dispatched[rank].recv_x, "rows")
        assert_same_bits(total, combined[rank][0], "sum")


def test_wire_bytes_leave_out_own_rows_and_count_metadata() -> None:
    moved = workloads.volume(SMALL, num_rows=10, num_own_rows=4)
    assert moved.logical_bytes == 10 * 64
    assert moved.wire_bytes == 6 * (64 + 4 + 2 * 8)


@pytest.mark.xdist_group("processes")
def test_bench_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    command = [sys.executable, "-m", "deep_comm.bench", "--device", "cpu", "--ranks", "2"]
    command += [
        "--tokens",
        "8",
        "--hidden",
        "64",
        "--experts",
        "4",
        "--topk",
        "2",
        "--iterations",
        "2",
    ]
    command += ["--warmup", "1", "--simulation-runs", "1", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dispatch + combine" in done.stdout and "runs/s" in done.stdout
    document = json.loads(file.read_text())
    assert {line["name"] for line in document["normal"]} >= {
        "dispatch",
        "dispatch cached",
        "combine",
    }
    assert len(document["peak_rss_bytes"]) == 2
    assert document["simulation"]["runs_per_s"] > 0


@pytest.mark.xdist_group("processes")
def test_bench_runs_under_torchrun(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command += ["-m", "deep_comm.bench", "--device", "cpu", "--tokens", "4", "--hidden", "64"]
    command += ["--experts", "4", "--topk", "2", "--iterations", "1", "--warmup", "0"]
    command += ["--simulation-runs", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("normal mode on cpu: 2 ranks") == 1


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    from deep_comm.bench import normal

    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(
        dist, "all_gather_object", lambda gathered, value: gathered.__setitem__(0, value)
    )
    normal._require_on_all_ranks(True, "dispatch")
    with pytest.raises(normal.WrongResult, match="combine .* ranks \\[0\\]"):
        normal._require_on_all_ranks(torch.equal(torch.zeros(1), torch.ones(1)), "combine")
