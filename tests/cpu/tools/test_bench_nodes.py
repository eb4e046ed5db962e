"""python -m deep_comm.bench.nodes on the host target."""

import os
import re
import sys

import pytest
import warm

from deep_comm import reference_internode

REFERENCE = reference_internode.dispatch


def run(*arguments: str, launcher: tuple[str, ...] = ("-m",)) -> tuple[int, str]:
    ended = warm.run(
        [sys.executable, *launcher, "deep_comm.bench.nodes", "--device", "cpu", *arguments],
        capture_output=True, text=True, timeout=250, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return ended.returncode, ended.stdout + ended.stderr


def test_rows_sums_and_bytes_are_checked_and_timed() -> None:
    code, out = run(
        "--ranks", "4", "--ranks-per-node", "2", "--tokens", "24", "--check-tokens", "13",
        "--experts", "16", "--topk", "3", "--calls", "1", "--single-tier", "--gb-per-s", "1",
        "--fp8",
    )  # fmt: skip
    assert code == 0, out
    assert "every bit and every byte as it should be" in out
    assert re.search(
        r"nodes +cached dispatch +\d+ us +0\.\d\d MB on the rail, +\d+\.\d GB/s, busy \d+ %", out
    )
    assert re.search(r"one node +combine +\d+ us\n", out)
    assert re.search(r"one node +FP8 dispatch +\d+ us\n", out)
    assert re.search(r"two tiers / one: cached dispatch \d+\.\d\d, combine \d+\.\d\d, FP8", out)


@pytest.mark.parametrize("wrong", ["rows", "bytes"])
def test_what_is_wrong_fails(wrong: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from deep_comm import local
    from deep_comm.bench import nodes

    parsed = vars(nodes.make_parser().parse_args(
        ["--ranks-per-node", "1", "--tokens", "9", "--check-tokens", "5", "--experts", "8",
         "--topk", "2", "--calls", "1", "--device", "cpu", "--hidden", "64", "--sms", "2"]
    ))  # fmt: skip
    parsed.pop("ranks")
    if wrong == "rows":
        # The ranks bring other rows to the check than the reference is told of.
        monkeypatch.setattr(
            nodes.reference_internode, "dispatch",
            lambda x, *rest, **options: REFERENCE([part + 1 for part in x], *rest, **options),
        )  # fmt: skip
    else:
        carried = nodes._carried
        monkeypatch.setattr(nodes, "_carried", lambda buffer: 2 * carried(buffer))

    ended = local.run(lambda group: nodes.rank_main(group, nodes.Options(**parsed)), 2)
    assert ended == [False, False]
    assert "WRONG" in capsys.readouterr().out
