"""Pictures of what the bench has written: of every mode, new files and old ones."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from deep_comm.bench import __main__ as bench
from deep_comm.bench import options, plot, report

MACHINE = {"deep_comm": "0.2.0", "torch": "2.13.0", "cores": 2, "device": "cpu"}
HEADING = {"machine": MACHINE, "date": "2026-01-02T03:04:05", "num_ranks": 4, "commit": "abc1234"}
SHAPE = "4 ranks x 8 tokens, hidden 7168 bf16, 256 experts, top-8, uniform routing"


def line(name: str, num_tokens: int, mean_us: float, **changes: Any) -> dict[str, Any]:
    made = {
        "name": name, "num_tokens": num_tokens, "mean_us": mean_us, "dtype": "bf16",
        "combine_format": "bf16", "routing": "uniform", "workload": SHAPE, "execution": "eager",
        "mode": "direct", "layout": "", "phases": "", "num_sms": 24, "is_rival": False,
        "wire_gb_per_s": 1e3 / mean_us,
    }  # fmt: skip
    return made | changes


def calls(key: str, lines: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return HEADING | {"limit": None, "ranks_per_node": None, key: lines} | changes


def rival(collective: str, num_tokens: int, mean_us: float) -> dict[str, Any]:
    return line(f"gloo {collective}", num_tokens, mean_us, mode="", num_sms=None, is_rival=True)


def normal() -> dict[str, Any]:
    lines = [
        line("layout", 8, 5.0, wire_gb_per_s=None), rival("all_to_all_single", 8, 90.0),
        rival("reduce_scatter", 8, 70.0), line("dispatch + combine", 8, 44.0),
        line("dispatch cached", 8, 13.0), line("dispatch", 8, 14.0, routing="zipf"),
    ]  # fmt: skip
    for num_tokens in (8, 64):
        lines += [
            line("combine", num_tokens, 12.0), line("dispatch", num_tokens, 11.0),
            line("dispatch", num_tokens, 10.0, num_sms=8),
            line("dispatch", num_tokens, 15.0, mode="ring", dtype="fp8", execution="graph"),
        ]  # fmt: skip
    return calls("normal", lines, limit={"gb_per_s": 409.5})


def nodes() -> dict[str, Any]:
    lines = [line("combine", tokens, 20.0, mode="two-tier") for tokens in (64, 4096)]
    return calls("normal", lines, ranks_per_node=2)


def low_latency() -> dict[str, Any]:
    lines = [rival("all_gather + reduce_scatter", 1, 90.0)]
    for layout in ("compact", "packed"):
        for phases in ("fused", "hooked"):
            about: dict[str, Any] = {"mode": "", "layout": layout, "phases": phases}
            lines += [line("pair", tokens, 9.0 + tokens, **about) for tokens in (1, 16)]
    lines.append(line("combine", 16, 8.0, mode="", layout="packed", phases="fused",
                      combine_format="logfmt"))  # fmt: skip
    return calls("low_latency", lines)


def layer() -> dict[str, Any]:
    def pair(decode: float | None) -> dict[str, Any]:
        timings = {"prefill": 50.0, "decode": decode, "auto": 21.0}
        return {
            **{name: us and {"mean_us": us} for name, us in timings.items()}, "ratio": 1.02
        }  # fmt: skip

    nothing = {"prefill": None, "decode": None, "auto": None, "ratio": None}
    lines = [
        {"tokens": tokens, "eager": pair(decode), "graph": nothing}
        for tokens, decode in ((1, 20.0), (64, 40.0), (4096, None))
    ]
    return HEADING | {"hidden": 7168, "experts": 256, "topk": 8, "decode_tokens": 16,
                      "left_out": [8192], "lines": lines}  # fmt: skip


def tensor_parallel() -> dict[str, Any]:
    def of(name: str, who: str, rows: int, mean_us: float, **changes: Any) -> dict[str, Any]:
        made = {"name": name, "who": who, "rows": rows, "depth": 7168, "columns": 512,
                "mean_us": mean_us, "is_rival": False}  # fmt: skip
        return made | changes

    lines = [
        of("up", who, rows, 10.0 * rows / 64)
        for who in ("unfused", "decomposed", "fused", "cuBLAS + NCCL")
        for rows in (64, 4096)
    ]
    lines.append(of("all-gather", "copy engines", 64, 9.0, depth=0))
    return HEADING | {"gb_per_s": None, "tensor_parallel": lines}


DOCUMENTS = {
    "tp": tensor_parallel,
    "normal": normal,
    "nodes": nodes,
    "low-latency": low_latency,
    "layer": layer,
}


def written(folder: Path, document: Any) -> str:
    file = folder / "bench.json"
    file.write_text(json.dumps(document))
    return str(file)


def texts_of(svg: Path) -> list[str]:
    """Every text of a well-formed picture."""
    found = ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(text.itertext()).strip() for text in found]


@pytest.mark.parametrize("mode", DOCUMENTS)
def test_a_file_of_every_mode_is_drawn(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, DOCUMENTS[mode]())
    for suffix, start in ((".svg", b"<?xml"), (".png", b"\x89PNG"), (".pdf", b"%PDF")):
        picture = tmp_path / f"picture{suffix}"
        assert bench.main(["--from", file, "--plot", str(picture)]) == 0
        assert capsys.readouterr().out == f"# deep_comm bench OK: drawn into {picture}\n"
        assert picture.read_bytes().startswith(start)
    said = " ".join(texts_of(tmp_path / "picture.svg"))
    for text in ("4 ranks of the host target", "2026-01-02", "commit abc1234", "deep_comm 0.2.0"):
        assert text in said, text
    if mode != "tp":
        assert "hidden 7168, 256 experts, top-8" in said and "tokens per rank" in said
    for text in {"normal": ["normal mode", "direct", "ring", "fp8", "graph", "link limit 409.5",
                            "not drawn: layout, zipf routing"],
                 "nodes": ["nodes of 2", "two-tier", "4096"],
                 "low-latency": ["low-latency mode", "compact", "bf16, logfmt", "16",
                                 "not drawn: hooked calls", "gloo all_gather, reduce_scatter"],
                 "tp": ["up", "all-gather", "fused", "cuBLAS + NCCL", "TFLOP/s", "512 columns",
                        "depth 7168", "rows of all ranks"],
                 "layer": ["prefill", "decode", "auto", "auto decodes up to 16", "target 1.05",
                           "Time was up before 8192 tokens"]}[mode]:  # fmt: skip
        assert text in said, text


def test_the_picture_has_the_figures_of_the_file() -> None:
    picture = plot.picture_of(normal())
    assert [panels[0].title for panels in picture.columns] == [
        "dispatch", "dispatch cached", "combine", "dispatch + combine"
    ]  # fmt: skip
    dispatch, rates = picture.columns[0]
    # The fastest number of SMs at each size, and of the collectives those that do the same job.
    assert [(it.who, it.payload, it.run_as, it.points) for it in dispatch.series] == [
        ("direct", "bf16", "eager", ((8, 10.0), (64, 10.0))),
        ("gloo all_to_all_single", "bf16", "eager", ((8, 90.0),)),
        ("ring", "fp8", "graph", ((8, 15.0), (64, 15.0))),
    ]
    assert rates.series[0].points == ((8, 100.0), (64, 100.0)) and rates.level
    combine = picture.columns[2][0]
    assert {it.who.split()[-1] for it in combine.series} == {
        "direct", "all_to_all_single", "reduce_scatter"
    }  # fmt: skip
    auto = plot.picture_of(layer()).columns
    assert len(auto) == 1  # nothing was captured
    assert auto[0][0].series[1].points == ((1, 20.0), (64, 40.0))


def test_sms_are_the_axis_where_only_they_were_swept() -> None:
    lines = [line("combine", 4096, 100.0 / sms, num_sms=sms) for sms in (8, 24)]
    picture = plot.picture_of(calls("normal", lines))
    assert picture.x_name == "SMs" and picture.title.endswith("4096 tokens per rank")
    assert [at for at, _ in picture.columns[0][0].series[0].points] == [8, 24]


def test_files_from_before_the_commit_was_written_are_drawn(tmp_path: Path) -> None:
    document = normal()
    del document["commit"]
    plot.draw(plot.read(written(tmp_path, document)), tmp_path / "old.svg")
    assert "commit not recorded" in " ".join(texts_of(tmp_path / "old.svg"))


def test_every_colour_has_one_for_dark_pages(tmp_path: Path) -> None:
    for mode, document in DOCUMENTS.items():
        plot.draw(plot.picture_of(document()), tmp_path / f"{mode}.svg")
        rules, drawn = (tmp_path / f"{mode}.svg").read_text().split("</style>", 1)
        for colour in plot.DARK:
            assert f'[style*="stroke: {colour}"]' in rules
            drawn = drawn.replace(f": {colour}", "")
        assert "fill: #" not in drawn.replace("fill: none", "") and "stroke: #" not in drawn
        # matplotlib leaves black out: a text without a colour would be black on a dark page.
        assert drawn.count("<text") == drawn.count("<text>") + drawn.count('<text style="')


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("no JSON", "Expecting value"), ([], "list"), ({"choices": []}, "is missing"),
        (calls("normal", []), "no lines"), ({**layer(), "lines": []}, "no lines"),
        (calls("normal", [line("combine", 8, 1.0, workload="?")]), "workload is '?'"),
        ({**normal(), "machine": {}}, "'cores' is missing"),
    ],
)  # fmt: skip
def test_other_files_are_refused(
    document: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, document)
    if document == "no JSON":
        Path(file).write_text(document)
    with pytest.raises(SystemExit) as ended:
        options.parse(["--from", file, "--plot", str(tmp_path / "x.svg")])
    err = capsys.readouterr().err
    assert ended.value.code == 2 and "is not what `deep_comm bench --json` writes" in err
    assert said in err and not (tmp_path / "x.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "FILE"], "--from: goes with --plot alone; got no --plot"),
        (["--from", "FILE", "--plot", "x.svg", "--topk", "2"], "alone; got --topk"),
        (["--from", "FILE", "--plot", "x.svg", "--mode", "layer"], "alone; got --mode"),
        (["--from", "no.json", "--plot", "x.svg"], "no.json is not a file"),
        (["--plot", "x.jpeg"], "x.jpeg must end in .svg, .png, .pdf"),
        (["--plot", "/no/such/folder/x.svg"], "which is no folder"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_anything_starts(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, normal())
    with pytest.raises(SystemExit):
        options.parse([file if it == "FILE" else it for it in arguments])
    assert said in capsys.readouterr().err


def test_without_matplotlib_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    for mode in ("direct", "nodes", "low-latency", "layer"):
        with pytest.raises(SystemExit):
            options.parse(["--device", "cpu", "--mode", mode, "--plot", "x.svg"])
        assert 'pip install "deep_comm[plot]"' in capsys.readouterr().err


def test_a_picture_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from deep_comm.bench.__main__ import main\n"
        f"sys.exit(main(['--from', {written(tmp_path, layer())!r}, '--plot', 'x.svg']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x.svg").exists()


def test_the_commit_is_that_of_the_checkout_which_has_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    other = tmp_path / "site-packages"
    other.mkdir()
    (other / "__init__.py").touch()
    git("init", "-q")
    git("add", "package")
    git("commit", "-q", "-m", "first")
    short = git("rev-parse", "--short", "HEAD")
    assert report.commit(package) == short
    (package / "__init__.py").write_text("changed = True\n")
    assert report.commit(package) == f"{short}-dirty"
    # Inside another project's checkout, what pip has written counts.
    taken: dict[str, Any] = {"vcs_info": {"commit_id": "0123456789abcdef"}}

    class Distribution:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return json.dumps(taken)

    monkeypatch.setattr(report.metadata, "distribution", lambda _name: Distribution())
    assert report.commit(other) == "0123456"
    taken = {"url": "file:///somewhere", "dir_info": {"editable": True}}
    assert report.commit(other) is None
