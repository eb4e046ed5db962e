"""The bench between nodes, on the host target."""

import json
from pathlib import Path

import pytest
import warm
from test_bench import BENCH, SHORT, run

NODES = [*BENCH, "--ranks", "4", "--ranks-per-node", "2", "--tokens", "24", "--experts", "16"]
NODES += ["--topk", "3", *SHORT]


@pytest.mark.parametrize("rings", [[], ["--rings"]])
def test_rows_sums_and_bytes_are_checked_and_timed(tmp_path: Path, rings: list[str]) -> None:
    file = tmp_path / "nodes.json"
    mode = ["--mode", "nodes,direct", "--gb-per-s", "1", "--json", str(file)]
    out = run([*NODES, *mode, *rings], tmp_path)
    assert "every bit and every byte as it should be" in out
    document = json.loads(file.read_text())
    lines = {(line["mode"], line["name"]): line for line in document["normal"]}
    names = ("dispatch cached", "combine", "dispatch cast cached")
    assert set(lines) == {(mode, name) for mode in ("direct", "two-tier") for name in names}
    assert {ratio["operation"] for ratio in document["two_tier"]} == set(names)
    for name in names:
        line = lines["two-tier", name]
        assert line["rail_share"] == pytest.approx(line["rail_bytes"] / line["mean_us"] / 1e3)
        counts = [it for it in document["rail"] if it["operation"] == name]
        assert len(counts) == 4 and line["rail_bytes"] == max(it["put_bytes"] for it in counts)
        assert all(it["put_bytes"] == it["rows"] * it["row_bytes"] > 0 for it in counts)


WRONG_ROWS = """
import sys, torch
from deep_comm.bench import expected
from deep_comm.bench.__main__ import main
good = expected.Expected._all_rows
def bad(self, input_idx):
    # One rank brings other rows than the others are told of.
    return good(self, input_idx + (torch.distributed.get_rank() == 3))
expected.Expected._all_rows = bad
main(sys.argv[1:])
"""


def test_wrong_rows_end_the_run(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(WRONG_ROWS)
    command = [*warm.torchrun(4), str(script), *NODES[3:5], "--mode", "nodes", *NODES[7:]]
    done = warm.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode != 0
    assert "dispatch differs from the reference on ranks [0, 1, 2, 3]" in done.stderr, done.stderr
    assert "as it should be" not in done.stdout
