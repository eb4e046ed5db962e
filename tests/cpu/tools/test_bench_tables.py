"""Markdown tables of what the bench has written."""

import json
from pathlib import Path
from typing import Any

import pytest

from deep_comm.bench import tables


def line(name: str = "combine", **changes: Any) -> dict[str, Any]:
    made = {
        "name": name, "dtype": "bf16", "mode": "direct", "sms": "auto 15", "num_tokens": 128,
        "routing": "uniform", "execution": "eager", "is_rival": False, "mean_us": 12.34,
        "host_us": 7.0, "fraction_of_limit": 0.5,
    }  # fmt: skip
    return made | changes


HEADING = {"machine": {"gpu": "GPU"}, "num_ranks": 4, "date": "2026-01-02T03", "command": "it"}
RIVAL = dict(sms="", mode="", is_rival=True, mean_us=150.2, host_us=None)


def write(folder: Path, lines: list[dict[str, Any]], name: str = "normal") -> str:
    file = folder / f"{name}.json"
    file.write_text(json.dumps(HEADING | {"limit": {"gb_per_s": 349.6}, name: lines}))
    return str(file)


def test_a_token_sweep_has_a_column_a_size(tmp_path: Path, capsys: Any) -> None:
    lines = [
        line("NCCL", **RIVAL), line(), line(execution="graph", mean_us=11.0),
        line(num_tokens=16384, mean_us=1234.5), line("dispatch", execution="graph", dtype="fp8"),
    ]  # fmt: skip
    assert tables.main([write(tmp_path, lines)]) == 0
    assert capsys.readouterr().out == (
        "4 × GPU, 2026-01-02, `it`; link limit 350 GB/s\n\n"
        "| us, by tokens | 128 | 16384 |\n|---|---|---|\n"
        "| NCCL, BF16 | 150 | – |\n"
        "| combine, BF16, direct, auto | 12.3 (11.0) | 1234 |\n"
        "| dispatch, FP8, direct, auto | (12.3) | – |\n\n"
    )


def test_sms_and_routings(tmp_path: Path, capsys: Any) -> None:
    lines = [line("NCCL", **RIVAL), line(), line(sms="24", mean_us=1.0)]
    tables.main([write(tmp_path, lines), "--value", "limit"])
    assert capsys.readouterr().out.splitlines()[2:6] == [
        "| limit, by sms | auto | 24 |", "|---|---|---|", "| NCCL, BF16 | 50 | – |",
        "| combine, BF16, direct | 50 | 50 |",
    ]  # fmt: skip
    tables.main([write(tmp_path, [line(), line(routing="zipf", mean_us=99.96)])])
    assert (
        capsys.readouterr().out.splitlines()[4] == "| combine, BF16, direct, auto | 12.3 | 100.0 |"
    )


def test_low_latency_lines(tmp_path: Path, capsys: Any) -> None:
    made = line("pair", layout="packed", phases="hooked", combine_format="logfmt", num_blocks=3)
    for name in ("mode", "sms", "routing"):
        del made[name]
    lines = [made, made | {"num_tokens": 1, "execution": "graph"}]
    tables.main([write(tmp_path, lines, "low_latency"), "--value", "host"])
    last = capsys.readouterr().out.splitlines()[4]
    assert last == "| pair, BF16, packed, hooked, back in LogFMT | 7.0 | (7.0) |"


def test_a_file_without_lines_is_refused(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        tables.main([write(tmp_path, [])])
    assert "no lines" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tables.main([str(tmp_path / "absent.json")])
    assert "absent.json is not a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "document",
    [[], 7, {"normal": 7}, {"normal": [7]}, {"normal": [{"is_rival": False}]},
     {"normal": [line()]}, {"normal": [line(dtype="fp3")], **HEADING},
     {"normal": [line(mean_us="fast")], **HEADING},
     {"normal": [line(num_tokens=None)], **HEADING}],
)  # fmt: skip
def test_what_the_bench_has_not_written_is_refused(
    document: Any, tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps(document))
    with pytest.raises(SystemExit, match="2"):
        tables.main([str(file)])
    told = capsys.readouterr().err.splitlines()
    assert f"{file} is not what `deep_comm bench --json` writes: " in told[0] and len(told) == 2
    file.write_text("no JSON")
    with pytest.raises(SystemExit, match="2"):
        tables.main([str(file)])
