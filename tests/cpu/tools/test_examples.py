"""Every example runs, checks itself and says so."""

import json
import os
import sys
from pathlib import Path

import pytest
import warm

from deep_comm.trace import picture

ROOT = Path(__file__).resolve().parents[3]


def run(tmp_path: Path, name: str, *arguments: object, torchrun: int = 0) -> str:
    program = [*(warm.torchrun(torchrun) if torchrun else [sys.executable]), "-m"]
    done = warm.run(
        [*program, f"deep_comm.examples.{name}", *map(str, arguments)],
        capture_output=True, text=True, timeout=280, check=False, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_dispatch_and_combine_by_hand(tmp_path: Path, num_ranks: int) -> None:
    assert "sums are right" in run(tmp_path, "dispatch_combine", "--ranks", num_ranks)


def test_a_transformer_learns_and_equals_one_process_under_torchrun(tmp_path: Path) -> None:
    out = run(
        tmp_path, "moe_transformer", ROOT / "README.md", "--steps", 25, "--compare", torchrun=3
    )
    assert "after 25 steps on 3 ranks" in out
    assert "the single-process run has the same losses" in out


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_two_batches_and_shared_experts_overlap(tmp_path: Path, mode: str) -> None:
    out = run(tmp_path, "overlap", "--mode", mode, "--ranks", 2, "--trace", tmp_path)
    assert "all ways give the same results" in out
    for way in ("sequential", "shared", "two-batch"):
        assert json.loads((tmp_path / f"{way}.json").read_text())["traceEvents"]
        spans = picture.host_spans(tmp_path / f"{way}.json")
        calls = [span.name for span in spans if span.is_communication]
        ways = 2 if way == "two-batch" else 1
        for name in ("dispatch", "combine"):
            assert calls.count(picture.RANGE + name) == 3 * ways  # a layer and batch
        assert any("mm" in span.name for span in spans)
        assert picture.overlapped_share(spans) == 0.0  # one thread does one thing at a time
        assert f"{way}: " in out and "0% hidden behind computation" in out
    if picture.MISSING not in out:
        assert "<svg" in (tmp_path / "sequential.svg").read_text()
        assert (tmp_path / "overlap.png").read_bytes().startswith(b"\x89PNG")


def test_decoding_follows_its_inputs(tmp_path: Path) -> None:
    assert "all steps gave the reference's bits" in run(tmp_path, "decode_graph", "--ranks", 3)


def test_two_logical_nodes(tmp_path: Path) -> None:
    out = run(tmp_path, "two_nodes")
    assert "sums are right" in out and out.count("bytes on the rail") == 4


def test_one_flag_under_many_schedules(tmp_path: Path) -> None:
    out = run(tmp_path, "one_flag", "--seeds", 120)
    assert "120 of 120 schedules" in out and "verdict: OK" in out


def test_a_ring_under_many_schedules_and_broken(tmp_path: Path) -> None:
    out = run(tmp_path, "ring", "--seeds", 30)
    assert out.count("all rows right in 30 of 30") == 3 and "verdict: OK" in out


def test_an_example_that_does_not_exist_is_named() -> None:
    from deep_comm.simulate.example import wrong_words

    with pytest.raises(ValueError, match="one_flag or ring"):
        wrong_words("two_flags", 0, num_words=4)
    with pytest.raises(ValueError, match="one warp"):
        wrong_words("ring", 0, num_words=4, num_rows=2, num_threads=64)


# ---- the picture of a GPU's trace ----------------------------------------------------------------


def _trace(path: Path) -> Path:
    def kernel(name: str, stream: int, ts: float, dur: float) -> dict:
        return {
            "ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur,
            "args": {"stream": stream},
        }  # fmt: skip

    events = [
        kernel("gemm<float>", 7, 1000.0, 10.0),
        kernel("void deep_comm::run<DispatchKernel>", 13, 1005.0, 10.0),
        kernel("gemm<float>", 7, 1012.0, 1.0),
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 990.0, "dur": 50.0, "args": {}},
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_kernels_have_streams_and_overlap(tmp_path: Path) -> None:
    spans = picture.device_spans(_trace(tmp_path / "trace.json"))
    assert [(span.stream, span.begin_us, span.end_us) for span in spans] == [
        (7, 0.0, 10.0), (13, 5.0, 15.0), (7, 12.0, 13.0),
    ]  # fmt: skip
    assert [span.is_communication for span in spans] == [False, True, False]
    assert picture.overlapped_share(spans) == pytest.approx(0.6)


def test_the_last_of_equal_calls_begins_at_zero(tmp_path: Path) -> None:
    spans = [picture.Span(name, 7, at, at + 1.0) for at, name in enumerate("abbaab")]
    assert picture.last_of(spans, 3) == [
        picture.Span("a", 7, 0.0, 1.0), picture.Span("b", 7, 1.0, 2.0),
    ]  # fmt: skip
    assert picture.last_of(spans, 1) == spans
    for num_spans, num_calls in (
        (6, 2),
        (5, 3),
        (2, 3),
        (0, 1),
    ):  # "abb" and "aab"; no thirds; none
        with pytest.raises(ValueError, match=f"{num_spans} spans are not those of {num_calls}"):
            picture.last_of(spans[:num_spans], num_calls)


@pytest.mark.parametrize(
    ("name", "is_communication"),
    [("ncclDevKernel_AllGather_RING_LL", True), ("Memcpy PtoP (Device -> Device)", True),
     ("Memcpy DtoD (Device -> Device)", False), ("nvjet_tst_128x256", False)],
)  # fmt: skip
def test_rivals_kernels_and_copies_between_gpus_communicate(
    name: str, is_communication: bool
) -> None:
    assert picture.Span(name, 7, 0.0, 1.0).is_communication == is_communication


def test_a_trace_without_kernels_has_no_spans(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": []}))
    assert picture.device_spans(tmp_path / "trace.json") == []
    assert picture.overlapped_share([]) == 0.0


def test_the_picture_of_all_ways_has_a_lane_for_each_stream(tmp_path: Path) -> None:
    spans = picture.device_spans(_trace(tmp_path / "trace.json"))
    assert picture.summary(spans) == (
        "0.01 ms; communication 0.01 ms, of which 60% hidden behind computation (0.01 ms)"
    )
    file = tmp_path / "overlap.png"
    assert picture.write(file, {"one": spans, "two": spans[:2]}, on_host=False)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert picture._lane_name(13, spans, False) == "stream 13 (comm)"
    assert picture._lane_name(7, spans, False) == "stream 7 (compute)"
